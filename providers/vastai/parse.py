"""Reading vast.ai's offers, instances and charges.

Invariant: pure; a missing or unreadable price makes an offer unusable and an instance's rate None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

from providers.base import (
    HOURS_PER_MONTH,
    MICROS_PER_USD,
    Billing,
    Charge,
    Instance,
    MalformedAnswer,
    Offer,
    OfferQuery,
    Phase,
    PriceIncrease,
)

from .phases import detail_of, phase_of

Row = Mapping[str, Any]
SECONDS_PER_HOUR = 3600
_LAST_EPOCH = 10**11
ChargeKind = Literal["gpu", "disk", "download", "upload"]
_CHARGES: Mapping[str, ChargeKind] = {"gpu": "gpu", "disk": "disk", "bwd": "download", "bwu": "upload"}


class Unreadable(ValueError):
    """A field is missing or has no sense."""


def number(row: Row, name: str) -> float:
    """A finite number; Unreadable otherwise."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Unreadable(f"{name} is {value!r}, expected a number")
    return float(value)


def number_or(row: Row, name: str, default: float) -> float:
    """A finite number, or `default` when there is none."""
    try:
        return number(row, name)
    except Unreadable:
        return default


def micros(dollars: float) -> int:
    """Dollars as whole micro-dollars, nearest."""
    return round(Decimal(repr(dollars)) * MICROS_PER_USD)


def dollars(amount: int) -> float:
    """Micro-dollars as the dollars that vast.ai reads."""
    return float(Decimal(amount) / MICROS_PER_USD)


def gpu_key(name: str) -> str:
    """GPU names compare whole, underscores as spaces, without case."""
    return " ".join(name.replace("_", " ").split()).casefold()


def _compute(row: Row, billing: Billing) -> int:
    if billing is Billing.SPOT_BID:
        return micros(number(row, "min_bid"))
    if row.get("dph_base") is not None and not row.get("is_bid"):
        return micros(number(row, "dph_base"))
    return micros(number(row, "dph_total") - number(row, "storage_total_cost"))


def offer(row: Row, billing: Billing, provider: str, now: datetime) -> Offer:
    """One offer. Raises Unreadable when a price or an identity is missing."""
    ask, machine, name = row.get("id") or row.get("ask_contract_id"), row.get("machine_id"), row.get("gpu_name")
    if not isinstance(ask, int) or not isinstance(machine, int) or not isinstance(name, str) or not name:
        raise Unreadable("id, machine_id or gpu_name is missing")
    duration, disk = row.get("duration"), number_or(row, "disk_space", math.nan)
    return Offer(
        provider=provider, offer_id=str(ask), machine_id=str(machine), gpu_name=name,
        num_gpus=int(number(row, "num_gpus")), gpu_ram_mb=int(number(row, "gpu_ram")), billing=billing,
        compute_micros_h=_compute(row, billing), disk_micros_gb_month=micros(number(row, "storage_cost")),
        upload_micros_gb=micros(number(row, "inet_up_cost")), download_micros_gb=micros(number(row, "inet_down_cost")),
        up_mbps=number(row, "inet_up"), down_mbps=number(row, "inet_down"),
        reliability=number_or(row, "reliability", number_or(row, "reliability2", 0.0)),
        region=str(row.get("geolocation") or ""), max_duration_s=None if duration is None else number(row, "duration"),
        dlperf=number_or(row, "dlperf", 0.0), ports=int(number_or(row, "direct_port_count", 0.0)), fetched_at=now,
        raw_status=str(row.get("verification") or ""), disk_gb=None if math.isnan(disk) else disk,
    )  # fmt: skip


def rentable(row: Row, query: OfferQuery, verified_only: bool) -> bool:
    """The filters on what an Offer does not keep, checked again; a column that is not told passes."""
    disk = row.get("disk_space")
    return (
        row.get("rentable") is not False
        and row.get("rented") is not True
        and row.get("external") is not True
        and (not verified_only or row.get("verification") in (None, "verified"))
        and (not isinstance(disk, int | float) or disk >= query.disk_gb)
    )


def passes(found: Offer, query: OfferQuery) -> bool:
    """Every filter of the query, checked again."""
    names = {gpu_key(name) for name in query.gpu_names}
    return (
        (not names or gpu_key(found.gpu_name) in names)
        and (query.max_compute_micros_h is None or found.compute_micros_h <= query.max_compute_micros_h)
        and found.reliability >= query.min_reliability
        and (found.max_duration_s is None or found.max_duration_s >= query.min_duration_s)
        and found.ports >= query.min_ports
    )


def disk_micros_h(found: Offer, disk_gb: float) -> int:
    """What `disk_gb` of an offer's disk costs per hour."""
    return round(found.disk_micros_gb_month * Decimal(repr(disk_gb)) / HOURS_PER_MONTH)


def _rate(row: Row) -> int | None:
    try:
        if row.get("dph_base") is not None:
            return micros(number(row, "dph_base"))
        return micros(number(row, "dph_total") - number(row, "storage_total_cost"))
    except Unreadable:
        return None


def _ports(row: Row) -> dict[int, int]:
    found: dict[int, int] = {}
    for key, binds in (row.get("ports") or {}).items():
        inner, _, protocol = str(key).partition("/")
        if protocol not in ("tcp", "") or not inner.isdigit() or not isinstance(binds, list) or not binds:
            continue
        outer = str(binds[0].get("HostPort", "")) if isinstance(binds[0], Mapping) else ""
        if outer.isdigit():
            found[int(inner)] = int(outer)
    return found


def instance(row: Any, provider: str) -> Instance:
    """One instance. Raises MalformedAnswer when it has no id."""
    if not isinstance(row, Mapping) or not isinstance(row.get("id"), int):
        raise MalformedAnswer("an instance without an id", provider=provider, raw=str(row))
    if not isinstance(row.get("ports") or {}, Mapping):
        raise MalformedAnswer("an instance whose ports are not an object", provider=provider, raw=str(row.get("ports")))
    phase = phase_of(row)
    bid = row.get("is_bid")
    billing = None if bid is None else Billing.SPOT_BID if bid else Billing.ON_DEMAND
    begun = None if phase in (Phase.PENDING, Phase.LOADING) else row.get("start_date")
    host = str(row.get("public_ipaddr") or "").strip()
    return Instance(
        provider=provider, instance_id=str(row["id"]), label=str(row.get("label") or ""), phase=phase,
        raw_status=str(row.get("actual_status") or ""), detail=detail_of(row), billing=billing,
        compute_micros_h=_rate(row), machine_id=str(row.get("machine_id") or ""),
        gpu_name=str(row.get("gpu_name") or ""),
        started_at=_time(begun),
        public_host=host or None, ports=_ports(row), floor_micros_h=_floor(row) if bid else None,
        ends_at=_time(row.get("end_date")),
    )  # fmt: skip


def _floor(row: Row) -> int | None:
    try:
        return micros(number(row, "min_bid"))
    except Unreadable:
        return None


def _time(value: Any) -> datetime | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LAST_EPOCH
    return datetime.fromtimestamp(value, UTC) if known else None


def increases(rows: Iterable[Any], provider: str) -> list[PriceIncrease]:
    """Pending price increases. One that does not touch the GPU's price is left out. Raises MalformedAnswer for what
    can't be read."""
    found = []
    for row in rows:
        if not isinstance(row, Mapping):
            raise MalformedAnswer("a price increase that is not an object", provider=provider, raw=str(row))
        if row.get("new_gpu_costpersec") is None:
            continue
        try:
            wanted, contract = int(number(row, "pending_price_increase_id")), int(number(row, "contract_id"))
            rate = micros(number(row, "new_gpu_costpersec") * SECONDS_PER_HOUR)
        except Unreadable as error:
            raise MalformedAnswer(f"a price increase: {error}", provider=provider, raw=str(row)) from error
        found.append(PriceIncrease(provider, str(contract), str(wanted), rate))
    return found


def _instant(row: Row, name: str) -> datetime:
    found = _time(row.get(name))
    if found is None:
        raise Unreadable(f"{name} is {row.get(name)!r}, expected epoch seconds")
    return found


def _contract_of(result: Row, told: Row) -> str:
    source = str(result.get("source") or "")
    tail = source.rsplit("-", 1)[-1]
    return tail if tail.isdigit() else str(told.get("instance_id") or "")


def charges(results: Iterable[Any], provider: str, since: datetime) -> list[Charge]:
    """The bill's items that ended after `since`. Raises MalformedAnswer for what can't be read."""
    found: list[Charge] = []
    for result in results:
        told = result.get("metadata") or {} if isinstance(result, Mapping) else None
        if not isinstance(told, Mapping):
            raise MalformedAnswer("a charge that is not an object", provider=provider, raw=str(result))
        if result.get("type") != "instance":
            continue
        label = str(told.get("label") or "")
        for item in result.get("items") or []:
            try:
                kind = _CHARGES[item["type"]]
                begin, finish = _instant(item, "start"), _instant(item, "end")
                amount = micros(number(item, "amount"))
            except (KeyError, TypeError, Unreadable) as error:
                raise MalformedAnswer(f"a charge can't be read: {error}", provider=provider, raw=str(item)) from error
            if finish >= since:
                found.append(Charge(provider, _contract_of(result, told), label, kind, amount, begin, finish))
    return found
