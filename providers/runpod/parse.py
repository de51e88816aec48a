"""Reading RunPod's catalogue, pods and bills.

Invariant: pure; a missing or unreadable price makes an offer unusable and a pod's rate None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

from providers.base import MICROS_PER_USD, Billing, Charge, Instance, MalformedAnswer, Offer, OfferQuery, Phase

from .errors import redact
from .names import gpu_name
from .payload import MAX_PORTS, Pool
from .phases import phase_of

Row = Mapping[str, Any]
DISK_MICROS_GB_MONTH = 100_000
"""RunPod's price of a container's disk, $0.10 per GB and month, while the pod runs (docs.runpod.io, pricing)."""
_IN_STOCK = ("LOW", "MEDIUM", "HIGH")


class Unreadable(ValueError):
    """A field is missing or has no sense."""


def number(row: Row, name: str) -> float:
    """A finite number that is not negative; Unreadable otherwise."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise Unreadable(f"{name} is {value!r}, expected a number")
    return float(value)


def micros(dollars: float) -> int:
    """Dollars as whole micro-dollars, nearest."""
    return round(Decimal(repr(dollars)) * MICROS_PER_USD)


def part(row: Row, name: str) -> Row:
    """A nested object; Unreadable otherwise."""
    value = row.get(name)
    if not isinstance(value, Mapping):
        raise Unreadable(f"{name} is {value!r}, expected an object")
    return value


def moment(value: object) -> datetime | None:
    """An RFC 3339 time in UTC; None when there is none or it can't be read."""
    if not isinstance(value, str):
        return None
    try:
        read = datetime.fromisoformat(value)
    except ValueError:
        return None
    return read.astimezone(UTC) if read.tzinfo else read.replace(tzinfo=UTC)


def _places(row: Row) -> list[tuple[str, str]]:
    """Data centres with stock, with the level; ("", level) when RunPod names none and yet has stock."""
    level = row.get("availability")
    if not isinstance(level, str):
        raise Unreadable(f"availability is {level!r}, expected a word")
    centers = row.get("dataCenters")
    if centers is None:
        return [("", level)] if level in _IN_STOCK else []
    if not isinstance(centers, list):
        raise Unreadable("dataCenters is no list")
    found = [(str(c.get("id") or ""), str(c.get("availability"))) for c in centers if isinstance(c, Mapping)]
    return [(name, stock) for name, stock in found if name and stock in _IN_STOCK]


def offers(row: Any, cloud: str, count: int, provider: str, reliability: float, now: datetime) -> list[Offer]:
    """The offers of one card in one cloud, one a data centre with stock. Unreadable when price or identity miss.

    `price` is per GPU, and a cloud's price means nothing unless the card is offered in that cloud.
    """
    if not isinstance(row, Mapping) or not isinstance(row.get("id"), str) or not row["id"]:
        raise Unreadable("a card without an id")
    key = cloud.lower()
    if row.get(key) is not True or number(part(row, "maxCount"), key) < count:
        return []
    price = micros(number(part(row, "price"), key) * count)
    if price <= 0:
        raise Unreadable(f"price.{key} is zero")
    memory = int(number(row, "memory"))
    return [
        Offer(
            provider=provider, offer_id=pool.offer_id, machine_id=pool.machine_id, gpu_name=gpu_name(row["id"]),
            num_gpus=count, gpu_ram_mb=memory * 1024, billing=Billing.ON_DEMAND, compute_micros_h=price,
            disk_micros_gb_month=DISK_MICROS_GB_MONTH, upload_micros_gb=0, download_micros_gb=0, up_mbps=0.0,
            down_mbps=0.0, reliability=reliability, region=pool.data_center, max_duration_s=None, dlperf=0.0,
            ports=MAX_PORTS, fetched_at=now, raw_status=f"{cloud} {level}",
        )
        for pool, level in ((Pool(cloud, count, place, row["id"]), level) for place, level in _places(row))
    ]  # fmt: skip


def _key(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()


def passes(found: Offer, query: OfferQuery) -> bool:
    """Every filter of the query."""
    names = {_key(name) for name in query.gpu_names}
    return (
        (not names or _key(found.gpu_name) in names)
        and (query.max_compute_micros_h is None or found.compute_micros_h <= query.max_compute_micros_h)
        and found.reliability >= query.min_reliability
        and found.ports >= query.min_ports
    )


def _rate(row: Row, phase: Phase) -> int | None:
    try:
        rate = micros(number(row, "cost"))
    except Unreadable:
        return None
    # A pod that holds a GPU is never free: a zero there means "not known yet".
    return rate if rate > 0 or phase is Phase.PAUSED else None


def _ports(row: Row) -> tuple[str | None, dict[int, int]]:
    runtime = row.get("runtime")
    listed = runtime.get("ports") if isinstance(runtime, Mapping) else None
    host: str | None = None
    found: dict[int, int] = {}
    for one in listed if isinstance(listed, list) else []:
        if not isinstance(one, Mapping) or one.get("type") != "tcp":
            continue
        inner, outer, address = one.get("private"), one.get("public"), one.get("ip")
        if isinstance(inner, int) and isinstance(outer, int) and isinstance(address, str) and address:
            host = host or address
            if address == host:
                found[inner] = outer
    return host, found


def pod(row: Any, provider: str) -> Instance:
    """One pod. MalformedAnswer when it has no id."""
    if not isinstance(row, Mapping) or not isinstance(row.get("id"), str) or not row["id"]:
        raise MalformedAnswer("a pod without an id", provider=provider, raw=redact(str(row)))
    phase = phase_of(row.get("status"))
    gpu = row.get("gpu") if isinstance(row.get("gpu"), Mapping) else {}
    card = str((gpu or {}).get("id") or "")
    host, ports = _ports(row)
    place = str(row.get("dataCenterId") or "")
    return Instance(
        provider=provider, instance_id=row["id"], label=str(row.get("name") or ""), phase=phase,
        raw_status=str(row.get("status") or ""), detail=place, billing=Billing.ON_DEMAND,
        compute_micros_h=_rate(row, phase), machine_id=Pool(str(row.get("cloud") or ""), 1, place, card).machine_id,
        gpu_name=gpu_name(card), started_at=moment(row.get("startedAt")), public_host=host, ports=ports,
    )  # fmt: skip


_AMOUNTS: tuple[tuple[str, Literal["gpu", "disk"]], ...] = (("gpuAmount", "gpu"), ("diskAmount", "disk"))


def charges(records: Iterable[Any], provider: str, since: datetime) -> list[Charge]:
    """The bill's amounts above zero whose hour ended after `since`. MalformedAnswer for what can't be read."""
    found: list[Charge] = []
    for record in records:
        start = moment(record.get("startTime")) if isinstance(record, Mapping) else None
        end = moment(record.get("endTime")) if isinstance(record, Mapping) else None
        if start is None or end is None or not isinstance(record.get("podId"), str):
            raise MalformedAnswer("a bill's record can't be read", provider=provider, raw=str(record))
        try:
            amounts = [(kind, micros(number(record, name))) for name, kind in _AMOUNTS]
        except Unreadable as error:
            raise MalformedAnswer(f"a bill's record: {error}", provider=provider, raw=str(record)) from error
        if end >= since:
            found += [Charge(provider, record["podId"], "", k, amount, start, end) for k, amount in amounts if amount]
    return found
