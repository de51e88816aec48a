"""What a machine really costs per hour, and per unit of throughput (ρ). Pure.

Invariant: every part of the price is shown: rent or bid, disk, traffic, start-up spread over the expected life.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.fleet.ledger import HOURS_PER_MONTH

BID_MARGIN = 1.15
"""A bid this much above the floor survives small moves of the market."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Expected bytes per hour of one node."""

    down_bytes_h: float
    """Snapshots."""
    up_bytes_h: float
    """Relay to a peer, trajectories."""


@dataclass(frozen=True, slots=True)
class Effective:
    """Price of a machine in micro-dollars per hour, by part."""

    compute: int
    disk: int
    traffic: int
    startup: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.compute + self.disk + self.traffic + self.startup


def effective_price(
    *,
    compute_micros_h: int,
    disk_micros_gb_month: int,
    disk_gb: float,
    download_micros_gb: int,
    upload_micros_gb: int,
    traffic: Traffic,
    startup_s: float,
    life_h: float,
) -> Effective:
    """PROVIDERS' billing facts as one number: rent + disk + traffic + start-up cost over expected life.

    Start-up is paid rent without rollouts: `startup_s` of it once in `life_h` hours.
    """
    disk = round(disk_micros_gb_month * disk_gb / HOURS_PER_MONTH)
    moved = round((traffic.down_bytes_h * download_micros_gb + traffic.up_bytes_h * upload_micros_gb) / 1e9)
    startup = round((compute_micros_h + disk) * (startup_s / 3600) / max(life_h, 0.05))
    return Effective(compute_micros_h, disk, moved, startup)


def effective_throughput(mu: float, reliability: float, interruptible: bool) -> float:
    """μ times the share of the time that the machine is there: its reliability, less for interruptible ones."""
    return mu * min(1.0, max(0.0, reliability)) * (0.97 if interruptible else 1.0)


def rho(price_micros_h: int, mu: float) -> float:
    """ρ = c/μ (paper §4): dollars per hour for one rollout per second; infinite for a machine that does nothing."""
    return price_micros_h / 1e6 / mu if mu > 0 else float("inf")


def bid_for(floor_micros_h: int, on_demand_cap_micros_h: int | None) -> int:
    """Floor × margin, but never above the user's cap."""
    bid = round(floor_micros_h * BID_MARGIN)
    return bid if on_demand_cap_micros_h is None else min(bid, on_demand_cap_micros_h)
