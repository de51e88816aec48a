"""Rewards on the learner's side: computed there, or held against what nodes say; never a 0 for one that failed."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from app.learner.audit.auditor import Auditor as RealAuditor
from app.learner.buffer import Group, ReplayBuffer
from app.learner.inbox import GroupReader, Inbox, counted
from app.learner.outbox import Directives
from app.learner.rewards import Rewarder, wrong
from app.protocol.audits import Audit, AuditAnswer, AuditReport
from app.protocol.errors import TaskFailed
from app.protocol.learner import TrajectoryRef
from app.storage.stores import FolderStore
from app.tasks.base import Prompt
from app.tasks.sandbox import QUEUE_SHARE, SandboxTask
from tests.unit.learner.samples import VOCABULARY, group, job
from tests.unit.learner.test_inbox import WORD, Index, prompt_ids, reference

WAIT_S = 20.0


class Letters:
    """A tokenizer: token 7 is "7 "."""

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(f"{i} " for i in ids)


class Sums:
    """The reward of an answer is the sum of its tokens; `before` is called first."""

    name, train_size, heldout_size, deterministic = "sums", 1, 1, True

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        self.before = before
        self.threads: set[str] = set()

    def train(self, index: int) -> Prompt:
        return Prompt(index, "?", {})

    heldout = train

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        self.threads.add(threading.current_thread().name)
        self.before(completion_text)
        return float(sum(map(int, completion_text.split())))


class Dialogues(Sums):
    """Each turn of the policy counts ten times as much as the one before."""

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> None:
        return None

    def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        return sum(10**i * sum(map(int, turn.split())) for i, turn in enumerate(turns))


class Auditor:
    """Notes what comes to it."""

    def __init__(self) -> None:
        self.buffer = ReplayBuffer()
        self.came: list[str] = []
        self.doubted: list[str] = []
        self.gone: set[str] = set()

    def receive(self, given: Group, ref: TrajectoryRef) -> None:
        self.came.append(given.work_item)
        self.buffer.add(given)

    def doubt(self, given: Group, ref: TrajectoryRef) -> None:
        self.doubted.append(given.work_item)

    def banished(self, node: str) -> bool:
        return node in self.gone


class Rig:
    def __init__(
        self,
        tmp_path: Path,
        task: Sums,
        rewards: str = "learner",
        auditor: Auditor | None = None,
        *,
        buffer: ReplayBuffer | None = None,
        processes: int = 4,
        **given,
    ):
        self.store, self.buffer = FolderStore(tmp_path), ReplayBuffer() if buffer is None else buffer
        self.gone: list[tuple[str, str]] = []
        task_of = {"name": "reasoning_gym", "params": {"dataset": "gcd"}, "limits": {"processes": processes}}
        self.spec = job(rewards=rewards, learner={"eval_by": "learner"}, task=task_of)
        reader = GroupReader(self.store, prompt_ids, group_size=4, max_tokens=8, vocabulary=VOCABULARY)
        make = partial(Rewarder, self.spec, task, Letters(), **given)
        self.inbox = Inbox(Index(), reader, self.buffer, Directives(WORD), auditor, make)  # type: ignore[arg-type]

    def take(self, *groups: Group, seq: int = 1) -> None:
        self.inbox.take(reference(self.store, groups, seq))

    def arrived(self, count: int) -> list[Group]:
        assert self.buffer.wait(0, 3, count, WAIT_S)
        taken, dropped = self.buffer.take(0, 3, count)
        self.gone += [(d.work_item, d.reason) for d in dropped]
        return taken

    def dropped(self, count: int = 1) -> list[tuple[str, str]]:
        """What was dropped, once there is so much of it."""
        until = time.monotonic() + WAIT_S
        while len(self.gone) < count and time.monotonic() < until:
            # Nothing is admissible without a budget of −1: it only waits for a change.
            self.buffer.wait(0, -1, 1, 0.01)
            self.gone += [(d.work_item, d.reason) for d in self.buffer.evict(0, 3)]
        self.gone += [(d.work_item, d.reason) for d in self.buffer.evict(0, 3)]
        return self.gone


@pytest.fixture
def rig(tmp_path: Path):
    made: list[Rig] = []

    def make(*given, **changes) -> Rig:
        made.append(Rig(tmp_path, *given, **changes))
        return made[-1]

    yield make
    for one in made:
        if one.inbox._rewarder is not None:
            one.inbox._rewarder.stop()


def answers(name: str, rewards: Sequence[float] = (0.0,) * 4) -> Group:
    """Answer i is the tokens i, i + 1; its right reward is 2i + 1."""
    base = group(name).rollouts
    made = [
        dataclasses.replace(
            r, prompt_ids=prompt_ids(0), completion_ids=[i, i + 1], logprobs=[-1.0, -1.0], reward=rewards[i]
        )
        for i, r in enumerate(base)
    ]
    return dataclasses.replace(group(name), rollouts=tuple(made))


RIGHT = (1.0, 3.0, 5.0, 7.0)


def test_what_the_learner_computes_counts_and_the_step_s_thread_computes_nothing(rig):
    task = Sums()
    made = rig(task)
    made.take(answers("a"))
    (got,) = made.arrived(1)
    assert tuple(r.reward for r in got.rollouts) == RIGHT
    assert threading.current_thread().name not in task.threads


def test_turns_are_told_apart_by_who_wrote_them(rig):
    marks = [True, False, True]
    rollouts = tuple(
        dataclasses.replace(r, completion_ids=[1, 40, 2], logprobs=[-1.0, 0.0, -1.0], generated=marks)
        for r in answers("a").rollouts
    )
    made = rig(Dialogues())
    made.take(dataclasses.replace(answers("a"), rollouts=rollouts))
    (got,) = made.arrived(1)
    assert {r.reward for r in got.rollouts} == {21.0}


@pytest.mark.parametrize("error", [TaskFailed("the judge is out"), ValueError("what?")])
def test_a_reward_that_fails_is_no_zero_and_harms_nobody_else(rig, error: Exception):
    seen = []

    def before(text: str) -> None:
        seen.append(text)
        if len(seen) == 3:
            raise error

    made = rig(Sums(before), most=1)
    made.take(answers("a"), answers("b"))
    assert [g.work_item for g in made.arrived(1)] == ["b"]
    assert made.dropped() == [("a", "unscored")]
    assert counted(made.inbox.invalid) == {"invalid_unscored": 1.0}


def test_a_reward_that_is_not_finite_is_none(rig):
    task = Sums()
    task.reward = lambda prompt, text: float("nan")  # type: ignore[method-assign]
    made = rig(task)
    made.take(answers("a"))
    assert made.buffer.wait(0, 3, 1, 0.2) is False
    assert made.dropped() == [("a", "unscored")]


def test_groups_are_scored_side_by_side(rig):
    both = threading.Barrier(2, timeout=WAIT_S)
    made = rig(Sums(lambda text: both.wait() and None if text == "0 1 " else None))
    made.take(answers("a"), answers("b"))
    assert len(made.arrived(2)) == 2


def test_what_waits_is_bounded(rig):
    go = threading.Event()
    made = rig(Sums(lambda _: go.wait(WAIT_S) and None), most=2)
    thread = threading.Thread(target=lambda: made.take(*(answers(name) for name in "abc")))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "the third group has to wait"
    go.set()
    thread.join(WAIT_S)
    assert sorted(g.work_item for g in made.arrived(3)) == ["a", "b", "c"]


def test_a_task_that_hangs_is_given_up_and_what_it_says_later_is_not_heard(rig):
    now, begun, go, done = [0.0], threading.Event(), threading.Event(), threading.Event()

    def before(text: str) -> None:
        begun.set()
        assert go.wait(WAIT_S)
        if text.startswith("3"):
            done.set()

    made = rig(Sums(before), patience_s=60.0, clock=lambda: now[0])
    made.take(answers("a"))
    assert begun.wait(WAIT_S), "its time counts from here"
    made.inbox._rewarder.sweep()
    assert made.dropped(0) == []
    now[0] = 61.0
    made.inbox._rewarder.sweep()
    assert made.dropped() == [("a", "unscored")]
    go.set()
    assert done.wait(WAIT_S)
    assert made.buffer.wait(0, 3, 1, 0.2) is False


def test_a_group_has_as_long_as_its_task_says_for_each_answer(rig):
    now, begun, go = [0.0], threading.Event(), threading.Event()

    def ask(*_: object, **__: object) -> dict[str, object]:
        begun.set()
        assert go.wait(WAIT_S)
        return {}

    pool = SimpleNamespace(longest_call_s=10.0, close=lambda: None, ask=ask)
    made = rig(SandboxTask(pool, {"name": "t"}), clock=lambda: now[0])
    made.take(answers("a"))
    assert begun.wait(WAIT_S), "its time counts from here"
    # Each may have to wait for a process first, and so may its prompt.
    most = (1 + QUEUE_SHARE) * 10.0 * (1 + made.spec.batch.group_size)
    for moment, gone in ((most - 1, []), (most + 1, [("a", "unscored")])):
        now[0] = moment
        made.inbox._rewarder.sweep()
        assert made.dropped(len(gone)) == gone
    go.set()


def test_a_group_that_waits_behind_slow_ones_is_not_given_up_for_their_time(rig):
    """Each of three takes 50 s of the 60 that a group has, one after the other."""
    now, turn, begun = [0.0], threading.Semaphore(0), threading.Semaphore(0)

    def before(text: str) -> None:
        if text.startswith("0"):
            begun.release()
            assert turn.acquire(timeout=WAIT_S)

    made = rig(Sums(before), processes=1, patience_s=60.0, clock=lambda: now[0])
    made.take(*(answers(name) for name in "abc"))
    for _ in range(3):
        assert begun.acquire(timeout=WAIT_S)
        now[0] += 50.0
        made.inbox._rewarder.sweep()
        turn.release()
    assert sorted(g.work_item for g in made.arrived(3)) == ["a", "b", "c"]
    assert made.dropped(0) == []


def test_what_waits_where_everything_hangs_is_given_up_as_well(rig):
    now, go, begun = [0.0], threading.Event(), threading.Event()

    def before(_: str) -> None:
        begun.set()
        assert go.wait(WAIT_S)

    made = rig(Sums(before), processes=1, patience_s=60.0, clock=lambda: now[0])
    made.take(*(answers(name) for name in "ab"))
    assert begun.wait(WAIT_S)
    now[0] = 61.0
    made.inbox._rewarder.sweep()
    assert sorted(made.dropped(2)) == [("a", "unscored"), ("b", "unscored")]
    go.set()


def test_nodes_that_tell_the_truth_are_believed_and_others_are_not(rig):
    auditor = Auditor()
    made = rig(Sums(), "both", auditor, most=1)
    made.take(answers("a", RIGHT), answers("b", (1.0, 3.0, 5.0, 7.01)), answers("c", RIGHT), answers("d", RIGHT))
    assert made.dropped() == [("b", "wrong_reward")]
    assert auditor.buffer.wait(0, 3, 3, WAIT_S)
    assert auditor.doubted == ["b"]
    assert sorted(auditor.came) == ["a", "c", "d"]
    assert made.inbox.invalid == {"wrong_reward": 1}


def test_nobody_is_held_to_a_reward_that_differs_from_call_to_call(rig):
    task = Sums()
    task.deterministic = False
    made = rig(task, "both")
    made.take(answers("a", (9.0, 9.0, 9.0, 1.0)))
    (got,) = made.arrived(1)
    assert [r.reward for r in got.rollouts] == [9.0, 9.0, 9.0, 1.0]
    assert task.threads == set()


def test_after_the_end_nothing_is_scored(rig):
    go, task = threading.Event(), Sums(lambda _: go.wait(WAIT_S) and None)
    made = rig(task)
    made.take(answers("a"))
    made.inbox._rewarder.stop()
    go.set()
    made.take(answers("b"), seq=2)
    assert made.buffer.wait(0, 3, 1, 0.2) is False
    assert made.dropped(0) == []


@pytest.mark.parametrize(
    ("claimed", "found", "same"),
    [
        ([0.1], [0.10000000149], True),
        ([1e6], [1e6 + 0.5], True),
        ([1e6], [1e6 + 2], False),
        ([0.0], [1e-3], False),
        ([float("nan")], [0.0], False),
        ([1.0, 0.0], [1.0, 1.0], False),
    ],
)
def test_rewards_are_the_same_up_to_what_a_file_rounds(claimed, found, same: bool):
    assert (wrong(claimed, found) == "") is same


def test_nodes_that_do_not_score_can_t_evaluate():
    with pytest.raises(ValidationError, match="eval_by"):
        job(rewards="learner")
    assert job(rewards="both").rewards == "both"


class Found:
    """The control service's audits call: a node that fails one is in quarantine."""

    def __init__(self) -> None:
        self.audits: list[Audit] = []

    def audits_call(self, body: AuditReport) -> AuditAnswer:
        self.audits += body.audits
        return AuditAnswer(quarantined=[a.node_id for a in body.audits if a.verdict == "failed"])


class AllOff:
    """Every reward is one too high."""

    def off(self, given: Group, *, heldout: bool = False) -> float:
        return 1.0


class NotAtHand:
    """No version to hold log-probs against."""

    def score(self, version: int, rollouts: object) -> None:
        return None


def test_a_wrong_reward_is_an_audit_that_failed_and_its_node_s_other_groups_go_too(rig):
    buffer, found = ReplayBuffer(), Found()
    control = SimpleNamespace(audits=found.audits_call)
    spec = job(rewards="both", trust={"audit_share": 0.0, "probation": 0, "each_version": False})
    auditor = RealAuditor(spec, NotAtHand(), AllOff(), control, buffer, Directives(WORD))
    auditor.start()
    try:
        made = rig(Sums(), "both", auditor)
        made.take(answers("good", RIGHT))
        assert buffer.wait(0, 3, 1, WAIT_S), "nobody audits what is right here"
        assert found.audits == []
        made.take(answers("bad"), seq=2)
        assert made.dropped() == [("bad", "wrong_reward")]
        until = time.monotonic() + WAIT_S
        while not found.audits and time.monotonic() < until:
            auditor.idle(0.01)
        assert auditor.idle(WAIT_S)
    finally:
        auditor.stop()
    assert [(a.work_item, a.verdict, a.fault) for a in found.audits] == [("bad", "failed", "reward")]
    assert len(buffer) == 0, "what its node said before is not trained on either"
