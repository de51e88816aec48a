"""The user's list of machines.

Invariant: whatever of it gets onto ssh's command line is checked here: no field can become an option or a command.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from providers.base import MICROS_PER_USD, BadRequest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")
_FIELDS = {
    "name", "address", "user", "port", "gpu_name", "num_gpus", "gpu_ram_mb", "price_per_hour", "up_mbps", "down_mbps",
    "relay_port", "identity_file", "reliability",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of the user's."""

    name: str
    address: str
    user: str
    gpu_name: str
    num_gpus: int = 1
    gpu_ram_mb: int = 0
    """Per GPU; 0 when not told."""
    port: int = 22
    price_micros_h: int = 0
    """What the whole machine costs its user an hour; 0 when nothing."""
    up_mbps: float = 0.0
    down_mbps: float = 0.0
    """0 when not known: then they are measured."""
    relay_port: int | None = None
    """Port of `address` that leads to the first published port; None when nobody can connect."""
    identity_file: str = ""
    reliability: float = 1.0

    def __post_init__(self) -> None:
        """Raises BadRequest for a field that has no sense or that ssh could misread."""
        for what, value, form in (
            ("name", self.name, _NAME), ("address", self.address, _ADDRESS), ("user", self.user, _USER),
        ):  # fmt: skip
            if not form.fullmatch(value):
                raise BadRequest(f"machine {self.name[:63]!r}: {what} is {value[:80]!r}, expected {form.pattern}")
        for what, number in (("port", self.port), ("relay_port", self.relay_port)):
            if number is not None and not 0 < number < 65_536:
                raise BadRequest(f"machine {self.name!r}: {what} is {number}, expected 1 to 65535")
        if not self.gpu_name or self.num_gpus < 1 or self.price_micros_h < 0 or not 0 <= self.reliability <= 1:
            raise BadRequest(
                f"machine {self.name!r}: give a gpu_name, num_gpus of 1 or more, a price_per_hour of 0 or more and a "
                "reliability of 0 to 1"
            )
        if self.gpu_ram_mb < 0 or self.up_mbps < 0 or self.down_mbps < 0:
            raise BadRequest(f"machine {self.name!r}: gpu_ram_mb, up_mbps and down_mbps can't be negative")
        if self.identity_file.startswith("-"):
            raise BadRequest(f"machine {self.name!r}: identity_file can't begin with a dash")


def _price(row: Mapping[str, Any]) -> int:
    value = row.get("price_per_hour", 0)
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        amount = Decimal(-1)
    if isinstance(value, bool) or not amount.is_finite() or amount < 0:
        raise BadRequest(f"machine {row.get('name')!r}: price_per_hour is {value!r}, expected dollars, 0 or more")
    return round(amount * MICROS_PER_USD)


def _machine(row: object) -> Machine:
    if not isinstance(row, dict):
        raise BadRequest("each [[machine]] must be a table")
    unknown = sorted(set(row) - _FIELDS)
    if unknown:
        raise BadRequest(f"machine {row.get('name')!r}: unknown {unknown[0]!r}, expected {', '.join(sorted(_FIELDS))}")
    rest = {key: value for key, value in row.items() if key != "price_per_hour"}
    for key, kinds in (
        ("name", str), ("address", str), ("user", str), ("gpu_name", str), ("identity_file", str), ("port", int),
        ("num_gpus", int), ("gpu_ram_mb", int), ("relay_port", int),
    ):  # fmt: skip
        if key in rest and (not isinstance(rest[key], kinds) or isinstance(rest[key], bool)):
            raise BadRequest(f"machine {row.get('name')!r}: {key} is {rest[key]!r}, expected {kinds.__name__}")
    for key in ("up_mbps", "down_mbps", "reliability"):
        if key in rest:
            if isinstance(rest[key], bool) or not isinstance(rest[key], int | Decimal):
                raise BadRequest(f"machine {row.get('name')!r}: {key} is {rest[key]!r}, expected a number")
            rest[key] = float(rest[key])
    missing = [key for key in ("name", "address", "user", "gpu_name") if key not in rest]
    if missing:
        raise BadRequest(f"machine {row.get('name')!r}: {missing[0]} is missing")
    return Machine(**rest, price_micros_h=_price(row))


def parse_machines(text: str) -> tuple[Machine, ...]:
    """The machines of a TOML text with one `[[machine]]` each. BadRequest says what to change."""
    try:
        raw = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise BadRequest(f"the list of machines is not TOML: {error}") from error
    rows = raw.get("machine")
    if not isinstance(rows, list) or set(raw) != {"machine"}:
        raise BadRequest("the list of machines must have [[machine]] tables and nothing else")
    found = tuple(_machine(row) for row in rows)
    names = [machine.name for machine in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadRequest(f"two machines have the name {twice[0]!r}: give each its own")
    return found


def read_machines(path: Path) -> tuple[Machine, ...]:
    """The machines of a TOML file."""
    return parse_machines(path.read_text())
