"""Reading Compute Engine's instances, and offers out of the table of prices.

Invariant: pure; what the API does not tell (the rate) is None, and an unheard status is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from providers.base import Billing, Instance, MalformedAnswer, Offer, OfferQuery, Phase

from .payload import LABEL_KEY, PORTS_KEY
from .table import Row, Table

PHASES: Mapping[str, Phase] = {
    "PENDING": Phase.PENDING,
    "PROVISIONING": Phase.PENDING,
    "STAGING": Phase.LOADING,
    "RUNNING": Phase.RUNNING,
    # Preempted, or shut down from inside. No GPU is paid any more, but its disk is until the machine is deleted.
    "TERMINATED": Phase.PAUSED,
    "STOPPED": Phase.PAUSED,
    "SUSPENDED": Phase.PAUSED,
    "SUSPENDING": Phase.PAUSED,
    "PENDING_STOP": Phase.TERMINATING,
    "STOPPING": Phase.TERMINATING,
    "DEPROVISIONING": Phase.TERMINATING,
    # The host is being mended: the caller waits with a deadline.
    "REPAIRING": Phase.UNKNOWN,
}
MAX_PORTS = 64


def _key(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()


def offer(row: Row, table: Table, provider: str, reliability: float, max_run_s: int, now: datetime) -> Offer:
    """One row of the table as an offer."""
    return Offer(
        provider=provider, offer_id=row.offer_id, machine_id=row.offer_id, gpu_name=row.gpu_name,
        num_gpus=row.num_gpus, gpu_ram_mb=row.gpu_ram_mb, billing=Billing.SPOT_MARKET,
        compute_micros_h=row.spot_micros_h, disk_micros_gb_month=table.disk_micros_gb_month,
        upload_micros_gb=table.egress_micros_gb, download_micros_gb=0, up_mbps=table.external_mbps,
        down_mbps=table.external_mbps, reliability=reliability, region=row.zone, max_duration_s=float(max_run_s),
        dlperf=0.0, ports=MAX_PORTS, fetched_at=now, raw_status=f"listed price of {row.as_of}",
    )  # fmt: skip


def passes(found: Offer, query: OfferQuery) -> bool:
    """Every filter of the query."""
    names = {_key(name) for name in query.gpu_names}
    return (
        (not names or _key(found.gpu_name) in names)
        and (query.max_compute_micros_h is None or found.compute_micros_h <= query.max_compute_micros_h)
        and found.reliability >= query.min_reliability
        and (found.max_duration_s is None or found.max_duration_s >= query.min_duration_s)
        and found.ports >= query.min_ports
    )


def _metadata(row: Mapping[str, Any]) -> dict[str, str]:
    box = row.get("metadata")
    items = box.get("items") if isinstance(box, Mapping) else None
    rows = [one for one in items or [] if isinstance(one, Mapping)]
    return {str(one.get("key")): str(one.get("value") or "") for one in rows}


def _address(row: Mapping[str, Any]) -> str | None:
    for interface in row.get("networkInterfaces") or []:
        for access in interface.get("accessConfigs") or []:
            if access.get("natIP"):
                return str(access["natIP"])
    return None


def _moment(value: object) -> datetime | None:
    try:
        read = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return read.astimezone(UTC) if read is not None and read.tzinfo else None


def _last(value: object) -> str:
    return str(value or "").rsplit("/", 1)[-1]


def instance(row: Mapping[str, Any], table: Table, provider: str) -> Instance:
    """One instance, ours or not. MalformedAnswer without name, zone or status. The id is `ZONE/NAME`."""
    name, zone, status = row.get("name"), _last(row.get("zone")), row.get("status")
    if not isinstance(name, str) or not name or not zone or not isinstance(status, str):
        raise MalformedAnswer("an instance without name, zone or status", provider=provider, raw=str(sorted(row)))
    told, kind = _metadata(row), _last(row.get("machineType"))
    schedule = row.get("scheduling")
    model = schedule.get("provisioningModel") if isinstance(schedule, Mapping) else None
    phase = PHASES.get(status, Phase.UNKNOWN)
    address = _address(row)
    ports = {int(p): int(p) for p in told.get(PORTS_KEY, "").split(",") if p.isdecimal()} if address else {}
    begun = None if phase in (Phase.PENDING, Phase.LOADING) else _moment(row.get("lastStartTimestamp"))
    return Instance(
        provider=provider, instance_id=f"{zone}/{name}", label=told.get(LABEL_KEY, ""), phase=phase, raw_status=status,
        detail=str(row.get("statusMessage") or ("preempted or shut down; its disk is still billed"
                                                if phase is Phase.PAUSED else "")),
        billing=Billing.SPOT_MARKET if model == "SPOT" else Billing.ON_DEMAND if model == "STANDARD" else None,
        compute_micros_h=None, machine_id=f"{zone}/{kind}", gpu_name=table.gpu_of(kind), started_at=begun,
        public_host=address, ports=ports,
    )  # fmt: skip
