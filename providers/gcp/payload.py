"""What we send to Compute Engine.

Invariant: pure; the same label gives the same name and request id, and every machine is a Spot VM that Google deletes,
not stops, on preemption and after its longest run.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import uuid
from dataclasses import dataclass
from typing import Any

from providers.base import BadRequest, Billing, CapabilityError, Offer, RentSpec

LABEL_KEY, PORTS_KEY = "echo2-label", "echo2-ports"
"""Keys of metadata. Google's labels take neither colons nor capitals, so the exact label is kept in metadata."""
MAX_SCRIPT = 200_000
MAX_LABEL = 256
_NAMESPACE = uuid.UUID("6f3a1c1e-6f0c-5d7e-9a55-1f2d3c4b5a69")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ZONE = re.compile(r"[a-z]+(?:-[a-z0-9]+)+-[a-z]")
_TYPE = re.compile(r"[a-z0-9-]{1,63}")
TOLD_BY = {"ECHO2_NOTICES": "gce"}
"""The node asks Google's metadata server whether its machine is preempted."""
_META = "http://metadata.google.internal/computeMetadata/v1/instance/network-interfaces/0/access-configs/0/external-ip"


@dataclass(frozen=True, slots=True)
class Shape:
    """How every machine of an account is made."""

    boot_image: str
    """Disk image or family with drivers, Python and bash, as `projects/…/global/images/family/…`."""
    network: str = "global/networks/default"
    network_tag: str = "echo2"
    disk_type: str = "pd-balanced"
    max_run_s: int = 86_400


def instance_name(label: str) -> str:
    """Google's name for a label: letters, digits and dashes only, so it is a hash."""
    return f"echo2-{hashlib.sha256(label.encode()).hexdigest()[:32]}"


def request_id(label: str, action: str) -> str:
    """The UUID under which Google does a thing once."""
    return str(uuid.uuid5(_NAMESPACE, f"{action}:{label}"))


def google_label(label: str) -> str:
    """The label as far as Google's labels can hold it: for people who look at the console."""
    return re.sub(r"[^a-z0-9_-]", "-", label.lower())[:63]


def place_of(offer_id: str) -> tuple[str, str]:
    """Zone and machine type of an offer made by `search`. BadRequest for anything else."""
    zone, _, kind = offer_id.partition("/")
    if not _ZONE.fullmatch(zone) or not _TYPE.fullmatch(kind):
        raise BadRequest(f"{offer_id[:100]!r} is no offer of Google Cloud: rent one that search returned")
    return zone, kind


def check_billing(billing: Billing) -> None:
    """CapabilityError for everything but spot at the market's price."""
    if billing is not Billing.SPOT_MARKET:
        raise CapabilityError(f"this adapter rents Google's Spot VMs only, not {billing.value}: use spot_market")


def script(spec: RentSpec) -> str:
    """The startup script: environment, the public side by the names that a node reads, then `onstart`."""
    lines = ["#!/bin/bash", 'export HOME="${HOME:-/root}"', 'cd "$HOME"']
    if spec.ports:
        lines.append(f"PUBLIC_IPADDR=\"$(curl -sf -m 5 -H 'Metadata-Flavor: Google' {_META})\"")
        lines += ["export PUBLIC_IPADDR", *(f"export VAST_TCP_PORT_{port}={port}" for port in spec.ports)]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in {**TOLD_BY, **spec.env}.items()]
    return "\n".join([*lines, spec.onstart, ""])


def _check(offer: Offer, spec: RentSpec) -> None:
    check_billing(offer.billing)
    if spec.bid_micros_h is not None:
        raise BadRequest("Google takes no bids, a Spot VM costs the price in force: leave bid_micros_h out")
    if not 1 <= len(spec.label) <= MAX_LABEL:
        raise BadRequest(f"label has {len(spec.label)} characters, expected 1 to {MAX_LABEL}")
    if not math.isfinite(spec.disk_gb) or spec.disk_gb < 10:
        raise BadRequest(f"disk_gb is {spec.disk_gb}, Google takes 10 or more, and as much as the image needs")
    wrong = [name for name in spec.env if not _VARIABLE.fullmatch(name)]
    if wrong:
        raise BadRequest(f"env has a name that is no variable's: {wrong[0][:60]!r}")
    if any(not 0 < port < 65_536 for port in spec.ports):
        raise BadRequest(f"ports are {spec.ports}, expected 1 to 65535")
    if len(script(spec).encode()) > MAX_SCRIPT:
        raise BadRequest(f"onstart and env have more than {MAX_SCRIPT} bytes together: make them shorter")


def insert_body(offer: Offer, spec: RentSpec, shape: Shape) -> dict[str, Any]:
    """The instance to insert. BadRequest or CapabilityError when it must not be sent."""
    _check(offer, spec)
    zone, kind = place_of(offer.offer_id)
    metadata = {LABEL_KEY: spec.label, PORTS_KEY: ",".join(map(str, spec.ports)), "startup-script": script(spec)}
    disk = {
        "boot": True, "autoDelete": True,
        "initializeParams": {
            "sourceImage": shape.boot_image, "diskSizeGb": str(math.ceil(spec.disk_gb)),
            "diskType": f"zones/{zone}/diskTypes/{shape.disk_type}",
        },
    }  # fmt: skip
    return {
        "name": instance_name(spec.label), "description": spec.label,
        "machineType": f"zones/{zone}/machineTypes/{kind}",
        "labels": {"echo2": "node", LABEL_KEY: google_label(spec.label)}, "tags": {"items": [shape.network_tag]},
        "metadata": {"items": [{"key": key, "value": value} for key, value in metadata.items()]}, "disks": [disk],
        "networkInterfaces": [
            {"network": shape.network, "accessConfigs": [{"name": "External NAT", "type": "ONE_TO_ONE_NAT"}]}
        ],
        "scheduling": {
            "provisioningModel": "SPOT", "instanceTerminationAction": "DELETE", "onHostMaintenance": "TERMINATE",
            "automaticRestart": False, "maxRunDuration": {"seconds": str(shape.max_run_s)},
        },
    }  # fmt: skip
