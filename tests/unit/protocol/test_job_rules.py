"""What a job says in several fields has to fit together; what it leaves out follows from the rest."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.unit.protocol.test_job import post


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"batch.on_late": "train"}, "batch", "needs group_deadline_s"),
        ({"batch.min_group": 4}, "batch", "need a group_policy that varies sizes"),
        ({"batch.max_group": 16}, "batch", "need a group_policy that varies sizes"),
        ({"batch.group_policy": "coba", "batch.prune": "shuffle_r1"}, "batch", "give one of them"),
        ({"batch.group_policy": "coba", "batch.min_group": 9}, "batch", "within min_group 9 and max_group 32"),
        ({"batch.group_policy": "cures", "batch.max_group": 7}, "batch", "within min_group 2 and max_group 7"),
        ({"snapshot.quantise": "int8", "learner.lora": {}}, "", "snapshot.quantise is for whole models"),
        ({"learner.one_sided": True}, "", "it needs snapshot.quantise"),
        ({"rewards": "learner", "learner.eval_by": "learner", "batch.prune": "shuffle_r1"}, "", "that nodes compute"),
        ({"rewards": "learner", "learner.eval_by": "learner", "batch.group_policy": "coba"}, "", "that nodes compute"),
        ({"rewards": "learner"}, "", 'needs learner.eval_by "learner"'),
        ({"learner.bapo_low": 0.95}, "learner", "bapo_low must be at most bapo_low_max"),
        ({"learner.bapo_high": 3.5}, "learner", "bapo_high must be at most bapo_high_max"),
        ({"learner.bapo_high_max": 4.0}, "learner", "bapo_dual_clip must be at least bapo_high_max"),
        ({"learner.obrs_lambda": 6.0}, "learner", "obrs_lambda must be at most obrs_cap"),
        ({"learner.final_merged": True}, "learner", "final_merged needs lora"),
        ({"learner.one_sided": True, "learner.loss": "obrs"}, "learner", "not defined for obrs"),
        ({"learner.gac_low": 0.95}, "learner", "gac_low must be at most gac_high"),
        ({"learner.lora": {"targets": []}}, "learner.lora.targets", "name at least one kind of layer"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_with_what_to_change(
    changes: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        post(changes)
    (error,) = caught.value.errors()
    assert ".".join(map(str, error["loc"])) == field
    assert says in error["msg"]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch.on_late": "train", "batch.group_deadline_s": 5},
        {"batch.group_policy": "coba", "batch.min_group": 8, "batch.max_group": 8},
        {"batch.prune": "shuffle_r1", "rewards": "both"},
        {"snapshot.quantise": "int8", "learner.one_sided": True},
        {"rewards": "learner", "learner.eval_by": "learner"},
        {"learner.bapo_low": 0.9, "learner.bapo_high": 3.0},
        {"learner.bapo_high_max": 4.0, "learner.bapo_dual_clip": 4.0},
        {"learner.final_merged": True, "learner.lora": {"targets": ["q_proj"]}},
        {"learner.loss": "obrs"},
        {"learner.obrs_lambda": 6.0, "learner.obrs_cap": 6.0},
        {"learner.gac_low": 0.9},
        {"staleness_budget": 6, "staleness": {"max": 6}},
        {"stop": {"steps": None, "max_hours": 1}},
        {"stop": {"steps": None, "target_reward": 0.5}},
    ],
)
def test_fields_that_go_together_are_taken(changes: dict[str, Any]) -> None:
    assert post(changes)


@pytest.mark.parametrize(
    ("batch", "bounds"),
    [
        ({}, (8, 8)),
        ({"group_policy": "coba"}, (2, 32)),
        ({"group_policy": "cures", "min_group": 4, "max_group": 12}, (4, 12)),
        ({"group_policy": "coba", "group_size": 512}, (2, 1024)),
    ],
)
def test_how_many_answers_a_prompt_may_get(batch: dict[str, Any], bounds: tuple[int, int]) -> None:
    assert post({"batch": batch}).batch.group_bounds == bounds


@pytest.mark.parametrize(
    ("changes", "first", "at_most"),
    [
        ({}, (3, 2), (3, 2)),
        ({"staleness": {"max": 6, "adaptive": True}}, (3, 2), (6, 5)),
        ({"staleness": {"max": 2, "adaptive": True}}, (2, 1), (2, 1)),
        ({"staleness": {"max": 6}}, (6, 5), (6, 5)),
        ({"staleness_budget": 6}, (6, 5), (6, 5)),
        ({"staleness": {"max": 6, "adaptive": True}, "publish_period": 4}, (3, 2), (6, 4)),
        ({"staleness": {"max": 6, "adaptive": True}, "publish_period": 1}, (3, 1), (6, 1)),
    ],
)
def test_an_adaptive_staleness_begins_low(
    changes: dict[str, Any], first: tuple[int, int], at_most: tuple[int, int]
) -> None:
    spec = post(changes)
    assert (spec.first_staleness, spec.first_period) == first
    assert (spec.staleness_budget, spec.kappa) == at_most


@pytest.mark.parametrize(
    ("learner", "groups"),
    [({}, 64), ({"refill": False}, 32), ({"refill_factor": 1.0}, 32), ({"refill_factor": 1.3}, 41)],
)
def test_how_many_groups_a_step_may_consume(learner: dict[str, Any], groups: int) -> None:
    assert post({"learner": learner}).learner.most_groups(32) == groups


@pytest.mark.parametrize(
    ("learner", "scale"),
    [({}, "none"), ({"loss": "ppo_clip"}, "group"), ({"scale_rewards": "batch"}, "batch"),
     ({"loss": "gspo", "scale_rewards": "none"}, "none")],
)  # fmt: skip
def test_what_rewards_are_divided_by_follows_from_the_loss(learner: dict[str, Any], scale: str) -> None:
    assert post({"learner": learner}).learner.reward_scale == scale
