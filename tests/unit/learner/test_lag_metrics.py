"""What a step tells of each version lag."""

from __future__ import annotations

import dataclasses

import pytest

from app.learner.buffer import Group
from app.learner.trainer import GRPOTrainer
from app.protocol.trajectory import Rollout
from tests.unit.learner.samples import group, job, random_model
from tests.unit.learner.test_trainer import near_policy


def test_what_is_said_of_a_lag_is_what_a_step_of_that_lag_alone_says():
    trainer = GRPOTrainer(random_model(), job())
    trainer.steps = 6
    old = [*near_policy(1, 3), group("silent", rewards=(1.0,) * 3)]
    old = [Group(g.work_item, tuple(dataclasses.replace(r, span_versions=[2]) for r in g.rollouts)) for g in old]
    cut = dataclasses.replace(old[0].rollouts[0], finish_reason="length", reward=0.25)
    old[0] = Group(old[0].work_item, (cut, *old[0].rollouts[1:]))
    new = [
        Group(f"new {g.work_item}", tuple(dataclasses.replace(r, span_versions=[5]) for r in g.rollouts))
        for g in near_policy(2, 2)
    ]
    values = trainer.step([*old, *new]).values
    names = {n.partition("_lag_")[0] for n in values if "_lag_" in n}
    assert names == {
        "reward", "advantage_std", "zero_variance_share", "mismatch_kl", "ess", "clip_share", "ratio_p99", "entropy",
        "completion_tokens_mean", "truncated_share",
    }  # fmt: skip
    for lag, groups in ((4, old), (1, new)):
        alone = GRPOTrainer(random_model(), job()).step(groups).values
        for name in names:
            assert values[f"{name}_lag_{lag}"] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), (name, lag)
    assert values["zero_variance_share_lag_4"] == 0.25
    assert values["truncated_share_lag_4"] > values["truncated_share_lag_1"] == 0.0


def test_a_rollout_of_several_versions_counts_by_its_oldest_token():
    trainer = GRPOTrainer(random_model(), job())
    trainer.steps = 9
    rollouts = [Rollout("a", 0, i, [1, 2], [3, 4], [-4.0, -1.0], [2, 7], [0, 1], float(i), "stop") for i in range(2)]
    values = trainer.step([Group("a", tuple(rollouts))]).values
    assert {n for n in values if n.startswith(("reward_lag", "ess_lag"))} == {"reward_lag_7", "ess_lag_2", "ess_lag_7"}
    assert values["reward_lag_7"] == 0.5
