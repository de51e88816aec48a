"""Reading EC2's prices and instances.

Invariant: pure; an unreadable price makes an offer unusable and an instance's rate None, never zero; an unheard state
is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from providers.base import MICROS_PER_USD, Billing, Instance, MalformedAnswer, Offer, OfferQuery, Phase

from .config import Ec2Config, InstanceType

Row = Mapping[str, Any]
Pool = tuple[str, str]
"""Instance type and availability zone."""
LABEL_TAG, PORTS_TAG = "echo2:label", "echo2:ports"
MAX_PORTS = 64
LISTED_STATES = ("pending", "running", "shutting-down", "stopping", "stopped")
_PHASES: Mapping[str, Phase] = {
    "pending": Phase.PENDING, "running": Phase.RUNNING, "shutting-down": Phase.TERMINATING,
    "stopping": Phase.PAUSED, "stopped": Phase.PAUSED, "terminated": Phase.TERMINATING,
}  # fmt: skip
_OURS = ("Client.UserInitiatedShutdown",)
"""State reasons of an end that somebody asked the API for."""


class Unreadable(ValueError):
    """A field is missing or has no sense."""


def micros(dollars: Any) -> int:
    """A price in dollars, as EC2's string, in whole micro-dollars."""
    try:
        value = Decimal(str(dollars)) * MICROS_PER_USD
    except InvalidOperation:
        raise Unreadable(f"price is {dollars!r}, expected dollars") from None
    if not value.is_finite() or value <= 0:
        raise Unreadable(f"price is {dollars!r}, expected dollars above 0")
    return max(1, round(value))


def newest_prices(rows: Iterable[Any], types: Mapping[str, InstanceType], product: str) -> dict[Pool, int]:
    """Micro-dollars per hour in force, per type and zone. Unreadable when there are rows and none can be read."""
    newest: dict[Pool, tuple[datetime, int]] = {}
    read = unread = 0
    for row in rows:
        try:
            pool, at = (str(row["InstanceType"]), str(row["AvailabilityZone"])), row["Timestamp"]
            price = micros(row["SpotPrice"])
            if not isinstance(at, datetime):
                raise Unreadable(f"Timestamp is {at!r}")
        except (KeyError, TypeError, Unreadable):
            unread += 1
            continue
        read += 1
        if row.get("ProductDescription", product) != product or pool[0] not in types:
            continue
        if pool not in newest or at > newest[pool][0]:
            newest[pool] = (at, price)
    if unread and not read:
        raise Unreadable(f"none of {unread} spot prices can be read")
    return {pool: price for pool, (_, price) in newest.items()}


def pool_id(pool: Pool) -> str:
    """Identity of a pool: what an offer and a cool-down are named after."""
    return f"{pool[0]}/{pool[1]}"


def pool_of(offer_id: str) -> Pool:
    """Inverse of `pool_id`. Unreadable for anything else."""
    name, slash, zone = offer_id.partition("/")
    if not (name and slash and zone):
        raise Unreadable(f"offer_id is {offer_id!r}, expected TYPE/ZONE")
    return name, zone


def offer(pool: Pool, price: int, kind: InstanceType, config: Ec2Config, provider: str, now: datetime) -> Offer:
    """One pool as an offer."""
    address = config.ipv4_micros_h if config.public_ip else 0
    return Offer(
        provider=provider, offer_id=pool_id(pool), machine_id=pool_id(pool), gpu_name=kind.gpu_name,
        num_gpus=kind.num_gpus, gpu_ram_mb=kind.gpu_ram_mb, billing=Billing.SPOT_MARKET,
        compute_micros_h=price + address, disk_micros_gb_month=config.ebs_micros_gb_month,
        upload_micros_gb=config.egress_micros_gb, download_micros_gb=config.ingress_micros_gb,
        up_mbps=kind.internet_mbps, down_mbps=kind.internet_mbps, reliability=config.reliability, region=pool[1],
        max_duration_s=None, dlperf=0.0, ports=MAX_PORTS if config.public_ip else 0, fetched_at=now, raw_status="spot",
    )  # fmt: skip


def gpu_key(name: str) -> str:
    """GPU names compare whole, underscores as spaces, without case."""
    return " ".join(name.replace("_", " ").split()).casefold()


def passes(found: Offer, query: OfferQuery, config: Ec2Config) -> bool:
    """Every filter of the query, and the zones that we have a subnet in."""
    names = {gpu_key(name) for name in query.gpu_names}
    return (
        (not names or gpu_key(found.gpu_name) in names)
        and (query.max_compute_micros_h is None or found.compute_micros_h <= query.max_compute_micros_h)
        and found.reliability >= query.min_reliability
        and found.ports >= query.min_ports
        and (not config.subnets or found.region in config.subnets)
    )


def phase_of(state: str, reason: str) -> Phase:
    """Phase of an instance. One that ends without anybody's call (taken away, failed to start) has FAILED."""
    if state in ("shutting-down", "terminated") and reason and reason not in _OURS:
        return Phase.FAILED
    return _PHASES.get(state, Phase.UNKNOWN)


def _tags(row: Row) -> dict[str, str]:
    return {str(tag.get("Key")): str(tag.get("Value", "")) for tag in row.get("Tags") or [] if isinstance(tag, Mapping)}


def _ports(tags: Mapping[str, str]) -> dict[int, int]:
    return {int(p): int(p) for p in tags.get(PORTS_TAG, "").split() if p.isdigit()}


def instance(row: Any, types: Mapping[str, InstanceType], prices: Mapping[Pool, int], provider: str) -> Instance:
    """One instance. Raises MalformedAnswer when it has no id or no state."""
    state = (row.get("State") or {}).get("Name") if isinstance(row, Mapping) else None
    if not isinstance(state, str) or not isinstance(row.get("InstanceId"), str):
        raise MalformedAnswer("an instance without an id or a state", provider=provider, raw=str(row))
    tags, reason = _tags(row), row.get("StateReason") or {}
    code, message = str(reason.get("Code") or ""), str(reason.get("Message") or "")
    pool = (str(row.get("InstanceType") or ""), str((row.get("Placement") or {}).get("AvailabilityZone") or ""))
    spot, kind = row.get("InstanceLifecycle") == "spot", types.get(pool[0])
    phase, launched = phase_of(state, code), row.get("LaunchTime")
    begun = launched.astimezone(UTC) if isinstance(launched, datetime) and phase is not Phase.PENDING else None
    host = str(row.get("PublicIpAddress") or "")
    return Instance(
        provider=provider, instance_id=row["InstanceId"], label=tags.get(LABEL_TAG, ""), phase=phase, raw_status=state,
        detail=f"{code}: {message}".strip(": "), billing=Billing.SPOT_MARKET if spot else Billing.ON_DEMAND,
        compute_micros_h=prices.get(pool) if spot else None, machine_id=pool_id(pool),
        gpu_name=kind.gpu_name if kind else pool[0], started_at=begun, public_host=host or None,
        ports=_ports(tags) if host else {},
    )  # fmt: skip
