"""Which groups share a file."""

from __future__ import annotations

from app.protocol.work import WorkItem
from app.rollout_agent.delivery import Scored
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.groups import Group
from app.rollout_agent.outbox import shareable
from app.tasks.base import Prompt


def scored(name: str, *, deadline: float = 100.0, split: str = "train", quantisation: str | None = None) -> Scored:
    item = WorkItem.model_validate(
        {"id": name, "prompt_index": 0, "group_size": 1, "seed": 0, "deadline_s": 1, "split": split}
    )
    done = Completion([1], [-1.0], "stop", (Span(0, 0),))
    return Scored(Group(item, Prompt(0, "", {}), [1], deadline, [done], quantisation), [1.0])


def names(found: list[Scored]) -> list[str]:
    return [s.group.item.id for s in found]


def test_what_is_ready_goes_together_as_far_as_it_fits() -> None:
    ready = [scored(name) for name in "abcd"]
    assert names(shareable(ready, None, 50.0)) == ["a", "b", "c", "d"]
    assert names(shareable(ready, 3, 50.0)) == ["a", "b", "c"]
    assert names(shareable(ready, 1, 50.0)) == ["a"]


def test_late_groups_go_together_and_with_no_other() -> None:
    # After an outage all are late: were each a file, the refusals would end the node.
    ready = [scored("late", deadline=50.0), scored("a"), scored("late too", deadline=49.0), scored("b")]
    assert names(shareable(ready, None, 50.0)) == ["late", "late too"]
    assert names(shareable(ready[1:], None, 50.0)) == ["a", "b"]


def test_an_evaluation_and_training_do_not_mix_nor_do_differently_quantised_weights() -> None:
    ready = [scored("a"), scored("exam", split="heldout"), scored("q", quantisation="int8"), scored("b")]
    assert names(shareable(ready, None, 50.0)) == ["a", "b"]
    assert names(shareable(ready[1:], None, 50.0)) == ["exam"]
    assert names(shareable(ready[2:], None, 50.0)) == ["q"]
