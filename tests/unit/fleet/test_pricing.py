"""The price of a machine, part by part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.pricing import Effective, Traffic, availability, effective_price, rho, start_s

MICROS = st.integers(0, 10**7)


def test_parts_of_a_known_machine() -> None:
    price = effective_price(
        compute_micros_h=350_000,
        disk_micros_gb_month=150_000,
        disk_gb=48.0,
        download_micros_gb=20_000,
        upload_micros_gb=10_000,
        traffic=Traffic(down_bytes_h=10e9, up_bytes_h=3e9),
        setup_s=90.0,
        life_h=2.0,
    )
    assert price.compute == 350_000
    assert price.disk == 10_000  # 48 GB × $0.15 / 720 h
    assert price.traffic == 230_000
    assert price.startup == 4_500  # 90 s of rent and disk, once in two hours
    assert price.total == 594_500


@given(
    compute=MICROS,
    disk=MICROS,
    gb=st.floats(8, 4000),
    down=st.integers(0, 10**5),
    up=st.integers(0, 10**5),
    down_h=st.floats(0, 1e13),
    up_h=st.floats(0, 1e13),
    startup=st.floats(0, 3600),
    life=st.floats(0.001, 1000),
)
def test_parts_add_up_and_none_is_negative(
    compute: int,
    disk: int,
    gb: float,
    down: int,
    up: int,
    down_h: float,
    up_h: float,
    startup: float,
    life: float,
) -> None:
    def price(life_h: float, down_bytes_h: float) -> tuple[int, int, int, int, int]:
        p = effective_price(
            compute_micros_h=compute,
            disk_micros_gb_month=disk,
            disk_gb=gb,
            download_micros_gb=down,
            upload_micros_gb=up,
            traffic=Traffic(down_bytes_h, up_h),
            setup_s=startup,
            life_h=life_h,
        )
        return p.compute, p.disk, p.traffic, p.startup, p.total

    *parts, total = price(life, down_h)
    assert sum(parts) == total
    assert min(parts) >= 0
    assert parts[0] == compute
    assert price(life * 2, down_h)[-1] <= total, "a longer life spreads the start"
    assert price(life, down_h * 2)[-1] >= total


@pytest.mark.parametrize(
    ("reliability", "life_h", "start_s", "share"),
    [(1.0, 1e9, 0.0, 1.0), (0.9, 1e9, 0.0, 0.9), (1.7, 1e9, 0.0, 1.0), (-1.0, 2.0, 60.0, 0.0),
     (1.0, 1.0, 60.0, 30 / 31), (1.0, 1 / 6, 540.0, 0.5)],
)  # fmt: skip
def test_availability(reliability: float, life_h: float, start_s: float, share: float) -> None:
    """A minute to see that it is gone, and the start of the next, once in each life."""
    assert availability(reliability, life_h, start_s) == pytest.approx(share)


def test_rho_is_dollars_per_hour_over_throughput() -> None:
    assert rho(500_000, 2.0) == 0.25
    assert rho(500_000, 0.0) == float("inf")


def start(down_mbps: float, start_bytes: float = 26e9, life_h: float = 2.0) -> Effective:
    return effective_price(
        compute_micros_h=300_000, disk_micros_gb_month=0, disk_gb=16.0, download_micros_gb=20_000,
        upload_micros_gb=0, traffic=Traffic(0.0, 0.0), setup_s=60.0, life_h=life_h, down_mbps=down_mbps,
        start_bytes=start_bytes,
    )  # fmt: skip


def test_image_and_model_are_downloaded_once_in_a_life() -> None:
    price = start(1000.0)
    assert price.download == 260_000, "26 GB at $0.02, once in two hours"
    assert price.start_s == 60 + 26 * 8
    assert price.startup == round(300_000 * 268 / 3600 / 2)
    assert price.once == price.startup + price.download
    assert start(1000.0, 0.0).total == 300_000 + round(300_000 * 60 / 3600 / 2)
    assert start(1000.0, life_h=4.0).download == 130_000


def test_a_link_that_nobody_told_of_is_neither_fast_nor_slow() -> None:
    assert start(1000.0).total < start(0.0).total < start(128.0).total
    assert start(0.0).start_s == start_s(60.0, 26e9, 0.0)
    assert start(128.0).start_s == start_s(60.0, 26e9, 128.0)


def test_a_slow_link_makes_a_machine_dear() -> None:
    """CASES 17: 26 GB take 27 minutes at 128 Mbit/s, paid for and idle."""
    assert start(128.0).start_s == pytest.approx(60 + 26e9 * 8 / 128e6)
    assert start(128.0).startup > 5 * start(1000.0).startup
    assert start(128.0).total > 1.1 * start(1000.0).total
