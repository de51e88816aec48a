"""Settings of the local marketplace and its price list.

Invariant: everything that a price list or a setting can get wrong is refused here with its name, before the
marketplace starts; the rest of the package trusts these values.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

DEFAULT_MACHINES = Path(__file__).with_name("machines.toml")
MICROS = 1_000_000


class ConfigError(ValueError):
    """A setting or a line of the price list is wrong; the message says which and what is expected."""


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """One machine of the price list. Money in micro-dollars, links in Mbit/s, memory in MB, disk in GB."""

    machine_id: int
    gpu_name: str
    gpu_ram_mb: int
    dph_base: int
    """Micro-dollars per hour, on demand."""
    min_bid: int
    """Micro-dollars per hour: the floor that a bid must reach."""
    storage_cost: int
    """Micro-dollars per GB and month of 720 h."""
    inet_up: float
    inet_down: float
    inet_up_cost: int
    """Micro-dollars per GB."""
    inet_down_cost: int
    reliability: float
    geolocation: str
    dlperf: float
    speed: float
    """Tokens per second that the machine's engine paces itself to."""
    num_gpus: int = 1
    host_id: int = 0
    disk_space: float = 500.0
    duration_days: float = 60.0
    direct_port_count: int = 100
    verification: str = "verified"
    hosting_type: int = 0
    cuda_max_good: float = 12.8
    compute_cap: int = 890
    cpu_cores: int = 16
    cpu_ram: int = 64000


@dataclass(frozen=True, slots=True)
class MarketConfig:
    """How a marketplace runs. `port` 0 takes a free one; times are seconds."""

    state_dir: Path
    api_key: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    control_enabled: bool = False
    """The `/_market/…` side: prices, faults, kills. Needs the same key."""
    seed: int = 0
    list_lag_s: float = 0.0
    start_delay_s: float = 0.2
    """How long a machine stays `loading`; each start varies by ±50 %."""
    stop_grace_s: float = 7.0
    """Longer than an agent takes to hand over what it has sampled."""
    rate_limits: bool = False
    rate_scale: float = 0.02
    """Multiplies vast.ai's minimum intervals when `rate_limits` is on."""
    tick_s: float = 0.05
    credit_micros: int = 1000 * MICROS
    machines_file: Path = DEFAULT_MACHINES
    speed: float = 1.0
    """Multiplies the speed of every machine of the price list."""

    def __post_init__(self) -> None:
        """Refuse values that can't work."""
        if not self.api_key:
            raise ConfigError("api_key is empty: give the marketplace a key, its clients must send the same one")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: expected 0 (any free port) to 65535")
        for name in ("list_lag_s", "start_delay_s", "stop_grace_s", "rate_scale"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: expected 0 or more")
        if not 0 < self.speed < float("inf"):
            raise ConfigError(f"speed is {self.speed}: expected more than 0")
        if self.tick_s <= 0:
            raise ConfigError(f"tick_s is {self.tick_s}: expected more than 0")


_MONEY = ("dph_base", "min_bid", "storage_cost", "inet_up_cost", "inet_down_cost")
_REQUIRED = tuple(
    name for name in MachineSpec.__dataclass_fields__ if name in (
        "machine_id", "gpu_name", "gpu_ram_mb", *_MONEY, "inet_up", "inet_down", "reliability", "geolocation",
        "dlperf", "speed",
    )
)  # fmt: skip
_FLOATS = ("inet_up", "inet_down", "reliability", "dlperf", "speed", "disk_space", "duration_days", "cuda_max_good")


def to_micros(value: Any, where: str) -> int:
    """Dollars (decimal string or number) as whole micro-dollars; ConfigError when negative, finer or no number."""
    try:
        micros = Decimal(str(value)) * MICROS
    except InvalidOperation:
        raise ConfigError(f'{where} is {value!r}: expected dollars such as "0.350000"') from None
    if not micros.is_finite() or micros < 0 or micros != micros.to_integral_value():
        raise ConfigError(f"{where} is {value!r}: expected dollars >= 0 with at most six decimals")
    return int(micros)


def _machine(raw: dict[str, Any], index: int) -> MachineSpec:
    where = f"machine #{index + 1} ({raw.get('machine_id', 'no machine_id')})"
    known = MachineSpec.__dataclass_fields__
    if unknown := sorted(set(raw) - set(known)):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(known))}")
    if missing := [name for name in _REQUIRED if name not in raw]:
        raise ConfigError(f"{where}: key {missing[0]!r} is missing")
    values = dict(raw)
    for name in _MONEY:
        values[name] = to_micros(values[name], f"{where}: {name}")
    for name in _FLOATS:
        if name in values:
            values[name] = float(values[name])
    spec = MachineSpec(**values)
    if spec.inet_up <= 0 or spec.inet_down <= 0 or spec.speed <= 0 or spec.num_gpus < 1:
        raise ConfigError(f"{where}: inet_up, inet_down and speed must be above 0, num_gpus at least 1")
    if not 0 <= spec.reliability <= 1:
        raise ConfigError(f"{where}: reliability is {spec.reliability}, expected 0 to 1")
    return spec


def load_machines(path: Path) -> tuple[MachineSpec, ...]:
    """The price list at `path`. Raises ConfigError naming the machine and the key that is wrong."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"price list {path}: {error}") from error
    rows = document.get("machine")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"price list {path}: expected at least one [[machine]]")
    machines = tuple(_machine(row, index) for index, row in enumerate(rows))
    ids = [machine.machine_id for machine in machines]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"price list {path}: a machine_id occurs twice")
    return machines
