"""What an audit tells of a group, and what it leaves out because it would say nothing of the node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from app.learner.audit.look import audit_of, look
from app.learner.audit.scoring import Scored, score
from app.learner.audit.statistics import Tokens, figures
from app.protocol.trajectory import Rollout
from tests.unit.learner.audit.samples import Shelf, audited, sampled, sharper, told

MODEL = sharper()
SHELF = Shelf({0: MODEL})
DRAWS = ("surprise", "variance", "spread", "excess")
"""What tells how tokens were drawn."""


def a_group(size: int = 4):
    return sampled(MODEL, ["w"], torch.Generator().manual_seed(2), size=size)[0]


def off_by(group, nats: float):
    return told(group, logprobs=lambda r: [p - nats for p in r.logprobs])


def test_an_audit_tells_the_figures_of_all_tokens():
    group = off_by(a_group(), 0.2)
    scored = score(MODEL, group.rollouts, 1.0, 4096)
    again, entropy, variance = (
        torch.cat([getattr(s, n) for s in scored]).numpy() for n in ("logprob", "entropy", "variance")
    )
    wanted = figures(Tokens(again - 0.2, again, entropy, variance))
    audit = audited(group, SHELF)
    assert (audit.node_id, audit.work_item, audit.version) == ("n", "w", 0)
    assert audit.tokens == wanted.tokens == sum(len(r.logprobs) for r in group.rollouts)
    for name in ("rms", "bias", "kl", "jump", *DRAWS):
        assert getattr(audit, name) == pytest.approx(getattr(wanted, name), rel=1e-3, abs=1e-3), name
    assert audit.bias == pytest.approx(-0.2, abs=1e-3)


@pytest.mark.parametrize("flag", ["foreign", "chosen"])
def test_tokens_that_are_not_the_nodes_own_draw_say_nothing_of_how_it_draws(flag: str):
    audit = audited(a_group(), SHELF, **{flag: True})
    assert [getattr(audit, name) for name in DRAWS] == [0.0] * 4
    assert audit.verdict == "passed"
    assert audited(off_by(a_group(), 0.2), SHELF, **{flag: True}).rms == pytest.approx(0.2, abs=1e-3)
    assert audited(a_group(), SHELF).variance > 0


def test_where_nodes_send_chosen_answers_copies_say_nothing():
    group = a_group(8)
    longest = max(group.rollouts, key=lambda r: -sum(r.logprobs))
    same = told(group, completion_ids=longest.completion_ids, logprobs=longest.logprobs)
    assert audited(same, SHELF).fault == "copied"
    assert audited(same, SHELF, chosen=True).verdict == "passed"


@pytest.mark.parametrize(("off", "told_ok"), [(0.0, True), (1.0, False), (None, None)])
def test_whether_rewards_are_right_is_told_only_if_they_were_computed(off: float | None, told_ok: bool | None):
    assert audited(a_group(), SHELF, reward_off=off).reward_ok is told_ok


class Broken:
    """Weights that give no numbers."""

    def score(self, version: int, rollouts: Sequence[Rollout]) -> list[Scored]:
        none = [torch.full((len(r.completion_ids),), torch.nan, dtype=torch.float64) for r in rollouts]
        return [Scored(one, one, one, one) for one in none]


def test_what_can_not_be_computed_is_said_and_a_wrong_reward_is_a_lie_all_the_same():
    for scorer in (Broken(), Shelf({})):
        audit = audited(a_group(), scorer)  # type: ignore[arg-type]
        assert (audit.verdict, audit.fault, audit.tokens, audit.rms) == ("unclear", "", 0, 0.0)
        assert "v0 is not at hand" in audit.detail
        assert audited(a_group(), scorer, reward_off=1.0).fault == "reward"  # type: ignore[arg-type]


def test_of_several_versions_the_oldest_that_never_was_is_named_and_the_one_that_is_not_at_hand():
    group = told(a_group(), span_versions=[0])
    mixed = dataclasses.replace(
        group,
        rollouts=tuple(
            dataclasses.replace(r, span_versions=[v]) for r, v in zip(group.rollouts, (0, 1, 3, 5), strict=True)
        ),
    )
    assert "v3 was never published" in audited(mixed, SHELF, never=lambda v: v in (3, 5)).detail
    audit = audited(mixed, Shelf({0: MODEL, 5: MODEL}))
    assert "v1 is not at hand" in audit.detail
    assert audit.version == 5


def test_what_is_told_of_it_is_not_longer_than_the_control_service_takes():
    group = a_group()
    found = look(group, SHELF, lambda _: False, reward_off=0.0, foreign=False, chosen=False)
    assert audit_of(group, 0, found, ("unclear", "", "x" * 900)).detail == "x" * 500
