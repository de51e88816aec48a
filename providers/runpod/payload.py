"""What we send to RunPod.

Invariant: pure; fields that would be null are left out, and what RunPod would refuse or read differently is never sent.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from typing import Any

from providers.base import BadRequest, Billing, CapabilityError, Offer, RentSpec

MAX_PORTS = 10
CLOUDS = ("SECURE", "COMMUNITY")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Pool:
    """Where a pod may be placed. RunPod's catalogue has no offers with an identity of their own."""

    cloud: str
    count: int
    data_center: str
    """"" lets RunPod choose."""
    gpu_id: str

    @property
    def offer_id(self) -> str:
        """The pool as an offer's id; RunPod's card ids have no slash before the last part."""
        return f"{self.cloud}/{self.count}/{self.data_center}/{self.gpu_id}"

    @property
    def machine_id(self) -> str:
        """Key of cool-downs: the card in this cloud and data centre, whatever the count."""
        return f"{self.cloud}/{self.data_center}/{self.gpu_id}"


def pool_of(offer_id: str) -> Pool:
    """The pool of an offer made by `search`. BadRequest for anything else."""
    parts = offer_id.split("/", 3)
    if len(parts) != 4 or parts[0] not in CLOUDS or not parts[1].isdecimal() or int(parts[1]) < 1 or not parts[3]:
        raise BadRequest(f"{offer_id[:100]!r} is no offer of RunPod: rent one that search returned")
    return Pool(parts[0], int(parts[1]), parts[2], parts[3])


def check_billing(billing: Billing) -> None:
    """CapabilityError for everything but on demand: RunPod has taken interruptible pods out of its API."""
    if billing is not Billing.ON_DEMAND:
        raise CapabilityError(f"RunPod has no {billing.value} machines: use on_demand")


def _check(offer: Offer, spec: RentSpec) -> None:
    check_billing(offer.billing)
    if spec.bid_micros_h is not None:
        raise BadRequest("RunPod takes no bids: leave bid_micros_h out")
    for what, given in (("label", spec.label), ("image", spec.image), ("onstart", spec.onstart.strip())):
        if not given:
            raise BadRequest(f"{what} is empty: give one")
    if len(spec.ports) > MAX_PORTS or any(not 0 < port < 65_536 for port in spec.ports):
        raise BadRequest(f"ports are {spec.ports}, RunPod takes up to {MAX_PORTS} of 1 to 65535")
    if not math.isfinite(spec.disk_gb) or spec.disk_gb <= 0:
        raise BadRequest(f"disk_gb is {spec.disk_gb}, RunPod takes 1 or more")
    wrong = [name for name in spec.env if not _NAME.fullmatch(name)]
    if wrong:
        raise BadRequest(f"env has a name that is no variable's: {wrong[0][:60]!r}")


def script(spec: RentSpec) -> str:
    """The pod's script: RunPod's names of the public side under those that a node reads, then `onstart`."""
    lines = ['export PUBLIC_IPADDR="${RUNPOD_PUBLIC_IP:-}"'] if spec.ports else []
    lines += [f'export VAST_TCP_PORT_{port}="${{RUNPOD_TCP_PORT_{port}:-}}"' for port in spec.ports]
    return "\n".join([*lines, spec.onstart])


def create_body(offer: Offer, spec: RentSpec) -> dict[str, Any]:
    """The create request. BadRequest or CapabilityError when it must not be sent."""
    _check(offer, spec)
    pool = pool_of(offer.offer_id)
    body: dict[str, Any] = {
        "name": spec.label, "image": spec.image, "gpu": {"id": pool.gpu_id, "count": pool.count}, "cloud": pool.cloud,
        "disk": max(1, math.ceil(spec.disk_gb)), "env": dict(spec.env),
        "args": f"bash -c {shlex.quote(script(spec))}",
    }  # fmt: skip
    if pool.data_center:
        body["dataCenterIds"] = [pool.data_center]
    if spec.ports:
        body["ports"] = [f"{port}/tcp" for port in spec.ports]
    return body
