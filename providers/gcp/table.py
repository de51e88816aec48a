"""The list of machine types with their spot prices.

Invariant: pure but for reading the file; every price has a day, and money is read without a float.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

from providers.base import MICROS_PER_USD, BadRequest


@dataclass(frozen=True, slots=True)
class Row:
    """A machine type in one zone."""

    zone: str
    machine_type: str
    gpu_name: str
    num_gpus: int
    gpu_ram_mb: int
    spot_micros_h: int
    as_of: date

    @property
    def offer_id(self) -> str:
        """Zone and type: both the offer and its pool."""
        return f"{self.zone}/{self.machine_type}"


@dataclass(frozen=True, slots=True)
class Table:
    """All rows, and what holds for each of them."""

    rows: tuple[Row, ...]
    disk_micros_gb_month: int
    egress_micros_gb: int
    external_mbps: float

    def gpu_of(self, machine_type: str) -> str:
        """The card of a machine type; "" when the table does not have it."""
        return next((row.gpu_name for row in self.rows if row.machine_type == machine_type), "")


def _micros(row: Mapping[str, Any], key: str, where: str) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or not value > 0:
        raise BadRequest(f"{where}: {key} is {value!r}, expected dollars above 0")
    return round(Decimal(value) * MICROS_PER_USD)


def _rows(machine: Mapping[str, Any]) -> list[Row]:
    kind = machine.get("type")
    where = f"machine {kind!r}"
    gpu, count, memory = machine.get("gpu_name"), machine.get("num_gpus"), machine.get("gpu_ram_mb")
    if not (isinstance(kind, str) and kind and isinstance(gpu, str) and gpu):
        raise BadRequest(f"{where}: give type and gpu_name")
    if not (isinstance(count, int) and count > 0 and isinstance(memory, int) and memory > 0):
        raise BadRequest(f"{where}: give num_gpus and gpu_ram_mb above 0")
    found = []
    for price in machine.get("prices") or ():
        region, zones, day = price.get("region"), price.get("zones"), price.get("as_of")
        if not isinstance(region, str) or not isinstance(zones, list) or not isinstance(day, date):
            raise BadRequest(f"{where}: each price needs region, zones and as_of (a day)")
        cost = _micros(price, "spot_usd_h", where)
        found += [Row(f"{region}-{zone}", kind, gpu, count, memory, cost, day) for zone in zones]
    return found


def parse_table(text: str) -> Table:
    """The table of a TOML text. BadRequest says what to change."""
    try:
        raw = tomllib.loads(text, parse_float=Decimal)
        common, machines = raw["common"], raw["machine"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise BadRequest(f"the list of prices must be TOML with [common] and [[machine]]: {error}") from error
    rows = tuple(row for machine in machines for row in _rows(machine))
    ids = [row.offer_id for row in rows]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise BadRequest(f"{twice[0]} is listed twice: keep one price")
    return Table(
        rows, _micros(common, "disk_usd_gb_month", "common"), _micros(common, "egress_usd_gb", "common"),
        float(common.get("external_mbps", 0)),
    )  # fmt: skip


def read_table(path: Path | None = None) -> Table:
    """The table of a file, or the one that comes with Echo2."""
    return parse_table((files("providers.gcp") / "prices.toml").read_text() if path is None else path.read_text())
