"""What we send to EC2.

Invariant: pure; the same order for the same pool is the same request, byte for byte, because EC2 compares requests
that carry the same token. Environment values go into user data only, never into tags.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from typing import Any

from providers.base import BadRequest, Billing, CapabilityError, Offer, RentSpec

from .config import Ec2Config
from .parse import LABEL_TAG, MAX_PORTS, PORTS_TAG, Unreadable, pool_of

MAX_USER_DATA = 16_384
MAX_TAG = 256
LOG = "/var/log/echo2.log"
TOLD_BY = {"ECHO2_NOTICES": "ec2"}
"""The node asks EC2's metadata service when its machine will be interrupted."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAGGED = ("instance", "volume", "spot-instances-request")


def client_token(label: str) -> str:
    """EC2's idempotency token of an intent: 64 characters, the most that it takes."""
    return hashlib.sha256(label.encode()).hexdigest()


def user_data(spec: RentSpec) -> str:
    """The script that the machine runs at its first boot, as root.

    When it ends, well or not, the machine shuts down, which terminates it: an idle one would go on costing.
    """
    env = {**TOLD_BY, **spec.env}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items()))
    return (
        f"#!/bin/bash\nexec > >(tee -a {LOG} /dev/console) 2>&1\nexport HOME=/root\ncd /root\n{exports}"
        f'bash -c {shlex.quote(spec.onstart)}\necho "onstart ended with status $?"\nshutdown -h now\n'
    )


def _check(offer: Offer, spec: RentSpec) -> None:
    if offer.billing is not Billing.SPOT_MARKET:
        raise CapabilityError(f"the EC2 adapter has no {offer.billing.value} machines: use spot_market")
    if spec.bid_micros_h is not None:
        raise BadRequest("EC2 spot has no bids, the price in force is paid: leave bid_micros_h out")
    for name, value in spec.env.items():
        if not _NAME.fullmatch(name):
            raise BadRequest(f"env name {name!r} is no shell variable: use letters, digits and _")
        if "\0" in value:
            raise BadRequest(f"value of env {name} holds a NUL character: take it out")
    sizes = (
        ("label", len(spec.label), 1, MAX_TAG), ("number of ports", len(spec.ports), 0, MAX_PORTS),
        ("user data (env and onstart)", len(user_data(spec).encode()), 0, MAX_USER_DATA),
        ("disk_gb", spec.disk_gb, 1, 16_384),
    )  # fmt: skip
    for what, size, least, most in sizes:
        if not least <= size <= most:
            raise BadRequest(f"{what} is {size}, EC2 takes {least} to {most}")
    ports = " ".join(map(str, spec.ports))
    if len(ports) > MAX_TAG:
        raise BadRequest(f"the ports take {len(ports)} characters, EC2's tags hold {MAX_TAG}: publish fewer")


def _network(config: Ec2Config, zone: str) -> dict[str, Any]:
    groups = list(config.security_group_ids)
    if zone not in config.subnets:
        return {"SecurityGroupIds": groups} if groups else {}
    card: dict[str, Any] = {
        "DeviceIndex": 0, "SubnetId": config.subnets[zone], "AssociatePublicIpAddress": config.public_ip,
        "DeleteOnTermination": True,
    }  # fmt: skip
    return {"NetworkInterfaces": [{**card, "Groups": groups} if groups else card]}


def create_request(offer: Offer, spec: RentSpec, config: Ec2Config) -> dict[str, Any]:
    """Arguments of RunInstances. BadRequest or CapabilityError for what EC2 would refuse or misread."""
    _check(offer, spec)
    try:
        name, zone = pool_of(offer.offer_id)
    except Unreadable as error:
        raise BadRequest(f"not an offer of EC2: {error}") from error
    if config.subnets and zone not in config.subnets:
        raise BadRequest(f"no subnet for zone {zone}: add one to subnets")
    tags = [{"Key": "Name", "Value": spec.label}, {"Key": LABEL_TAG, "Value": spec.label}]
    if spec.ports:
        tags.append({"Key": PORTS_TAG, "Value": " ".join(map(str, spec.ports))})
    disk = {"VolumeSize": math.ceil(spec.disk_gb), "VolumeType": "gp3", "DeleteOnTermination": True}
    request: dict[str, Any] = {
        "ClientToken": client_token(spec.label), "MinCount": 1, "MaxCount": 1, "InstanceType": name,
        "ImageId": config.image_id, "Placement": {"AvailabilityZone": zone}, "UserData": user_data(spec),
        "InstanceMarketOptions": {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        },
        "InstanceInitiatedShutdownBehavior": "terminate",
        "BlockDeviceMappings": [{"DeviceName": config.root_device, "Ebs": disk}],
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in _TAGGED],
        **_network(config, zone),
    }  # fmt: skip
    if config.key_name is not None:
        request["KeyName"] = config.key_name
    if config.instance_profile is not None:
        request["IamInstanceProfile"] = {"Name": config.instance_profile}
    return request
