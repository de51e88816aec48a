"""An honest node is never convicted, and each lie is within few audits."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from app.fleet.trust import Standing, after, guilt
from app.learner.audit.scoring import score
from app.learner.audit.statistics import NOTHING, Tokens, figures
from app.learner.buffer import Group
from tests.unit.learner.audit.samples import BOUND, EOS, TOKENS, Shelf, audited, sampled, sharper, told


def names(count: int) -> list[str]:
    return [f"w{i}" for i in range(count)]


def tried(groups: Iterable[Group], shelf: Shelf, **options) -> tuple[Standing, int | None, str]:
    """The node's standing after these audits, and when and why it was convicted."""
    standing = Standing()
    for number, group in enumerate(groups, start=1):
        audit = audited(group, shelf, **options)
        standing = after(standing, audit, BOUND)
        why = guilt(standing, audit, BOUND)
        if why:
            return standing, number, why
    return standing, None, ""


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_an_honest_node_is_not_convicted_in_a_thousand_audits(precision: torch.dtype):
    """Of float32, or of bfloat16 all through, which is what a node's GPU does; the auditor computes in float32."""
    model = sharper()
    node = copy.deepcopy(model).to(precision)
    groups = sampled(node, names(1000), torch.Generator().manual_seed(3))
    lengths = {len(r.completion_ids) for g in groups for r in g.rollouts}
    assert len(lengths) == TOKENS, "answers of all lengths, cut ones among them"
    standing, convicted, why = tried(groups, Shelf({0: model}))
    assert convicted is None, why
    assert (standing.audits, standing.failures) == (1000, 0)
    if precision is torch.bfloat16:
        assert 0.001 < (standing.rms or 0) < 0.02, "its rounding is seen, and small"


def test_an_honest_node_at_two_thirds_of_the_bound_is_not_convicted_in_a_thousand_audits():
    """Heavy tails too: one token in a hundred is 0.15 nats off."""
    model, rng = sharper(), np.random.default_rng(5)

    def rounded(rollout):
        count = len(rollout.logprobs)
        noise = np.where(rng.random(count) < 0.01, 0.15, 0.015) * rng.standard_normal(count)
        return [min(0.0, p + n) for p, n in zip(rollout.logprobs, noise, strict=True)]

    groups = sampled(model, names(1000), torch.Generator().manual_seed(4))
    standing, convicted, why = tried((told(g, logprobs=rounded) for g in groups), Shelf({0: model}))
    assert convicted is None, why
    assert standing.failures > 0, "some of them were suspect"


@pytest.mark.parametrize("seed", range(8))
def test_noise_of_0_05_nats_is_found_within_six_audits(seed: int):
    model, rng = sharper(), np.random.default_rng(seed)

    def noisy(rollout):
        return [p + n for p, n in zip(rollout.logprobs, 0.05 * rng.standard_normal(len(rollout.logprobs)), strict=True)]

    groups = sampled(model, names(6), torch.Generator().manual_seed(seed))
    _, convicted, why = tried((told(g, logprobs=noisy) for g in groups), Shelf({0: model}))
    assert convicted is not None
    assert why.startswith("drift")


def other_weights(model, by: float):
    """The model after a few steps."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return moved


@pytest.mark.parametrize("by", [0.01, 0.03, 0.1])
def test_stale_weights_are_found_within_six_audits(by: float):
    """A node that samples from v0 and says v1; every weight has moved by about so much."""
    old = sharper()
    groups = sampled(old, names(6), torch.Generator().manual_seed(1), version=1)
    _, convicted, why = tried(groups, Shelf({0: old, 1: other_weights(old, by)}))
    assert convicted is not None
    assert "log-probs are off" in why


def test_a_version_that_never_was_is_found_at_once():
    groups = sampled(sharper(), names(1), torch.Generator().manual_seed(1), version=3)
    _, convicted, why = tried(groups, Shelf({2: sharper()}), never=lambda version: version == 3)
    assert convicted == 1
    assert "v3 was never published" in why


def test_answers_of_another_group_are_found_within_four_audits():
    """With the log-probs and rewards that were true of them there."""
    first, *others = sampled(sharper(), names(5), torch.Generator().manual_seed(1))
    copies = [
        dataclasses.replace(
            g,
            rollouts=tuple(
                dataclasses.replace(old, work_item=g.work_item, prompt_ids=new.prompt_ids)
                for old, new in zip(first.rollouts, g.rollouts, strict=True)
            ),
        )
        for g in others
    ]
    _, convicted, why = tried(copies, Shelf({0: sharper()}))
    assert convicted is not None
    assert "log-probs are off" in why


def test_one_answer_given_for_all_is_found_at_once_and_a_sure_policy_may_repeat_itself():
    unsure, sure = sharper(), sharper()
    with torch.no_grad():
        sure.model.embed_tokens.weight.mul_(6)
    group = sampled(unsure, names(1), torch.Generator().manual_seed(2), size=8)[0]
    longest = max(group.rollouts, key=lambda r: -sum(r.logprobs))
    same = told(group, completion_ids=longest.completion_ids, logprobs=longest.logprobs)
    _, convicted, why = tried([same], Shelf({0: unsure}))
    assert convicted == 1
    assert why.startswith("copied")
    repeats = sampled(sure, names(50), torch.Generator().manual_seed(2), size=8)
    assert all(len({tuple(r.completion_ids) for r in g.rollouts}) < 8 for g in repeats)
    assert tried(repeats, Shelf({0: sure}))[1] is None


@pytest.mark.parametrize(("temperature", "within"), [(0.7, 25), (0.8, 60), (0.9, 300), (1.25, 200)])
def test_another_temperature_is_found_though_the_log_probs_are_true(temperature: float, within: int):
    model = sharper()
    shelf = Shelf({0: model})
    groups = sampled(model, names(within), torch.Generator().manual_seed(6), temperature=temperature)
    true = (told(g, logprobs=lambda r, g=g: score(model, [r], 1.0, 4096)[0].logprob.tolist()) for g in groups)
    _, convicted, why = tried(true, shelf)
    assert convicted is not None
    assert why.startswith("calibration")


def test_the_likeliest_of_many_answers_are_found_out():
    """Log-probs and rewards are true; of 16 answers the node hands in the 4 likeliest."""
    model = sharper()
    groups = sampled(model, names(60), torch.Generator().manual_seed(7), size=16)

    def best(group: Group) -> Group:
        rows = sorted(group.rollouts, key=lambda r: sum(r.logprobs) / len(r.logprobs))[-4:]
        return dataclasses.replace(group, rollouts=tuple(rows))

    _, convicted, why = tried((best(g) for g in groups), Shelf({0: model}))
    assert convicted is not None
    assert "likelier" in why


@pytest.mark.parametrize("limit", [1, 2, 5, 12])
def test_where_answers_end_does_not_bias_the_calibration(limit: int):
    """Cut by the limit or ended by chosen tokens: Σ(−log p − H) has mean 0 and the variance that it is said to have."""
    model = sharper(1)
    groups = sampled(model, names(600), torch.Generator().manual_seed(8))
    ended: Callable = lambda r: next((i + 1 for i, t in enumerate(r.completion_ids) if t in EOS), limit)  # noqa: E731
    z = []
    for group in groups:
        short = told(
            group,
            completion_ids=lambda r: r.completion_ids[: min(limit, ended(r))],
            logprobs=lambda r: r.logprobs[: min(limit, ended(r))],
        )
        audit = audited(short, Shelf({0: model}))
        z.append((audit.surprise, audit.variance))
    total, variance = (sum(column) for column in zip(*z, strict=True))
    assert abs(total) < 4 * math.sqrt(variance)
    assert 0.75 < sum(s * s for s, _ in z) / variance < 1.3


def test_tokens_that_the_policy_did_not_write_do_not_count():
    model = sharper()
    group = next(
        g
        for g in sampled(model, names(40), torch.Generator().manual_seed(2))
        if all(len(r.logprobs) > 3 for r in g.rollouts)
    )
    foreign = told(
        group,
        completion_ids=lambda r: [*r.completion_ids[:2], 7, *r.completion_ids[3:]],
        logprobs=lambda r: [*r.logprobs[:2], 0.0, *r.logprobs[3:]],
        generated=lambda r: [i != 2 for i in range(len(r.completion_ids))],
    )
    again = told(
        foreign,
        logprobs=lambda r: [
            p if own else 0.0
            for p, own in zip(score(model, [r], 1.0, 4096)[0].logprob.tolist(), r.written, strict=True)
        ],
    )
    audit = audited(again, Shelf({0: model}))
    assert audit.tokens == sum(len(r.logprobs) - 1 for r in group.rollouts)
    assert audit.verdict == "passed"
    assert audited(told(again, generated=None), Shelf({0: model})).verdict != "passed"


def test_each_span_is_held_against_its_own_version():
    old, new = sharper(), other_weights(sharper(), 0.1)
    group = next(
        g
        for g in sampled(old, names(40), torch.Generator().manual_seed(2))
        if all(len(r.logprobs) > 4 for r in g.rollouts)
    )

    def mixed(rollout):
        first, second = (score(m, [rollout], 1.0, 4096)[0].logprob.tolist() for m in (old, new))
        return [*first[:3], *second[3:]]

    spans = told(group, logprobs=mixed, span_versions=[0, 4], span_starts=[0, 3])
    shelf = Shelf({0: old, 4: new})
    assert audited(spans, shelf).rms < 1e-5
    assert audited(told(spans, span_versions=[4, 0]), shelf).verdict != "passed"


def test_figures_of_a_few_tokens_by_hand():
    tokens = Tokens(
        recorded=np.array([-1.0, -2.0]), again=np.array([-1.1, -1.8]),
        entropy=np.array([1.5, 0.5]), variance=np.array([0.25, 4.0]),
    )  # fmt: skip
    found = figures(tokens)
    assert found.tokens == 2
    assert found.rms == pytest.approx(math.sqrt((0.1**2 + 0.2**2) / 2))
    assert found.bias == pytest.approx(-0.05)
    assert found.kl == pytest.approx(((math.exp(-0.1) - 1 + 0.1) + (math.exp(0.2) - 1 - 0.2)) / 2)
    assert found.surprise == pytest.approx((1.1 - 1.5) + (1.8 - 0.5))
    assert (found.variance, found.spread, found.jump) == pytest.approx((4.25, 2.5, 1.5))
    assert found.excess == pytest.approx(found.surprise)
    assert figures(Tokens(*(np.zeros(0) for _ in range(4)))) == NOTHING


def test_one_very_unlikely_token_adds_no_more_than_five_nats_to_the_bounded_sum():
    tokens = Tokens(np.zeros(3), np.array([-12.0, -4.0, -0.5]), np.array([1.0, 1.0, 1.0]), np.ones(3))
    found = figures(tokens)
    assert found.surprise == pytest.approx(11.0 + 3.0 - 0.5)
    assert found.excess == pytest.approx(5.0 + 3.0 - 0.5)


def test_where_the_policy_is_sure_rounding_makes_no_variance():
    found = figures(Tokens(np.zeros(4), np.zeros(4), np.zeros(4), np.full(4, -1e-15)))
    assert (found.variance, found.spread) == (0.0, 0.0)


def test_a_token_that_the_policy_can_not_write_is_far_off_and_finite():
    tokens = Tokens(np.full(9, -1.0), np.full(9, -np.inf), np.ones(9), np.ones(9))
    found = figures(tokens)
    assert found.rms == 20
    assert math.isfinite(found.surprise)
    assert math.isfinite(found.kl)
