"""Rollouts of quantised weights count at most once, if the job says so; all others count as ever."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch

from app.learner import weights
from app.learner.buffer import Group
from app.learner.losses import WHOLE_STEP, Limits, Tokens, surrogate, whole_step
from app.learner.parallel.messages import packed, unpacked
from app.learner.trainer import GRPOTrainer
from app.protocol.job import JobSpec
from app.protocol.learner_spec import LearnerSpec, LossName
from tests.unit.learner.samples import batch, job, random_model

torch.set_num_threads(1)
INT8 = {"quantise": "int8"}


@pytest.mark.parametrize(
    ("ratio", "quantised", "factor"),
    [(0.25, True, 1.0), (1.0, True, 1.0), (2.0, True, 0.5), (8.0, True, 0.125), (8.0, False, 1.0), (0.25, False, 1.0)],
)
def test_the_factor_brings_a_weight_down_to_one(ratio: float, quantised: bool, factor: float) -> None:
    found = weights.one_sided(torch.tensor([math.log(ratio)]), torch.tensor([quantised]))
    assert found.item() == pytest.approx(factor)


LOSSES = [{"loss": name} for name in get_args(LossName) if name not in ("obrs", "ppo_clip")] + [
    {"loss": "ppo_clip", "replay_ratio": kind} for kind in ("off", "token", "sequence")
]


def pushes(
    spec: LearnerSpec, ratios: list[float], quantised: list[bool] | None, advantage: float = 1.0
) -> torch.Tensor:
    """Gradient of the objective by log π_θ, of tokens with the same advantage, all of one answer."""
    logprobs = torch.full((len(ratios),), -1.0, dtype=torch.float64, requires_grad=True)
    behaviour = -1 - torch.tensor(ratios, dtype=torch.float64).log()
    advantages = torch.full((len(ratios),), advantage, dtype=torch.float64)
    lag, sequence = torch.ones(len(ratios), dtype=torch.long), torch.zeros(len(ratios), dtype=torch.long)
    mark = None if quantised is None else torch.tensor(quantised)
    tokens = Tokens(logprobs, behaviour, advantages, lag, sequence, held=mark)
    limits = Limits()
    if spec.loss in WHOLE_STEP:
        limits = whole_step(spec, weights.log_ratio(logprobs.detach(), behaviour), advantages)
    (gradient,) = torch.autograd.grad(surrogate(spec, tokens, limits).objective.sum(), logprobs)
    return gradient


@pytest.mark.parametrize("fields", LOSSES, ids=str)
def test_no_loss_gives_a_quantised_rollout_more_than_weight_one(fields: dict[str, str]) -> None:
    spec = LearnerSpec.model_validate({**fields, "dppo_pull": 0.0, "m2_budget": 100.0, "gspo_high": 9.0})
    ratios = [1.15, 1.1, 1.02, 1.0]
    plain, one_sided = pushes(spec, ratios, None), pushes(spec, ratios, [True] * 4)
    assert plain.max() > 1.0, "the case needs a loss that gives a weight above 1"
    assert torch.equal(plain > 0, one_sided > 0), "masks are as they were"
    assert one_sided.max() == pytest.approx(1.0)
    assert torch.equal(pushes(spec, ratios, [False] * 4), plain)


@pytest.mark.parametrize("fields", [{"loss": name} for name in ("ppo_clip", "dppo", "tis", "cispo")], ids=str)
def test_weights_below_one_and_masked_tokens_stay(fields: dict[str, str]) -> None:
    spec = LearnerSpec.model_validate({**fields, "dppo_pull": 0.0})
    ratios = [0.9, 0.95, 1.0, 8.0]
    plain, one_sided = pushes(spec, ratios, None), pushes(spec, ratios, [True] * 4)
    assert torch.allclose(plain[:3], one_sided[:3])
    assert one_sided[3] == (0.0 if plain[3] == 0 else pytest.approx(1.0))


@pytest.mark.parametrize(
    "fields",
    [{"loss": "ppo_clip"}, {"loss": "dppo", "replay_ratio": "token"}, {"loss": "m2po", "replay_ratio": "sequence"}],
    ids=str,
)
def test_a_cap_of_a_weight_that_the_loss_does_not_use_leaves_nothing_above_one(fields: dict[str, str]) -> None:
    """Moved far up against its advantage: nothing clips or masks it, and no loss here truncates its weight."""
    spec = LearnerSpec.model_validate({**fields, "dppo_pull": 0.0, "m2_budget": 100.0, "replay_cap": 2.0})
    plain, one_sided = pushes(spec, [8.0], None, -1.0), pushes(spec, [8.0], [True], -1.0)
    assert (plain.item(), one_sided.item()) == (pytest.approx(-8.0), pytest.approx(-1.0))


def marked(groups: list[Group], mark: str | None) -> list[Group]:
    return [
        Group(g.work_item, tuple(dataclasses.replace(r, quantisation=mark) for r in g.rollouts), g.node) for g in groups
    ]


def after_a_step(spec: JobSpec, groups: list[Group]) -> dict[str, torch.Tensor]:
    trainer = GRPOTrainer(random_model(), spec)
    trainer.step(groups)
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_goes_by_the_mark_that_the_rollouts_carry(packing: bool) -> None:
    learner = {"loss": "tis", "packing": packing, "grad_clip": 1e6}
    off, on = job(learner=learner, snapshot=INT8), job(learner={**learner, "one_sided": True}, snapshot=INT8)
    plain, quantised = marked(batch(0), None), marked(batch(0), "int8")
    usual = after_a_step(off, quantised)
    assert same(after_a_step(on, plain), usual), "without the mark nothing changes"
    assert not same(after_a_step(on, quantised), usual)


def test_other_ranks_get_the_mark_too() -> None:
    for mark in ("int8", None):
        got = unpacked(packed(marked(batch(0), mark)))
        assert {r.quantisation for g in got for r in g.rollouts} == {mark}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"learner": {"one_sided": True}}, "snapshot.quantise"),
        ({"learner": {"one_sided": True, "loss": "obrs"}, "snapshot": INT8}, "obrs"),
        ({"learner": {"lora": {}}, "snapshot": INT8}, "learner.lora"),
        ({"snapshot": {"quantise": "int4"}}, "int8"),
    ],
)
def test_what_does_not_go_together_is_said_when_the_job_is_posted(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        job(**changes)
