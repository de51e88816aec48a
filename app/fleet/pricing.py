"""What a machine really costs per hour, and per unit of throughput (ρ). Pure.

Invariant: every part of the price is shown: rent or bid, disk, traffic both ways, start-up; what is paid once is spread
over the life that is expected. One machine and five thousand are priced by the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.fleet.ledger import HOURS_PER_MONTH

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHORTEST_LIFE_H = 0.05
UNTOLD_MBPS = 300.0
"""A link of which its provider says nothing."""
NOTICE_S = 60.0
"""How long it takes to see that a machine is gone."""


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
    """Rent or bid."""
    disk: int
    download: int
    """Snapshots, and once in its life image and model."""
    upload: int
    startup: int
    """Rent and disk until its first rollout, once in its life."""
    life_h: float = 0.0
    """Expected."""
    once: int = 0
    """The part of all that is paid once in its life and spread over it: start-up, image, model."""
    start_s: float = 0.0
    """From renting to its first rollout, image and model over its link included."""
    start_download: int = 0
    """What image and model cost to download, micro-dollars once in its life."""
    image_download: int = 0
    """The image's part of that."""

    @property
    def traffic(self) -> int:
        """Both directions."""
        return self.download + self.upload

    @property
    def total(self) -> int:
        """All parts."""
        return self.compute + self.disk + self.traffic + self.startup


@dataclass(frozen=True, slots=True)
class Offered:
    """Columns of many offers: micro-dollars, GB, Mbit/s, hours. `life_h` is what is expected of each."""

    compute: Floats
    disk_gb_month: Floats
    download_gb: Floats
    upload_gb: Floats
    down_mbps: Floats
    life_h: Floats
    start_bytes: Floats
    """Image and model."""
    image_bytes: Floats
    """Of these."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Columns of what they cost, micro-dollars per hour."""

    compute: Ints
    disk: Ints
    download: Ints
    upload: Ints
    startup: Ints
    total: Ints
    once: Ints
    life_h: Floats
    start_s: Floats
    start_download: Ints
    """Micro-dollars, not per hour."""
    image_download: Ints

    def __getitem__(self, row: int) -> Effective:
        return Effective(
            int(self.compute[row]), int(self.disk[row]), int(self.download[row]), int(self.upload[row]),
            int(self.startup[row]), float(self.life_h[row]), int(self.once[row]), float(self.start_s[row]),
            int(self.start_download[row]), int(self.image_download[row]),
        )  # fmt: skip


def effective_prices(offers: Offered, *, disk_gb: float, traffic: Traffic, setup_s: float) -> Parts:
    """PROVIDERS' billing facts: rent + disk + traffic + start-up cost over expected life.

    Start-up is paid rent without rollouts: `setup_s`, and the time that image and model need on the machine's link. On
    a slow link that is most of an hour, which is what makes such a machine dear.
    """
    compute = np.rint(offers.compute).astype(np.int64)
    life = np.maximum(offers.life_h, SHORTEST_LIFE_H)
    disk = np.rint(offers.disk_gb_month * (disk_gb / HOURS_PER_MONTH)).astype(np.int64)
    start_s = setup_s + offers.start_bytes * 8e-6 / np.where(offers.down_mbps > 0, offers.down_mbps, UNTOLD_MBPS)
    down_h = traffic.down_bytes_h + offers.start_bytes / life
    download = np.rint(down_h * offers.download_gb / 1e9).astype(np.int64)
    upload = np.rint(traffic.up_bytes_h * offers.upload_gb / 1e9).astype(np.int64)
    startup = np.rint((compute + disk) * (start_s / 3600 / life)).astype(np.int64)
    total = compute + disk + download + upload + startup
    start_download = offers.start_bytes * offers.download_gb / 1e9
    once = startup + np.rint(start_download / life).astype(np.int64)
    image = np.ceil(offers.image_bytes * offers.download_gb / 1e9).astype(np.int64)
    whole = np.maximum(image, np.ceil(start_download).astype(np.int64))
    return Parts(compute, disk, download, upload, startup, total, once, offers.life_h, start_s, whole, image)


def start_s(setup_s: float, start_bytes: float, down_mbps: float) -> float:
    """From renting a machine to its first rollout; see `effective_prices`."""
    return setup_s + start_bytes * 8e-6 / (down_mbps if down_mbps > 0 else UNTOLD_MBPS)


def effective_price(
    *,
    compute_micros_h: int,
    disk_micros_gb_month: int,
    disk_gb: float,
    download_micros_gb: int,
    upload_micros_gb: int,
    traffic: Traffic,
    setup_s: float,
    life_h: float,
    down_mbps: float = 1000.0,
    start_bytes: float = 0.0,
    image_bytes: float = 0.0,
) -> Effective:
    """One machine's price; see `effective_prices`."""
    row = (
        compute_micros_h, disk_micros_gb_month, download_micros_gb, upload_micros_gb, down_mbps, life_h, start_bytes,
        image_bytes,
    )  # fmt: skip
    offered = Offered(*(np.array([value], dtype=np.float64) for value in row))
    return effective_prices(offered, disk_gb=disk_gb, traffic=traffic, setup_s=setup_s)[0]


def availabilities(reliability: Floats, life_h: Floats, start_s: Floats) -> Floats:
    """The share of the time that machines work: what their provider says of them, times what interruptions leave.

    After each life of `life_h` hours a machine is missed until that is seen and a successor has started.
    """
    life = np.maximum(life_h, SHORTEST_LIFE_H)
    return np.clip(reliability, 0.0, 1.0) * life / (life + (NOTICE_S + start_s) / 3600)


def availability(reliability: float, life_h: float, start_s: float) -> float:
    """One machine's; see `availabilities`."""
    return float(availabilities(np.array([reliability]), np.array([life_h]), np.array([start_s]))[0])


def rho(price_micros_h: int, mu: float) -> float:
    """ρ = c/μ (paper §4): dollars per hour for one rollout per second; infinite for a machine that does nothing."""
    return price_micros_h / 1e6 / mu if mu > 0 else float("inf")
