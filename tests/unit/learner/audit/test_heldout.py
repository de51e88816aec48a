"""Greedy answers to held-out prompts: what honest nodes hand in, and what they would if they lied."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from app.learner.audit.heldout import greedy, judge
from app.learner.audit.scoring import Scored, score
from app.learner.buffer import Group
from app.learner.sampling import sample
from app.protocol.audits import Audit
from app.protocol.trajectory import Rollout
from tests.unit.learner.audit.samples import BOUND, EOS, TOKENS, Shelf
from tests.unit.learner.samples import random_model


def wild(seed: int):
    """A small model that goes on from one token to quite others."""
    model = random_model(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.copy_(torch.randn(weights.shape, generator=generator) * 2 / weights.shape[1] ** 0.5)
    return model


MODEL = wild(0)
OTHER = wild(5)
SHELF = Shelf({0: MODEL, 1: OTHER})


def answers(model, count: int = 20, *, temperature: float = 0.0, version: int = 0, seed: int = 1) -> list[Group]:
    """Answers as a node gives them; `temperature` 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(4, 50, (5,), generator=generator).tolist() for _ in range(count)]
    made = sample(model, prompts, max_tokens=TOKENS, temperature=temperature, eos=EOS, generator=generator)
    return [
        Group(name, (Rollout(name, 0, 0, p, c.ids, [0.0] * len(c.ids), [version], [0], 1.0, c.finish_reason),), "n")
        for name, p, c in zip((f"j-eval-0-{i}" for i in range(count)), prompts, made, strict=True)
    ]


def audited(group: Group, *, never=lambda _: False, reward_off: float | None = 0.0, shelf: Shelf = SHELF) -> Audit:
    audit = greedy(group, shelf, never, reward_off=reward_off, max_rms=BOUND)
    assert audit.heldout == "greedy"
    return audit


def said(group: Group, **options) -> tuple[str, str]:
    audit = audited(group, **options)
    return audit.verdict, audit.fault


def forged(rollout: Rollout, **changes) -> Rollout:
    """With another last token."""
    *head, last = rollout.completion_ids
    return dataclasses.replace(rollout, completion_ids=[*head, 13 if last != 13 else 14], **changes)


def told(group: Group, rollout: Rollout) -> Group:
    return dataclasses.replace(group, rollouts=(rollout,))


def test_honest_greedy_answers_pass_whatever_log_probs_were_recorded():
    assert {said(g) for g in answers(MODEL)} == {("passed", "")}


def test_answers_of_an_engine_that_rounds_pass_too():
    """In bfloat16 near ties fall the other way; from there on it is another answer, and as greedy."""
    coarse = copy.deepcopy(MODEL).to(torch.bfloat16)
    found = answers(coarse, 200)
    exact = {g.work_item: list(g.rollouts[0].completion_ids) for g in answers(MODEL, 200)}
    assert any(list(g.rollouts[0].completion_ids) != exact[g.work_item] for g in found), "some fell the other way"
    verdicts = [said(g)[0] for g in found]
    assert verdicts.count("failed") == 0
    assert verdicts.count("suspect") <= 2, "one token far behind may be chance"


def test_sampled_answers_in_place_of_greedy_ones_are_found():
    verdicts = [said(g)[0] for g in answers(MODEL, 100, temperature=1.0)]
    assert verdicts.count("failed") > 50
    assert verdicts.count("passed") < 25


def test_answers_of_another_version_than_the_claimed_one_are_found():
    verdicts = [said(g)[0] for g in answers(OTHER, 40)]
    assert verdicts.count("failed") > 30
    assert verdicts.count("passed") < 3


def test_one_token_put_in_for_a_right_answer_is_suspect_and_its_answer_does_not_count():
    group = answers(MODEL, 1)[0]
    audit = audited(told(group, forged(group.rollouts[0])))
    assert (audit.verdict, audit.fault, audit.clean) == ("suspect", "greedy", False)
    assert "1 of " in audit.detail


def test_a_false_reward_or_version_is_a_lie_and_a_version_that_is_gone_is_none():
    group = answers(MODEL, 1)[0]
    assert said(group, reward_off=1.0) == ("failed", "reward")
    assert said(group, never=lambda v: True) == ("failed", "version")
    assert said(group, shelf=Shelf({})) == ("unclear", "")


def test_an_audit_tells_how_far_behind_the_tokens_are_and_whether_the_reward_is_right():
    group = answers(MODEL, 1, version=0)[0]
    forgery = told(group, forged(group.rollouts[0]))
    (scored,) = score(MODEL, forgery.rollouts, 1.0, 4096)
    behind = (scored.top - scored.logprob).clamp(max=20.0)
    audit = audited(forgery)
    assert (audit.tokens, audit.version, audit.reward_ok) == (len(group.rollouts[0].completion_ids), 0, True)
    assert audit.rms == pytest.approx(float(behind.square().mean().sqrt()))
    assert audited(group).rms == pytest.approx(0.0, abs=1e-4)
    assert [audited(group, reward_off=off).reward_ok for off in (0.0, 1.0, None)] == [True, False, None]
    gone = audited(group, shelf=Shelf({}))
    assert (gone.tokens, gone.rms, gone.reward_ok) == (0, 0.0, True)


class Certain:
    """Weights under which the answer can't be: all probability is elsewhere, or nothing is a number."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob

    def score(self, version: int, rollouts: Sequence[Rollout]) -> list[Scored]:
        sizes = [torch.ones(len(r.completion_ids), dtype=torch.float64) for r in rollouts]
        return [Scored(self.logprob * one, 0 * one, 0 * one, 0 * one) for one in sizes]


def test_tokens_that_the_policy_can_not_write_are_as_far_behind_as_anything_and_no_number_is_no_proof():
    group = answers(MODEL, 1)[0]
    audit = greedy(group, Certain(-np.inf), lambda _: False, reward_off=0.0, max_rms=BOUND)
    assert (audit.verdict, audit.rms) == ("failed", 20.0)
    audit = greedy(group, Certain(np.nan), lambda _: False, reward_off=0.0, max_rms=BOUND)
    assert (audit.verdict, audit.fault) == ("unclear", "")


def test_each_token_is_held_against_the_version_that_its_span_claims():
    group = answers(MODEL, 1)[0]
    rollout = group.rollouts[0]
    half = len(rollout.completion_ids) // 2
    seen: list[tuple[int, int]] = []

    class Watched(Shelf):
        def score(self, version: int, rollouts: Sequence[Rollout]) -> list[Scored] | None:
            seen.append((version, len(rollouts)))
            return super().score(version, rollouts)

    split = dataclasses.replace(rollout, span_versions=[0, 1], span_starts=[0, half])
    audit = audited(told(group, split), shelf=Watched(SHELF.models))
    assert seen == [(0, 1), (1, 1)]
    assert (audit.verdict, audit.fault) == ("unclear", "greedy"), "the second half is not v1's; nobody is to blame"
    assert not audit.clean
    assert said(told(group, split), shelf=Shelf({0: MODEL, 1: MODEL})) == ("passed", "")


def test_tokens_that_the_environment_wrote_are_nobodys_choice():
    group = answers(MODEL, 1)[0]
    rollout = group.rollouts[0]
    written = [True] * (len(rollout.completion_ids) - 1) + [False]
    assert said(told(group, forged(rollout))) == ("suspect", "greedy")
    assert said(told(group, forged(rollout, generated=written))) == ("passed", "")


@pytest.mark.parametrize(
    ("behind", "verdict"),
    [
        ([0.0] * 10, "passed"),
        ([0.0] * 9 + [0.14], "passed"),  # near ties
        ([0.0] * 9 + [0.16], "suspect"),
        ([0.0] * 8 + [0.16, 0.16], "failed"),
        ([0.0] * 398 + [1.0, 1.0], "suspect"),  # in 400 tokens two may be outliers
        ([0.0] * 397 + [1.0] * 3, "suspect"),
        ([0.0] * 396 + [1.0] * 4, "failed"),
    ],
)
def test_margins_decide(behind: list[float], verdict: str):
    assert judge(np.array(behind), reward_off=None, never=None, versions=[3], bound=0.15)[0] == verdict


@pytest.mark.parametrize(("behind", "expected"), [([0.0, 0.1], ("unclear", "")), ([3.0, 3.0], ("failed", "greedy"))])
def test_likeliest_answers_whose_reward_is_unknown_have_not_passed(behind: list[float], expected: tuple[str, str]):
    found = judge(np.array(behind), reward_off=None, never=None, versions=[3], bound=0.15, unscored="it hangs")
    assert found[:2] == expected
