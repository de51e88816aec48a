"""Work items that are answered a second time while their first answer is still being scored."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.learner.audit.auditor import Auditor
from app.learner.buffer import Group, ReplayBuffer
from app.learner.outbox import Directives
from app.learner.rewards import threads
from tests.unit.learner.samples import job
from tests.unit.learner.test_inbox import WORD, reference
from tests.unit.learner.test_rewards import RIGHT, WAIT_S, AllOff, Found, NotAtHand, Rig, Sums, answers


class Held:
    """A task that computes no reward of an answer which begins with a token from 10 to 19 until `go`; then it may
    fail."""

    def __init__(self) -> None:
        self.go, self.began, self.fails = threading.Event(), threading.Event(), False
        self.seen: list[str] = []
        self.task = Sums(self._before)

    def _before(self, text: str) -> None:
        self.seen.append(text)
        if 10 <= int(text.split()[0]) < 20:
            self.began.set()
            assert self.go.wait(WAIT_S)
            if self.fails:
                raise ValueError("no such answer")


class Bench:
    """An inbox with an auditor behind it that audits nothing, but knows who is in quarantine."""

    def __init__(self, tmp_path: Path, rewards: str) -> None:
        self.held, self.buffer = Held(), ReplayBuffer()
        spec = job(rewards="both", trust={"audit_share": 0.0, "probation": 0, "each_version": False})
        control = SimpleNamespace(audits=Found().audits_call)
        self.auditor = Auditor(spec, NotAtHand(), AllOff(), control, self.buffer, Directives(WORD))
        self.rig = Rig(tmp_path, self.held.task, rewards, self.auditor, buffer=self.buffer)  # type: ignore[arg-type]
        self.inbox = self.rig.inbox

    def take(self, *groups: Group, node: str, seq: int) -> None:
        self.inbox.take(reference(self.rig.store, groups, seq, node_id=node))

    def arrived(self) -> list[Group]:
        assert self.buffer.wait(0, 3, 1, WAIT_S)
        return self.buffer.take(0, 3, 1)[0]


@pytest.fixture(params=["learner", "both"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, request.param)
    yield made
    made.held.go.set()
    assert made.inbox._rewarder is not None
    made.inbox._rewarder.stop()


def others(name: str) -> Group:
    """Answers of which no reward is computed until `go`."""
    rows = answers(name).rollouts
    made = tuple(dataclasses.replace(r, completion_ids=[i + 10, 0], reward=i + 10.0) for i, r in enumerate(rows))
    return dataclasses.replace(answers(name), rollouts=made)


@pytest.mark.parametrize("queued", [False, True])
def test_an_honest_answer_replaces_one_of_a_node_in_quarantine_that_is_not_scored_yet(bench: Bench, queued: bool):
    before = [others(f"before {n}") for n in range(threads(bench.rig.spec) if queued else 0)]
    bench.take(*before, others("w"), node="liar", seq=1)
    assert bench.held.began.wait(WAIT_S)
    bench.auditor.banish(["liar"])
    bench.take(answers("w", RIGHT), node="honest", seq=2)
    bench.held.go.set()
    (got,) = bench.arrived()
    assert (got.work_item, got.node) == ("w", "honest")
    assert tuple(r.reward for r in got.rollouts) == RIGHT
    assert bench.inbox.invalid == {}


def test_what_is_replaced_before_its_turn_is_never_scored(bench: Bench):
    bench.take(*(others(f"before {n}") for n in range(threads(bench.rig.spec))), node="slow", seq=1)
    thirty = tuple(dataclasses.replace(r, completion_ids=[30, 1]) for r in answers("w").rollouts)
    bench.take(dataclasses.replace(answers("w"), rollouts=thirty), node="liar", seq=2)
    bench.auditor.banish(["liar", "slow"])
    bench.take(answers("w", RIGHT), node="honest", seq=3)
    bench.held.go.set()
    bench.arrived()
    assert "30 1 " not in bench.held.seen


def test_what_becomes_of_a_replaced_answer_says_nothing_of_the_newer_one(bench: Bench):
    bench.held.fails = True
    bench.take(others("w"), node="liar", seq=1)
    assert bench.held.began.wait(WAIT_S)
    bench.auditor.banish(["liar"])
    bench.take(answers("w", RIGHT), node="honest", seq=2)
    bench.held.go.set()
    assert [g.node for g in bench.arrived()] == ["honest"]
    assert bench.inbox._rewarder is not None
    bench.inbox._rewarder._pool.shutdown(wait=True)
    assert bench.buffer.evict(0, 3) == []
    assert bench.inbox.invalid == {}


def test_the_same_file_again_is_scored_once(bench: Bench):
    for _ in range(2):
        bench.take(others("w"), node="n", seq=1)
    bench.held.go.set()
    assert [g.work_item for g in bench.arrived()] == ["w"]
    assert sorted(bench.held.seen) == ["10 0 ", "11 0 ", "12 0 ", "13 0 "]


def test_an_answer_that_fails_once_its_node_is_in_quarantine_does_not_refuse_the_next_one(bench: Bench):
    bench.held.fails = True
    bench.take(others("w"), node="liar", seq=1)
    assert bench.held.began.wait(WAIT_S)
    bench.auditor.banish(["liar"])
    bench.held.go.set()
    assert bench.inbox._rewarder is not None
    bench.inbox._rewarder._pool.shutdown(wait=True)
    assert bench.buffer.evict(0, 3) == [], "nothing is told of a work item that is pending again"
    assert bench.inbox.invalid == {}
