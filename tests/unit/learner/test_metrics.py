"""The numbers of a step, each by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from app.learner.buffer import Group
from app.learner.metrics import Seen, advantage_metrics, lag_metrics, node_metrics, ratio_metrics, step_metrics
from app.protocol.trajectory import Rollout


def rollout(reward: float, logprobs: list[float], version: int = 0, finish: str = "stop", **fields) -> Rollout:
    ids = list(range(1, len(logprobs) + 1))
    return Rollout("w", 0, 0, [1, 2], ids, logprobs, [version], [0], reward, finish, **fields)


def seen(ratios: list[float], lags: list[int], high: list[int] = (), low: list[int] = (), **more) -> Seen:
    """Of tokens with these ratios; `high` and `low` are the places of those that the loss holds back."""
    held = [torch.tensor([i in places for i in range(len(ratios))]) for places in (high, low)]
    return Seen(0.25, torch.tensor(ratios, dtype=torch.float64).log(), torch.tensor(lags), *held, **more)


GROUPS = [
    Group("a", (rollout(0.0, [-1.0, -2.0]), rollout(1.0, [-0.5], finish="length")), "n"),
    # Its second token is the environment's: it has the log-prob 0.
    Group("b", (rollout(0.5, [-3.0, 0.0, -1.0], generated=[True, False, True]), rollout(0.5, [-1.0])), "m"),
]


def test_a_step_tells_of_all_its_groups():
    found = step_metrics(GROUPS, seen([1.0, 2.0], [1, 1]), 6)
    assert found["reward"] == 0.5
    assert found["loss"] == 0.25
    assert found["entropy"] == pytest.approx(8.5 / 6)
    assert found["zero_variance_share"] == 0.5
    assert found["truncated_share"] == 0.25
    assert (found["completion_tokens_mean"], found["completion_tokens_max"]) == (6 / 4, 2.0)
    assert (found["answer_tokens_mean"], found["answer_tokens_max"]) == (7 / 4, 3.0)
    assert (found["tokens"], found["active_tokens"], found["rollouts"]) == (6.0, 2.0, 4.0)
    assert "reference_kl" not in found


def test_groups_without_a_signal_are_a_share_of_all_groups():
    found = step_metrics([GROUPS[0], GROUPS[0], GROUPS[0], GROUPS[1]], seen([], []), 15)
    assert found["zero_variance_share"] == 0.25
    groups = [*(Group(f"a{i}", (rollout(0.0, [-1.0]), rollout(1.0, [-1.0]))) for i in range(3)), GROUPS[1]]
    cut = dataclasses.replace(groups[0].rollouts[0], finish_reason="length")
    groups[0] = Group("cut", (cut, groups[0].rollouts[1]))
    found = lag_metrics(groups, [[0.0, 0.0]] * 4, 1)
    assert (found["zero_variance_share_lag_1"], found["truncated_share_lag_1"]) == (0.25, 0.125)


def test_the_divergence_from_v0_is_a_mean_over_the_tokens_that_were_trained_on():
    assert step_metrics(GROUPS, seen([1.0, 2.0], [1, 1], reference_kl=0.5), 6)["reference_kl"] == 0.25
    assert step_metrics(GROUPS, seen([1.0], [1], reference_kl=0.5), 6)["reference_kl"] == 0.5
    assert step_metrics(GROUPS, seen([], [], reference_kl=0.0), 6)["reference_kl"] == 0.0


def test_ratios_are_told_over_all_tokens_and_by_lag():
    found = ratio_metrics(seen([1.0, 2.0, 0.5, 4.0], [1, 1, 3, 3], high=[3], low=[2]))
    assert found["ratio_mean"] == pytest.approx(7.5 / 4)
    assert found["log_ratio_squared"] == pytest.approx((1 + 1 + 4) * math.log(2) ** 2 / 4)
    assert (found["clip_share"], found["clip_share_high"], found["clip_share_low"]) == (0.5, 0.25, 0.25)
    assert (found["clip_share_lag_1"], found["clip_share_lag_3"]) == (0.0, 1.0)
    assert found["ess"] == pytest.approx(7.5**2 / (4 * (1 + 4 + 0.25 + 16)))
    assert found["ess_lag_1"] == pytest.approx(9 / (2 * 5))
    kl = [r - 1 - math.log(r) for r in (1.0, 2.0, 0.5, 4.0)]
    assert found["mismatch_kl"] == pytest.approx(sum(kl) / 4)
    assert found["mismatch_kl_lag_3"] == pytest.approx((kl[2] + kl[3]) / 2)
    assert found["ratio_p99"] == found["ratio_p99_lag_3"] == pytest.approx(4.0)


def test_the_99th_percentile_leaves_out_one_in_a_hundred():
    assert ratio_metrics(seen([1.0] * 198 + [5.0, 9.0], [1] * 200))["ratio_p99"] == pytest.approx(1.0)
    assert ratio_metrics(seen([1.0] * 197 + [3.0, 5.0, 9.0], [1] * 200))["ratio_p99"] == pytest.approx(3.0)


def test_without_a_token_to_train_on_a_step_tells_what_is_true_on_policy():
    found = ratio_metrics(seen([], []))
    assert {n for n, value in found.items() if value == 1.0} == {"ratio_mean", "ratio_p99", "ess"}
    assert {n for n, value in found.items() if value == 0.0} == {
        "mismatch_kl", "log_ratio_squared", "clip_share", "clip_share_high", "clip_share_low",
    }  # fmt: skip
    assert found.keys() == ratio_metrics(seen([1.0], [0])).keys() - {
        f"{name}_lag_0" for name in ("ratio_p99", "ess", "mismatch_kl", "clip_share")
    }


def test_rollouts_and_groups_are_told_by_the_version_that_their_lag_counts_from():
    old = Group("old", (rollout(1.0, [-1.0, -3.0], 2, "length"), rollout(0.0, [-2.0], 5)), "n")
    lone = Group("lone", (rollout(1.0, [-1.5], 6),))
    new = Group("new", (rollout(0.5, [-1.0], 5), rollout(0.5, [-1.0], 5)), "n")
    found = lag_metrics([old, new, lone], [[1.0, -1.0], [0.0, 0.0], [0.0]], 6)
    assert (found["entropy_lag_0"], found["completion_tokens_mean_lag_0"]) == (1.5, 1.0)
    assert (found["reward_lag_4"], found["reward_lag_1"]) == (1.0, pytest.approx(1 / 3))
    assert (found["entropy_lag_4"], found["entropy_lag_1"]) == (2.0, pytest.approx(4 / 3))
    assert (found["truncated_share_lag_4"], found["truncated_share_lag_1"]) == (1.0, 0.0)
    assert (found["completion_tokens_mean_lag_4"], found["completion_tokens_mean_lag_1"]) == (2.0, 1.0)
    assert (found["advantage_std_lag_4"], found["advantage_std_lag_1"]) == (0.0, pytest.approx(math.sqrt(2 / 9)))
    assert (found["zero_variance_share_lag_4"], found["zero_variance_share_lag_1"]) == (0.0, 1.0)


def test_answers_without_a_token_of_the_policy_still_have_numbers():
    quiet = dataclasses.replace(rollout(0.0, [0.0]), generated=[False])
    found = lag_metrics([Group("a", (quiet, dataclasses.replace(quiet, reward=1.0)))], [[0.0, 0.0]], 1)
    assert found["entropy_lag_1"] == 0.0


def test_a_node_is_told_by_all_of_its_answers():
    ratios = torch.tensor([2.0, 1.0, 4.0, 2.0], dtype=torch.float64)
    found = node_metrics(ratios.log(), [("n", 1), ("m", 1), ("n", 2)])
    kl = [r - 1 - math.log(r) for r in (2.0, 4.0, 2.0)]
    assert found == {"mismatch_kl_node_m": 0.0, "mismatch_kl_node_n": pytest.approx(sum(kl) / 3)}


def test_advantages_are_told_by_their_spread_and_their_largest():
    assert advantage_metrics([[3.0, -1.0], [-2.0, 0.0]]) == {
        "advantage_std": pytest.approx(math.sqrt(14 / 4)),
        "advantage_max": 3.0,
    }
