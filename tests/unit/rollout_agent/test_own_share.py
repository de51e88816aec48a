"""What a node counts as its own of rollouts that others began: a speed that counts them whole is no speed of its."""

from __future__ import annotations

import pytest

from app.protocol.work import UploadSlot, WorkItem
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.flow import FlowMeter
from app.rollout_agent.groups import Batch, Group, Sampled, own_share
from app.tasks.base import Prompt


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
