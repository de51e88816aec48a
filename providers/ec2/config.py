"""Settings of the EC2 adapter and the table of instance types.

Invariant: whatever can't work is refused here with its name and what is expected, before any call.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from providers.base import BadRequest

DEFAULT_TYPES = Path(__file__).with_name("instance_types.toml")
BIG_VCPUS, SMALL_GBIT_S = 32, 5.0


@dataclass(frozen=True, slots=True)
class InstanceType:
    """One row of the table. Memory is MiB per GPU, the link Gbit/s inside the region."""

    name: str
    gpu_name: str
    num_gpus: int
    gpu_ram_mb: int
    vcpus: int
    network_gbit_s: float

    @property
    def internet_mbps(self) -> float:
        """Mbit/s to the internet: half of the link from 32 vCPUs on, at most 5 Gbit/s below (AWS, "instance network
        bandwidth")."""
        if self.vcpus >= BIG_VCPUS:
            return self.network_gbit_s * 500
        return min(self.network_gbit_s, SMALL_GBIT_S) * 1000


@dataclass(frozen=True, slots=True)
class Ec2Config:
    """One account in one region. Prices that EC2's API does not tell are settings, in micro-dollars."""

    region: str
    image_id: str
    """AMI with the GPU's driver, Python and pip; `RentSpec.image` means nothing to EC2."""
    subnets: Mapping[str, str] = field(default_factory=dict)
    """Availability zone to subnet. Empty: the default VPC, every zone. Else only these zones are searched."""
    security_group_ids: tuple[str, ...] = ()
    key_name: str | None = None
    instance_profile: str | None = None
    """Name of an IAM profile for the machines. A rented node needs none."""
    instance_types: tuple[str, ...] = ()
    """Names of the table to search; empty means all."""
    types_file: Path = DEFAULT_TYPES
    product: str = "Linux/UNIX"
    root_device: str = "/dev/sda1"
    """The AMI's root device: `/dev/sda1` (Ubuntu) or `/dev/xvda` (Amazon Linux)."""
    public_ip: bool = True
    """Give machines a public IPv4 address, which is billed; without one the subnet needs a NAT."""
    ebs_micros_gb_month: int = 80_000
    """gp3, us-east-1."""
    egress_micros_gb: int = 90_000
    """To the internet, first 10 TB, us-east-1."""
    ingress_micros_gb: int = 0
    ipv4_micros_h: int = 5_000
    reliability: float = 0.95
    """EC2 has no figure of its own for a type and zone: what `min_reliability` is held against."""
    notice_queue_url: str | None = None
    """SQS queue that an EventBridge rule sends EC2's interruption events to."""
    endpoint_url: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    """None: boto3's own chain (environment, profile, role)."""
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuse values that can't work."""
        if not self.region or not self.image_id:
            raise BadRequest("region and image_id must be set: e.g. us-east-1 and an AMI of that region with CUDA")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise BadRequest("give both access_key_id and secret_access_key, or none for boto3's own chain")
        if not 0 <= self.reliability <= 1:
            raise BadRequest(f"reliability is {self.reliability}, expected 0 to 1")
        prices = (self.ebs_micros_gb_month, self.egress_micros_gb, self.ingress_micros_gb, self.ipv4_micros_h)
        if min(prices) < 0:
            raise BadRequest("a price is below 0: give micro-dollars of 0 or more")

    def secrets(self) -> tuple[str, ...]:
        """What must show up in no message."""
        return tuple(s for s in (self.secret_access_key, self.session_token, self.access_key_id) if s)


def load_types(config: Ec2Config) -> dict[str, InstanceType]:
    """The types to search. BadRequest for a table that can't be read or a name that is not in it."""
    try:
        with config.types_file.open("rb") as file:
            rows = tomllib.load(file)
        table = {
            name: InstanceType(
                name, str(row["gpu_name"]), int(row["num_gpus"]), int(row["gpu_ram_mb"]), int(row["vcpus"]),
                float(row["network_gbit_s"]),
            )
            for name, row in rows.items()
        }  # fmt: skip
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"instance types {config.types_file}: {type(error).__name__} {error}") from error
    if unknown := sorted(set(config.instance_types) - set(table)):
        raise BadRequest(f"instance type {unknown[0]} is not in {config.types_file}: add it there or leave it out")
    return {name: table[name] for name in config.instance_types or table}
