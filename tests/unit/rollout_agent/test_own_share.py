"""What a node counts as its own of rollouts that others began: a speed that counts them whole is no speed of its."""

from __future__ import annotations

import pytest

from app.protocol.errors import Unavailable
from app.protocol.work import UploadSlot, WorkItem
from app.rollout_agent.delivery import Delivery, Scored
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.flow import FlowMeter
from app.rollout_agent.groups import Batch, Failed, Group, Sampled, own_share, written
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.text_side import TextSide
from app.tasks.base import Prompt
from tests.unit.rollout_agent.fakes import Clock, Echo, Letters, Wire, pool, problem
from tests.unit.rollout_agent.test_worker import slot


def sample(tokens: int, reason: str = "stop") -> Completion:
    return Completion([1] * tokens, [-1.0] * tokens, reason, (Span(0, 0),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("begun", "whole", "share"),
    [
        (None, sample(10), 1.0),
        (sample(4, "abort"), sample(10), 0.6),
        (sample(10), sample(10), 0.0),
        (None, sample(10, "abort"), 0.0),
        (sample(4, "abort"), sample(10, "abort"), 0.0),
        (None, sample(0), 0.0),
    ],
)
def test_a_rollout_counts_as_far_as_it_was_sampled_here(
    begun: Completion | None, whole: Completion, share: float
) -> None:
    assert own_share(begun, whole) == pytest.approx(share)


def test_a_batch_counts_what_it_went_on_with_in_part() -> None:
    item = WorkItem(id="w", prompt_index=0, group_size=3, seed=0, deadline_s=1)
    begun = {"w": [sample(9, "abort"), sample(7), None]}
    batch = Batch([item], UploadSlot(key="k", url="u"), {"w": 1.0}, begun)
    group = Group(item, Prompt(0, "", {}), [1], 1.0, [sample(10), sample(7), sample(5)])
    assert Sampled(batch, [group], 6).rollouts == pytest.approx(1.1)
    assert Sampled(Batch([item], None, {"w": 1.0}), [group], 22).rollouts == 3.0, "where nobody had begun"


def test_the_end_of_what_others_began_does_not_make_a_node_look_fast() -> None:
    meter = FlowMeter()
    meter.level(0.0, 64, 64)
    for i in range(1, 481):
        # One token is left of ten.
        meter.finished(i / 8, 1, own_share(sample(9, "abort"), sample(10)))
    meter.level(60.0, 64, 64)
    assert meter.rates is not None
    assert meter.rates.tokens_per_s == pytest.approx(8.0, rel=0.02)
    assert meter.rates.rollouts_per_s == pytest.approx(0.8, rel=0.02)


def multi(tokens: int, own: int) -> Completion:
    """A sample of a multi-turn task, of which the policy wrote the first tokens."""
    marks = [True] * own + [False] * (tokens - own)
    return Completion([1] * tokens, [-1.0] * tokens, "stop", (Span(3, 0), Span(2, 1)), marks)


def group_of(*completions: Completion | None, item: str = "w", foreign: int = 0) -> Group:
    work = WorkItem(id=item, prompt_index=0, group_size=len(completions), seed=0, deadline_s=1)
    return Group(work, Prompt(0, "", {}), [1], 1.0, completions, foreign_tokens=foreign)


def test_what_an_environment_says_was_sampled_by_nobody() -> None:
    group = group_of(multi(10, 4), None, sample(5), foreign=3)
    assert written(group.completions) == 9
    assert (group.tokens, group.own_tokens) == (9, 6)


async def test_of_a_file_that_is_refused_what_was_sampled_is_wasted_and_no_word_of_an_environment() -> None:
    wire = Wire({"uploads": slot, "trajectories": lambda _: problem("trajectory_refused", 422, reason="versions")})
    clock = Clock()
    ledger, group = WorkLedger(clock), group_of(multi(10, 4), sample(5), foreign=3)
    with pool() as executor:
        delivery = Delivery(
            wire.client(clock), TextSide(Echo(), Letters()), ledger, executor, max_upload_bytes=10**6, clock=clock
        )
        await delivery.hand_in([Scored(group, [1.0, 1.0])])
    assert ledger.tokens_wasted == {"refused": 4 + 5}


def test_staleness_counts_from_the_oldest_version_of_any_token() -> None:
    assert group_of(multi(4, 2), None).oldest_version == 2
    assert group_of(multi(4, 2), sample(3)).oldest_version == 0
    assert group_of(None, None).oldest_version is None


def test_a_group_is_whole_when_every_sample_of_it_came_to_its_end() -> None:
    whole, cut, begun = (
        group_of(sample(2), sample(3)),
        group_of(sample(2), sample(3, "abort")),
        group_of(None, sample(2)),
    )
    assert [group.whole for group in (whole, cut, begun)] == [True, False, False]
    assert [len(c.token_ids) for c in whole.finished] == [2, 3]
    for group in (cut, begun):
        with pytest.raises(ValueError, match="w is not finished"):
            _ = group.finished
    sampled = Sampled(Batch([], None, {}), [cut, whole, begun], 0)
    assert (sampled.whole, sampled.cut) == ([whole], [cut, begun])


@pytest.mark.parametrize(
    ("sampled", "begun", "lost"),
    [
        (12, {}, 5),  # 7 tokens are still there
        (12, {"w": [sample(3, "abort"), None]}, 8),  # of which others had sampled 3
        (4, {}, 0),
    ],
)
def test_of_a_batch_that_failed_only_what_is_not_in_its_groups_is_lost(
    sampled: int, begun: dict[str, list[Completion | None]], lost: int
) -> None:
    group = group_of(sample(4, "abort"), sample(3))
    batch = Batch([group.item], None, {"w": 1.0}, begun)
    assert Failed(Unavailable("the engine died"), [group], sampled).lost(batch) == lost
