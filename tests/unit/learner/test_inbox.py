"""What strangers send is trained on only if it is exactly what was promised."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from blake3 import blake3

from app.learner.buffer import ReplayBuffer
from app.learner.inbox import GroupReader, Inbox
from app.learner.outbox import Directives
from app.protocol.errors import BadInput, Refused, TaskFailed, Unavailable
from app.protocol.learner import LearnerDirectives, TrajectoryPage, TrajectoryRef
from app.protocol.trajectory import encode
from app.storage.stores import FolderStore
from tests.unit.learner.samples import VOCABULARY, group

WORD = LearnerDirectives(command="run", staleness_budget=3, publish_period=2)


class Index:
    """The trajectories call: one page, then silence."""

    def __init__(self, *pages: TrajectoryPage) -> None:
        self.pages = list(pages)
        self.asked: list[int] = []

    def trajectories(self, after: int, wait_s: float) -> TrajectoryPage:
        self.asked.append(after)
        if self.pages:
            return self.pages.pop(0)
        raise Unavailable("no more in this test")


def prompt_ids(index: int) -> list[int]:
    if index != 0:
        raise BadInput("there is no number 1")
    return list(group("a").rollouts[0].prompt_ids)


def setup(tmp_path: Path, *pages: TrajectoryPage):
    store, buffer, directives = FolderStore(tmp_path), ReplayBuffer(), Directives(WORD)
    reader = GroupReader(store, prompt_ids, group_size=4, max_tokens=8, vocabulary=VOCABULARY)
    index = Index(*pages)
    return store, buffer, Inbox(index, reader, buffer, directives), index  # type: ignore[arg-type]


def reference(store: FolderStore, groups, seq: int = 1, **changes) -> TrajectoryRef:
    data = encode([r for g in groups for r in g.rollouts])
    key = f"jobs/j/trajectories/0/{seq}.parquet"
    store.put(key, data)
    fields = {
        "seq": seq,
        "key": key,
        "size": len(data),
        "blake3": blake3(data).hexdigest(),
        "node_id": "n",
        "work_items": [g.work_item for g in groups],
    }
    return TrajectoryRef(**{**fields, **changes})


def changed(**fields):
    """Group `a` with its first rollout changed."""
    good = group("a")
    first = dataclasses.replace(good.rollouts[0], **fields)
    return dataclasses.replace(good, rollouts=(first, *good.rollouts[1:]))


def outcome(buffer: ReplayBuffer) -> tuple[list[str], list[str]]:
    taken, dropped = buffer.take(0, 3, len(buffer)) if len(buffer) else ([], buffer.evict(0, 3))
    return [g.work_item for g in taken], sorted(d.work_item for d in dropped)


def test_whole_groups_arrive_sorted_and_exact(tmp_path: Path):
    store, buffer, inbox, _ = setup(tmp_path)
    good = group("a")
    shuffled = dataclasses.replace(good, rollouts=good.rollouts[::-1])
    inbox.take(reference(store, [shuffled]))
    ((arrived,), dropped) = buffer.take(0, 3, 1)
    assert dropped == []
    assert [r.sample_index for r in arrived.rollouts] == [0, 1, 2, 3]
    assert [list(r.completion_ids) for r in arrived.rollouts] == [list(r.completion_ids) for r in good.rollouts]
    assert arrived.rollouts[1].logprobs == pytest.approx(good.rollouts[1].logprobs)


def test_only_what_is_still_to_be_trained_on_is_taken(tmp_path: Path):
    store, buffer, inbox, _ = setup(tmp_path)
    other = dataclasses.replace(
        group("a"), work_item="b", rollouts=tuple(dataclasses.replace(r, work_item="b") for r in group("a").rollouts)
    )
    inbox.take(reference(store, [group("a"), other], work_items=["b"]))
    assert outcome(buffer) == (["b"], [])


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": [1, 2, 3]},
        {"prompt_index": 1},
        {"completion_ids": [VOCABULARY], "logprobs": [-1.0]},
        {"completion_ids": [1] * 9, "logprobs": [-1.0] * 9},
        {"logprobs": [0.5], "completion_ids": [1]},
        {"logprobs": [float("nan")], "completion_ids": [1]},
        {"reward": float("inf")},
        {"sample_index": 1},
        {"finish_reason": "magic"},
    ],
)
def test_a_wrong_row_rejects_its_group(tmp_path: Path, fields):
    store, buffer, inbox, _ = setup(tmp_path)
    inbox.take(reference(store, [changed(**fields)]))
    assert outcome(buffer) == ([], ["a"])
    assert sum(inbox.invalid.values()) == 1


@pytest.mark.parametrize(("wanted", "mark"), [("int8", "int8"), ("int8", None), (None, "int8")])
def test_the_mark_of_quantised_weights_reaches_the_buffer_and_must_be_the_jobs(
    tmp_path: Path, wanted: str | None, mark: str | None
):
    store = FolderStore(tmp_path)
    reader = GroupReader(store, prompt_ids, group_size=4, max_tokens=8, vocabulary=VOCABULARY, quantised=wanted)
    made = group("a")
    rows = tuple(dataclasses.replace(r, quantisation=mark) for r in made.rollouts)
    ref = reference(store, [dataclasses.replace(made, rollouts=rows)])
    if mark == wanted:
        assert {r.quantisation for g in reader.read(ref) for r in g.rollouts} == {mark}
    else:
        with pytest.raises(Refused) as refusal:
            reader.read(ref)
        assert refusal.value.reason == "quantisation"


@pytest.mark.parametrize("changes", [{"size": 1}, {"blake3": "0" * 64}, {"key": "jobs/j/trajectories/0/none.parquet"}])
def test_another_file_than_was_accepted_is_rejected(tmp_path: Path, changes):
    store, buffer, inbox, _ = setup(tmp_path)
    inbox.take(reference(store, [group("a")], **changes))
    assert outcome(buffer) == ([], ["a"])


def test_an_item_that_the_file_lacks_is_rejected_and_the_rest_kept(tmp_path: Path):
    store, buffer, inbox, _ = setup(tmp_path)
    inbox.take(reference(store, [group("a")], work_items=["a", "lost"]))
    assert outcome(buffer) == (["a"], ["lost"])


def test_the_thread_follows_the_cursor_and_its_end_is_noticed(tmp_path: Path):
    store, buffer, inbox, index = setup(tmp_path)
    index.pages = [
        TrajectoryPage(items=[reference(store, [group("a")])], cursor=5),
        TrajectoryPage(items=[], cursor=9),
    ]
    inbox.start()
    assert buffer.wait(0, 3, 1, timeout_s=20)
    inbox._thread.join(20)
    assert index.asked == [0, 5, 9]
    with pytest.raises(Unavailable, match="no more"):
        inbox._directives.current()


def named(name: str, rewards, samples=None):
    """A group of prompt 0 with its own number of rollouts, and the samples that its file has."""
    rollouts = [dataclasses.replace(r, prompt_ids=prompt_ids(0)) for r in group(name, rewards=rewards).rollouts]
    chosen = range(len(rollouts)) if samples is None else samples
    return dataclasses.replace(group(name), rollouts=tuple(rollouts[i] for i in chosen))


@pytest.mark.parametrize(("failures", "taken", "reasons"), [(1, ["a"], []), (9, [], ["unscored"])])
def test_a_task_that_fails_to_tell_a_prompt_is_asked_again_and_costs_the_group_at_most(
    tmp_path: Path, failures: int, taken: list[str], reasons: list[str]
):
    left = [failures]

    def fails(index: int) -> list[int]:
        left[0] -= 1
        if left[0] >= 0:
            raise TaskFailed("its process was killed")
        return prompt_ids(index)

    store, buffer = FolderStore(tmp_path), ReplayBuffer()
    reader = GroupReader(store, fails, group_size=4, max_tokens=8, vocabulary=VOCABULARY)
    inbox = Inbox(Index(), reader, buffer, Directives(WORD))  # type: ignore[arg-type]
    inbox.take(reference(store, [group("a")]))
    dropped = buffer.evict(0, 3)
    assert [d.reason for d in dropped] == reasons
    assert [g.work_item for g in buffer.take(0, 3, len(taken))[0]] == taken
    assert inbox.invalid == ({"task_failed": 1} if reasons else {})


@pytest.mark.parametrize("fault", ["gone", "lacking", "no prompt"])
def test_what_is_wrong_with_a_file_of_a_node_in_quarantine_refuses_no_other_answer(tmp_path: Path, fault: str):
    """A page is worked off while its node is convicted: its groups are pending again, its files may be swept."""
    down = fault == "no prompt"

    def told(index: int) -> list[int]:
        if down:
            raise TaskFailed("its process was killed")
        return prompt_ids(index)

    store, buffer = FolderStore(tmp_path), ReplayBuffer()
    reader = GroupReader(store, told, group_size=4, max_tokens=8, vocabulary=VOCABULARY)
    inbox = Inbox(Index(), reader, buffer, Directives(WORD))  # type: ignore[arg-type]
    theirs = reference(store, [named("b" if fault == "lacking" else "a", (0.0, 1.0, 0.0, 1.0))], node_id="liar")
    if fault == "gone":
        store.delete(theirs.key)
    buffer.withdraw(["a"], {"liar"})
    inbox.take(theirs.model_copy(update={"work_items": ["a"]}))
    down = False
    buffer.withdraw((), {"liar"})  # as the next page does, which names all that are in quarantine
    inbox.take(reference(store, [group("a")], 2, node_id="honest"))
    assert outcome(buffer) == (["a"], [])


def test_groups_of_a_file_may_be_of_different_sizes(tmp_path: Path):
    store, buffer, inbox, _ = setup(tmp_path)
    groups = [named("a", (0.0, 1.0)), named("b", (0.0, 1.0, 0.0, 1.0)), named("c", (1.0,) * 7)]
    inbox.take(reference(store, groups, group_sizes={"a": 2, "c": 7}))
    taken, dropped = buffer.take(0, 3, 3)
    assert [(g.work_item, len(g.rollouts)) for g in taken] == [("a", 2), ("b", 4), ("c", 7)]
    assert dropped == []


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_group_has_as_many_rollouts_as_were_asked_for(tmp_path: Path, size: int):
    store, buffer, inbox, _ = setup(tmp_path)
    inbox.take(reference(store, [named("a", (0.0, 1.0))], group_sizes={"a": size}))
    assert outcome(buffer) == ([], ["a"])


def test_a_group_that_is_not_wanted_may_be_of_any_size(tmp_path: Path):
    store, buffer, inbox, _ = setup(tmp_path)
    inbox.take(reference(store, [named("late", (0.0,) * 9), named("b", (0.0, 1.0, 0.0, 1.0))], work_items=["b"]))
    assert outcome(buffer) == (["b"], [])


@pytest.mark.parametrize(
    ("samples", "arrives"), [((1, 6, 7, 2), True), ((0, 1, 2), False), ((0, 1, 2, 2), False), (range(8), False)]
)
def test_of_a_pruned_group_half_comes_under_its_own_numbers(tmp_path: Path, samples, arrives: bool):
    store, buffer = FolderStore(tmp_path), ReplayBuffer()
    reader = GroupReader(store, prompt_ids, group_size=8, max_tokens=8, vocabulary=VOCABULARY, prune="shuffle_r1")
    inbox = Inbox(Index(), reader, buffer, Directives(WORD))  # type: ignore[arg-type]
    inbox.take(reference(store, [named("a", (0.0, 1.0) * 4, samples)]))
    taken, dropped = buffer.take(0, 3, 1)
    assert [[r.sample_index for r in g.rollouts] for g in taken] == ([sorted(samples)] if arrives else [])
    assert [d.work_item for d in dropped] == ([] if arrives else ["a"])


def test_a_file_that_was_replaced_by_another_size_is_refused_without_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, buffer, inbox, _ = setup(tmp_path)
    ref = reference(store, [group("a")])
    store.put(ref.key, bytes(ref.size + 1))
    limits: list[int | None] = []
    get = store.get

    def noted(key: str, most: int | None = None) -> bytes:
        limits.append(most)
        return get(key, most)

    monkeypatch.setattr(store, "get", noted)
    inbox.take(ref)
    assert limits == [ref.size], "more may not fit into memory"
    assert outcome(buffer) == ([], ["a"])
    assert inbox.invalid == {"integrity": 1}
