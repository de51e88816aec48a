"""The price of a machine, part by part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.pricing import Traffic, bid_for, effective_price, effective_throughput, rho

MICROS = st.integers(0, 10**7)


def test_parts_of_a_known_machine() -> None:
    price = effective_price(
        compute_micros_h=350_000,
        disk_micros_gb_month=150_000,
        disk_gb=48.0,
        download_micros_gb=20_000,
        upload_micros_gb=10_000,
        traffic=Traffic(down_bytes_h=10e9, up_bytes_h=3e9),
        startup_s=90.0,
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
            startup_s=startup,
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
    ("mu", "reliability", "interruptible", "effective"),
    [(10.0, 1.0, False, 10.0), (10.0, 0.9, False, 9.0), (10.0, 1.0, True, 9.7), (10.0, 1.7, False, 10.0),
     (10.0, -1.0, False, 0.0)],
)  # fmt: skip
def test_effective_throughput(mu: float, reliability: float, interruptible: bool, effective: float) -> None:
    assert effective_throughput(mu, reliability, interruptible) == pytest.approx(effective)


def test_rho_is_dollars_per_hour_over_throughput() -> None:
    assert rho(500_000, 2.0) == 0.25
    assert rho(500_000, 0.0) == float("inf")


@pytest.mark.parametrize(
    ("floor", "cap", "bid"), [(100_000, None, 115_000), (100_000, 110_000, 110_000), (100_000, 200_000, 115_000)]
)
def test_a_bid_is_above_the_floor_but_never_above_the_cap(floor: int, cap: int | None, bid: int) -> None:
    assert bid_for(floor, cap) == bid
