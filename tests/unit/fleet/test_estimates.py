"""Throughput before and after it is measured; broadcast time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.estimates import (
    MOST_STEPS,
    Estimate,
    Gpu,
    Measurement,
    Workload,
    broadcast_time,
    estimate,
    fastest_step,
    find_gpu,
    gpu_table,
    prior,
    reference,
    roofline,
    settle,
    smooth,
    usual_step,
    weight,
)

LOAD = Workload(parameters=8_000_000_000, tokens_per_rollout=512.0)
LOADS = st.builds(Workload, st.integers(10**5, 10**11), st.floats(1, 1e5), st.integers(1, 1024))
POSITIVE = st.floats(1e-3, 1e3)


def test_every_gpu_of_the_table_is_found_by_either_spelling() -> None:
    assert len(gpu_table()) >= 20
    for name in gpu_table():
        assert find_gpu(name) is find_gpu(name.replace(" ", "_").lower()) is gpu_table()[name]


@pytest.mark.parametrize("name", ["", "RTX 40", "RTX 4090 Ti Super", "B300", "H100"])
def test_an_unknown_gpu_is_kept_cautiously_and_marked(name: str) -> None:
    found = prior(name, 1, LOAD)
    assert found.source == "unknown_gpu"
    assert 0 < found.mu == min(prior(known, 1, LOAD).mu for known in gpu_table())


def test_h100_is_faster_than_4090_and_4090_than_t4() -> None:
    order = ["H100 SXM", "RTX 4090", "Tesla T4"]
    rates = [prior(name, 1, LOAD).mu for name in order]
    assert rates == sorted(rates, reverse=True)
    assert {prior(name, 1, LOAD).source for name in order} == {"roofline"}


def test_the_fastest_stretch_outlasts_a_slow_one_but_not_a_single_step() -> None:
    slow, fast = [1.5] * 12, [1.0] * 18
    assert fastest_step(slow + fast) == pytest.approx(1.0)
    assert fastest_step([1.5] * 12 + [0.2] + [1.5] * 12) == pytest.approx(1.5)
    assert fastest_step([2.0, 3.0]) == pytest.approx(2.5), "there are no more yet"
    assert fastest_step([2.0] * 9 + [1.0] * 9 + [0.1] * 2) == pytest.approx(1.0), "two steps are no stretch"


@given(load=LOADS, bandwidth=st.floats(10, 1e4), tflops=st.floats(1, 5000), more=st.floats(1, 10))
def test_roofline_is_monotone(load: Workload, bandwidth: float, tflops: float, more: float) -> None:
    base = roofline(Gpu(bandwidth, tflops, 24), 1, load)
    assert base > 0
    assert roofline(Gpu(bandwidth * more, tflops, 24), 1, load) >= base
    assert roofline(Gpu(bandwidth, tflops * more, 24), 1, load) >= base
    assert roofline(Gpu(bandwidth, tflops, 24), 4, load) == pytest.approx(4 * base)
    longer = Workload(load.parameters, load.tokens_per_rollout * more, load.concurrency)
    assert roofline(Gpu(bandwidth, tflops, 24), 1, longer) <= base * (1 + 1e-12)
    bigger = Workload(load.parameters * 2, load.tokens_per_rollout, load.concurrency)
    assert roofline(Gpu(bandwidth, tflops, 24), 1, bigger) <= base


@pytest.mark.parametrize(
    ("concurrency", "step_s"),
    [
        (256, 0.04096 / 0.35 + 0.004),  # bound by its arithmetic
        (1, 0.016 / 0.35 + 0.004),  # by reading the weights
    ],
)
def test_a_machine_reaches_a_third_of_what_its_data_sheet_allows(concurrency: int, step_s: float) -> None:
    load = Workload(8_000_000_000, 512.0, concurrency)
    assert roofline(Gpu(1000.0, 100.0, 24.0), 2, load) == pytest.approx(2 * concurrency / step_s / 512)


def test_the_weakest_card_stands_for_an_unknown_one_where_it_was_measured_by_hand() -> None:
    name, card = reference("Mystery_9000")
    assert name == "MYSTERY 9000"
    assert card.memory_gb_s == min(gpu.memory_gb_s for gpu in gpu_table().values())
    assert reference("NVIDIA GeForce RTX 4090") == ("RTX 4090", gpu_table()["RTX 4090"])


def test_without_measurements_the_prior_stands() -> None:
    base = Estimate(2.0, "roofline")
    assert estimate(base, "RTX 4090", []) is base
    assert estimate(base, "RTX 4090", [Measurement("RTX 4090", 0.0, 1.0), Measurement("L4", 1.0, 0.0)]) is base


def test_the_same_gpu_outweighs_others() -> None:
    measured = [Measurement("RTX_4090", 1.0, 2.0), Measurement("rtx 4090", 4.0, 2.0), Measurement("L4", 90.0, 1.0)]
    found = estimate(Estimate(3.0, "roofline"), "RTX 4090", measured)
    assert found.mu == pytest.approx(3.0), "the geometric mean of ½ and 2 is 1"
    assert found.source == "gpu"
    other = estimate(Estimate(3.0, "unknown_gpu"), "B300", measured)
    assert other.mu == pytest.approx(3.0 * 90 ** (1 / 3))
    assert other.source == "scaled"


@given(prior_mu=POSITIVE, factor=st.floats(0.01, 100), count=st.integers(1, 5), base=POSITIVE)
def test_a_wrong_prior_is_corrected_by_measurement(prior_mu: float, factor: float, count: int, base: float) -> None:
    measured = [Measurement("L4", prior_mu * factor, prior_mu)] * count
    assert estimate(Estimate(base, "roofline"), "L4", measured).mu == pytest.approx(base * factor)


def test_smooth() -> None:
    assert smooth(None, 5.0, 0.1) == 5.0
    assert smooth(10.0, 20.0, 0.25) == 12.5


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_weight_is_a_share_and_grows_with_the_sample(a: float, b: float) -> None:
    assert 0 < weight(min(a, b)) <= weight(max(a, b)) <= 1


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 0.02), (0.2, 0.02), (0.5, 0.05), (1.0, 0.1), (60.0, 0.1)])
def test_a_new_value_counts_for_two_to_ten_percent(seconds: float, share: float) -> None:
    assert weight(seconds) == pytest.approx(share)


@pytest.mark.parametrize(
    ("newest_first", "usual"),
    [
        ([3.0], 3.0),
        ([1.0, 1.0, 30.0], 1.0),  # a first step with its warm-up
        ([1800.0, 1800.0, 9000.0, 1800.0, 1790.0], 1800.0),  # one that was held up
        ([1.0, 1.0, 1.0, 10.0, 30.0], 4.6),  # the longest counts as the second longest, and no less
        ([1.0] * 9 + [3.0] * 30, 1.0),  # a change that lasts
        ([1.0, 1.0, 4.0] * 10, 2.0),  # one in three is longer, and counts as often
        ([4.0, 1.0, 1.0] * 10, 2.0),
        ([0.2] * 50 + [0.3] * 80, 0.2),  # short steps: ten seconds, not nine steps, but fifty at most
    ],
)
def test_the_usual_step_follows_what_lasts_and_nothing_else(newest_first: list[float], usual: float) -> None:
    assert usual_step(newest_first) == usual


@given(st.lists(POSITIVE, min_size=1, max_size=80))
def test_the_usual_step_is_among_the_newest(times: list[float]) -> None:
    newest = times[:MOST_STEPS]
    assert min(newest) * (1 - 1e-9) <= usual_step(times) <= max(newest) * (1 + 1e-9)


@pytest.mark.parametrize("shift", range(2))
def test_steps_that_alternate_do_not_move_it(shift: int) -> None:
    assert usual_step(([1.0, 2.0] * 10)[shift:]) == pytest.approx(1.5, rel=0.04)


@pytest.mark.parametrize(
    ("size", "nodes", "uplink", "link", "seconds"),
    [
        (32_800_000_000, 9, 800.0, 525.0, 500.0),  # the paper's figure: pipelined, ≈500 s at N = 9
        (32_800_000_000, 1, 800.0, 525.0, 500.0),
        (1_000_000_000, 10, 1000.0, 100.0, 80.0),
        (1_000_000_000, 3, 100.0, 1000.0, 80.0),  # the uplink is the narrow place
        (1_000_000_000, 0, 100.0, 1000.0, 0.0),
    ],
)
def test_broadcast_time(size: int, nodes: int, uplink: float, link: float, seconds: float) -> None:
    assert broadcast_time(size, nodes, uplink, link) == pytest.approx(seconds, rel=2e-3)


@given(size=st.integers(1, 10**11), nodes=st.integers(1, 500), uplink=st.floats(1, 1e5), link=st.floats(1, 1e5))
def test_broadcast_time_bounds(size: int, nodes: int, uplink: float, link: float) -> None:
    found = broadcast_time(size, nodes, uplink, link, hop_s=0.0)
    assert found >= size * 8e-6 / min(link, uplink) * (1 - 1e-9), "no faster than the narrowest link"
    assert found <= size * 8e-6 * max(1 / link, nodes / uplink) * (1 + 1e-9) or link > uplink, "no slower than a star"
    more = broadcast_time(size, nodes + 1, uplink, link, hop_s=0.05)
    assert more >= broadcast_time(size, nodes, uplink, link, hop_s=0.05) * (1 - 1e-9) - 0.05


@pytest.mark.parametrize(("age", "expected"), [(0.0, 100.0), (5.0, 75.0), (10.0, 50.0), (20.0, 0.0), (99.0, 0.0)])
def test_a_young_node_counts_as_estimated(age: float, expected: float) -> None:
    assert settle(0.0, 100.0, age, 20.0) == pytest.approx(expected)
    assert settle(100.0, 0.0, age, 20.0) == pytest.approx(100.0 - expected)


def test_a_node_counts_as_measured_at_once_where_nobody_wants_to_wait() -> None:
    assert settle(7.0, 100.0, 0.0, 0.0) == 7.0
    assert settle(7.0, 100.0, -5.0, 20.0) == 100.0, "a clock that runs backwards says nothing"


def test_each_hop_of_a_chain_adds_its_delay() -> None:
    # 30 nodes in three chains of ten: nine hops behind the first.
    assert broadcast_time(10**9, 30, 300.0, 100.0, hop_s=1.0) == pytest.approx(80.0 + 9)
    assert broadcast_time(10**9, 1, 300.0, 100.0, hop_s=1.0) == pytest.approx(80.0)
