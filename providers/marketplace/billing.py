"""Exact bills: what an instance has cost, by kind and by UTC day.

Invariant: for each kind the whole micro-dollars of all days add up to the floor of the exact amount, whatever the
number and the length of the steps in which time was counted. Amounts are kept as integer numerators over a fixed
denominator, so nothing is ever rounded twice.

Rules (vast.ai's): the GPU by time while running; the disk by time from creation to destruction except while the
host is down; traffic by the byte, both directions, in any state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from .clock import NS

GB = 10**9
HOUR_NS = 3600 * NS
MONTH_NS = 720 * HOUR_NS
DAY_NS = 24 * HOUR_NS


class Kind(StrEnum):
    """The provider's own words: GPU time, disk, bandwidth down, bandwidth up."""

    GPU = "gpu"
    DISK = "disk"
    DOWN = "bwd"
    UP = "bwu"


DENOMINATOR = {Kind.GPU: HOUR_NS, Kind.DISK: GB * MONTH_NS, Kind.DOWN: GB, Kind.UP: GB}
"""What a numerator is divided by to give micro-dollars."""


@dataclass(frozen=True, slots=True)
class Tariff:
    """Prices in force for one instance, in micro-dollars."""

    gpu_h: int
    disk_gb_month: int
    down_gb: int
    up_gb: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used between two instants of the same day."""

    gpu_ns: int = 0
    disk_ns: int = 0
    down_bytes: int = 0
    up_bytes: int = 0


def numerators(tariff: Tariff, usage: Usage) -> dict[Kind, int]:
    """Exact cost of `usage` by kind, each over its DENOMINATOR."""
    return {
        Kind.GPU: tariff.gpu_h * usage.gpu_ns,
        Kind.DISK: tariff.disk_bytes * tariff.disk_gb_month * usage.disk_ns,
        Kind.DOWN: tariff.down_gb * usage.down_bytes,
        Kind.UP: tariff.up_gb * usage.up_bytes,
    }


def by_day(start_ns: int, end_ns: int) -> Iterator[tuple[int, int, int]]:
    """Cut [start, end) at UTC midnights: (day number, start, end) of each piece."""
    while start_ns < end_ns:
        day = start_ns // DAY_NS
        stop = min(end_ns, (day + 1) * DAY_NS)
        yield day, start_ns, stop
        start_ns = stop


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the bill: one kind on one UTC day."""

    kind: Kind
    day: int
    micros: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Account:
    """The bill of one instance. `settled_ns` is the instant up to which time has been counted."""

    tariff: Tariff
    settled_ns: int
    totals: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    lines: dict[tuple[int, Kind], Line] = field(default_factory=dict)

    def settle(self, now_ns: int, *, gpu: bool, disk: bool) -> None:
        """Count the time since the last call under the tariff in force; a clock that stood still counts nothing."""
        for day, start, end in by_day(self.settled_ns, now_ns):
            span = end - start
            used = Usage(gpu_ns=span if gpu else 0, disk_ns=span if disk else 0)
            self._book(day, start, end, numerators(self.tariff, used))
        self.settled_ns = max(self.settled_ns, now_ns)

    def traffic(self, now_ns: int, *, down: int, up: int) -> None:
        """Count bytes that crossed the machine's link."""
        used = Usage(down_bytes=down, up_bytes=up)
        self._book(now_ns // DAY_NS, now_ns, now_ns, numerators(self.tariff, used))

    def reprice(self, tariff: Tariff) -> None:
        """Change prices from `settled_ns` on; settle first."""
        self.tariff = tariff

    def micros(self, kind: Kind) -> int:
        """Whole micro-dollars so far."""
        return self.totals[kind] // DENOMINATOR[kind]

    def total_micros(self) -> int:
        """Sum over all kinds."""
        return sum(self.micros(kind) for kind in Kind)

    def _book(self, day: int, start: int, end: int, added: dict[Kind, int]) -> None:
        for kind, amount in added.items():
            if amount == 0:
                continue
            before = self.micros(kind)
            self.totals[kind] += amount
            whole = self.micros(kind) - before
            old = self.lines.get((day, kind))
            if old is None:
                self.lines[(day, kind)] = Line(kind, day, whole, start, end)
            else:
                self.lines[(day, kind)] = replace(old, micros=old.micros + whole, end_ns=max(old.end_ns, end))

    def dump(self) -> dict[str, Any]:
        """A JSON value that `load` reads back exactly."""
        tariff = self.tariff
        return {
            "tariff": [tariff.gpu_h, tariff.disk_gb_month, tariff.down_gb, tariff.up_gb, tariff.disk_bytes],
            "settled_ns": self.settled_ns,
            "totals": {kind.value: str(amount) for kind, amount in self.totals.items()},
            "lines": [[x.kind.value, x.day, x.micros, x.start_ns, x.end_ns] for x in self.lines.values()],
        }

    @classmethod
    def load(cls, raw: dict[str, Any]) -> Account:
        """The account that `dump` wrote."""
        lines = [Line(Kind(kind), *rest) for kind, *rest in raw["lines"]]
        return cls(
            tariff=Tariff(*raw["tariff"]),
            settled_ns=raw["settled_ns"],
            totals={Kind(kind): int(amount) for kind, amount in raw["totals"].items()},
            lines={(line.day, line.kind): line for line in lines},
        )
