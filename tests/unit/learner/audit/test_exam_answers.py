"""Answers to held-out prompts on their way from a file to an audit: never to the buffer, and none forgotten."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from blake3 import blake3

from app.learner.audit.auditor import Auditor
from app.learner.audit.rewards import Rewards
from app.learner.buffer import Group
from app.learner.inbox import GroupReader, Inbox
from app.protocol.learner import TrajectoryRef
from app.protocol.pruning import Prune
from app.protocol.trajectory import encode
from app.storage.stores import FolderStore
from app.tasks.base import Prompt
from tests.unit.learner.audit.samples import Shelf, sampled, told
from tests.unit.learner.audit.test_auditor import Rig
from tests.unit.learner.audit.test_heldout import MODEL
from tests.unit.learner.audit.test_heldout import answers as greedy_answers
from tests.unit.learner.samples import job

VOCABULARY = 64


class Scripted:
    """Notes of which split a reward was asked; those of `wrong` are off."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.wrong: set[str] = set()

    def off(self, group: Group, *, heldout: bool = False) -> float | None:
        self.asked.append((group.work_item, heldout))
        return 1.0 if group.work_item in self.wrong else 0.0


class Bench(Rig):
    """An inbox before the auditor; held-out prompts are those of `groups`."""

    def __init__(self, tmp_path: Path, groups: list[Group], *, prune: Prune | None = None, **trust) -> None:
        super().__init__(**trust)
        self.scripted = Scripted()
        self.auditor = Auditor(
            job(trust=trust, batch={"group_size": 8, "prune": prune}), Shelf({0: MODEL}), self.scripted, self.court,
            self.buffer, self.directives, draw=lambda: 0.9,
        )  # fmt: skip
        self.store, self.groups = FolderStore(tmp_path), groups
        ids = [list(g.rollouts[0].prompt_ids) for g in groups]
        reader = GroupReader(
            self.store, lambda index: [1], group_size=8, max_tokens=64, vocabulary=VOCABULARY,
            heldout_ids=lambda index: ids[index], prune=prune,
        )  # fmt: skip
        self.inbox = Inbox(None, reader, self.buffer, self.directives, self.auditor)  # type: ignore[arg-type]

    def take(self, groups: list[Group], *, greedy: bool, put: bool = True, **changes) -> None:
        data = encode([r for g in groups for r in g.rollouts])
        ref = TrajectoryRef(
            seq=1, key="k", size=len(data), blake3=blake3(data).hexdigest(), node_id="n",
            work_items=[g.work_item for g in groups], group_sizes={g.work_item: len(g.rollouts) for g in groups},
            heldout=True, greedy=[g.work_item for g in groups] if greedy else [],
        )  # fmt: skip
        if put:
            self.store.put("k", data)
        self.auditor.start()
        self.inbox.take(ref.model_copy(update=changes))
        self.settled()
        self.auditor.stop()

    @property
    def found(self) -> list[tuple[str, str, str, str]]:
        return [(a.work_item, a.heldout, a.verdict, a.fault) for a in self.court.audits_told]


def numbered(groups: list[Group]) -> list[Group]:
    return [told(g, prompt_index=i) for i, g in enumerate(groups)]


def drawn(*names: str, size: int = 2) -> list[Group]:
    return numbered(sampled(MODEL, names, torch.Generator().manual_seed(3), size=size))


def test_greedy_and_sampled_answers_are_audited_each_in_its_way_and_never_trained_on(tmp_path: Path):
    greedy = numbered(greedy_answers(MODEL, 3))
    bench = Bench(tmp_path / "a", greedy, probation=0)
    bench.take(greedy, greedy=True)
    assert bench.found == [(g.work_item, "greedy", "passed", "") for g in greedy]
    assert bench.scripted.asked == [(g.work_item, True) for g in greedy], "held against the held-out prompt"
    assert bench.here == []
    found = drawn("s1", "s2")
    other = Bench(tmp_path / "b", found, probation=0)
    other.take([told(found[0], logprobs=lambda r: [p - 1.0 for p in r.logprobs]), found[1]], greedy=False)
    assert other.found == [("s1", "sampled", "failed", "logprobs"), ("s2", "sampled", "passed", "")]
    assert other.here == []
    assert other.buffer.evict(0, 10) == [], "the learner has nothing to drop"
    assert other.court.convicted == {"n"}


def test_where_a_job_prunes_groups_held_out_answers_are_whole_all_the_same(tmp_path: Path):
    found = drawn("s1", size=4)
    bench = Bench(tmp_path, found, prune="shuffle_r1", probation=0)
    bench.take(found, greedy=False)
    assert bench.found == [("s1", "sampled", "passed", "")]
    assert bench.court.audits_told[0].variance > 0, "none was left out, so that they tell how it draws"


def test_a_false_held_out_reward_is_a_lie(tmp_path: Path):
    found = numbered(greedy_answers(MODEL, 2))
    bench = Bench(tmp_path, found, probation=0)
    bench.scripted.wrong = {found[1].work_item}
    bench.take(found, greedy=True)
    assert [f[2:] for f in bench.found] == [("passed", ""), ("failed", "reward")]


def test_what_can_not_be_read_is_told_so_that_it_does_not_wait_for_ever(tmp_path: Path):
    found = numbered(greedy_answers(MODEL, 2))
    gone = Bench(tmp_path / "a", found)
    gone.take(found, greedy=True, put=False)
    assert [f[1:] for f in gone.found] == [("greedy", "unclear", "file")] * 2, "the evaluation may be over"
    other = Bench(tmp_path / "b", found)
    other.take(found, greedy=True, blake3="0" * 64)
    assert [f[2:] for f in other.found] == [("suspect", "file")] * 2
    wrong = Bench(tmp_path / "c", found[::-1])
    wrong.take(found, greedy=True)
    assert [f[2:] for f in wrong.found] == [("suspect", "file")] * 2, "another prompt than was asked"
    missing = Bench(tmp_path / "d", found)
    missing.take(found, greedy=True, work_items=[*(g.work_item for g in found), "j-eval-0-9"])
    assert ("j-eval-0-9", "sampled", "suspect", "file") in missing.found
    assert len(missing.found) == 3


def test_of_a_node_in_quarantine_nothing_is_computed(tmp_path: Path):
    found = numbered(greedy_answers(MODEL, 2))
    bench = Bench(tmp_path, found)
    bench.auditor.banish(["n"])
    bench.take(found, greedy=True)
    assert bench.found == []


class Split:
    """A task whose held-out prompts have other rewards than its training ones."""

    deterministic = True

    def train(self, index: int) -> Prompt:
        return Prompt(index, "", {"reward": 0.0})

    def heldout(self, index: int) -> Prompt:
        return Prompt(index, "", {"reward": 1.0})

    def reward(self, prompt: Prompt, completion: str) -> float:
        return float(prompt.entry["reward"])


class Words:
    def decode(self, ids, **_: object) -> str:
        return " ".join(map(str, ids))


def test_a_reward_is_computed_again_with_the_prompt_of_its_split():
    group = told(drawn("a")[0], reward=1.0)
    rewards = Rewards(Split(), Words())  # type: ignore[arg-type]
    assert rewards.off(group, heldout=True) == 0.0
    assert rewards.off(dataclasses.replace(group)) == 1.0
    rewards.close()


def test_held_out_answers_end_no_probation_here_either(tmp_path: Path):
    answers = numbered(greedy_answers(MODEL, 3))
    bench = Bench(tmp_path, answers, probation=2, each_version=False)
    bench.take(answers, greedy=True)
    assert {f[2] for f in bench.found} == {"passed"}
    # The auditor has stopped: what waits for it stays away.
    bench.receive(*drawn("a"))
    assert bench.here == []
