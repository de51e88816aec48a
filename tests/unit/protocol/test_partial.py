"""The partial file is as strict as the trajectory file, but for what it is there for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol import partial, trajectory
from app.protocol.errors import Refused
from app.protocol.trajectory import Expected, Rollout

EXPECTED = {"w0": Expected(3, 4), "w1": Expected(5, 4)}


def sample(item: str = "w0", index: int = 0, **more: Any) -> Rollout:
    row = Rollout(
        work_item=item,
        prompt_index=EXPECTED[item].prompt_index if item in EXPECTED else 0,
        sample_index=index,
        prompt_ids=[7, 8],
        completion_ids=[1, 2, 3],
        logprobs=[-0.5, -0.25, -1.0],
        span_versions=[1, 2],
        span_starts=[0, 2],
        reward=0.0,
        finish_reason="abort",
    )
    return replace(row, **more)


def check(*rows: Rollout, newest: int = 9, quantised: str | None = None) -> None:
    table = trajectory.read_table(partial.encode_partial(rows))
    partial.validate(table, EXPECTED, newest_version=newest, max_tokens=8, quantised=quantised)


GOOD = (sample(), sample(index=2, finish_reason="stop"), sample("w1", 3))


def test_samples_may_be_missing_and_cut() -> None:
    check(*GOOD)
    check(sample(generated=[True, False, True], logprobs=[-0.5, 0.0, -1.0]), sample("w1"))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([sample()], "incomplete_group"),
        ([*GOOD, sample(index=2)], "incomplete_group"),
        ([*GOOD, sample(index=4)], "incomplete_group"),
        ([*GOOD, sample(index=-1)], "incomplete_group"),
        ([*GOOD, sample("w2")], "foreign_work_item"),
        ([*GOOD, sample(index=1, prompt_index=4)], "wrong_prompt"),
        ([*GOOD, sample(index=1, prompt_ids=[7, 9])], "wrong_prompt"),
        ([*GOOD, sample(index=1, completion_ids=[], logprobs=[])], "lengths"),
        ([*GOOD, sample(index=1, logprobs=[-1.0])], "lengths"),
        ([*GOOD, sample(index=1, completion_ids=[1] * 8, logprobs=[-1.0] * 8)], "lengths"),
        ([*GOOD, sample(index=1, completion_ids=[1] * 9, logprobs=[-1.0] * 9, finish_reason="length")], "lengths"),
        ([*GOOD, sample(index=1, generated=[False] * 3, logprobs=[0.0] * 3)], "lengths"),
        ([*GOOD, sample(index=1, logprobs=[0.5, 0.0, 0.0])], "logprobs"),
        ([*GOOD, sample(index=1, logprobs=[float("nan"), 0.0, 0.0])], "logprobs"),
        ([*GOOD, sample(index=1, span_starts=[0, 3])], "versions"),
        ([*GOOD, sample(index=1, span_starts=[1, 2])], "versions"),
        ([*GOOD, sample(index=1, span_versions=[1])], "versions"),
        ([*GOOD, sample(index=1, span_versions=[1, 10])], "future_version"),
        ([*GOOD, sample(index=1, finish_reason="eaten")], "finish_reason"),
        ([replace(row, quantisation="int8") for row in GOOD], "quantisation"),
    ],
)
def test_everything_else_is_refused(rows: list[Rollout], reason: str) -> None:
    with pytest.raises(Refused) as refused:
        check(*rows)
    assert refused.value.reason == reason


def test_a_finished_sample_of_full_length_is_no_cut_one() -> None:
    full: dict[str, Any] = {"completion_ids": [1] * 8, "logprobs": [-1.0] * 8}
    check(*GOOD, sample(index=1, finish_reason="length", **full))


def test_rewards_are_left_out_and_refused() -> None:
    rows = [replace(row, reward=1.0) for row in GOOD]
    assert {row.reward for row in trajectory.rollouts(trajectory.read_table(partial.encode_partial(rows)))} == {0.0}
    table = trajectory.read_table(trajectory.encode(rows))
    with pytest.raises(Refused) as refused:
        partial.validate(table, EXPECTED, newest_version=9, max_tokens=8)
    assert refused.value.reason == "reward"


def test_a_trajectory_is_no_place_for_cut_samples() -> None:
    rows = [sample(index=i) for i in range(4)]
    with pytest.raises(Refused) as refused:
        trajectory.validate(
            trajectory.read_table(trajectory.encode(rows)), {"w0": EXPECTED["w0"]}, newest_version=9, max_tokens=8
        )
    assert refused.value.reason == "finish_reason"


def test_nothing_is_no_file() -> None:
    with pytest.raises(ValueError, match="at least one"):
        partial.encode_partial([])


def test_one_group_is_read_out_of_a_file_and_checked_by_itself() -> None:
    data = partial.encode_partial([*GOOD, sample("w2"), sample("w2")])
    rows = partial.group_of(data, "w0", EXPECTED["w0"], newest_version=9, max_tokens=8)
    assert [(row.work_item, row.sample_index) for row in rows] == [("w0", 0), ("w0", 2)]
    assert rows[0] == sample()
    with pytest.raises(Refused) as refused:
        partial.group_of(data, "w2", Expected(0, 4), newest_version=9, max_tokens=8)
    assert refused.value.reason == "incomplete_group"
    with pytest.raises(Refused) as refused:
        partial.group_of(data, "w7", Expected(0, 4), newest_version=9, max_tokens=8)
    assert refused.value.reason == "incomplete_group"
    with pytest.raises(Refused) as refused:
        partial.group_of(data[:-9], "w0", EXPECTED["w0"], newest_version=9, max_tokens=8)
    assert refused.value.reason == "truncated"


@given(data=st.data())
def test_damage_is_refused_and_never_a_crash(data: st.DataObject) -> None:
    whole = partial.encode_partial(GOOD)
    at, value = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    damaged = bytearray(whole)
    damaged[at] = value
    try:
        rows = partial.group_of(bytes(damaged), "w0", EXPECTED["w0"], newest_version=9, max_tokens=8)
    except Refused:
        return
    assert all(row.work_item == "w0" and len(row.logprobs) == len(row.completion_ids) for row in rows)
