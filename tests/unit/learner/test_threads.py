"""Outbox, publisher and heart: in order, nothing lost, never in the way of training."""

from __future__ import annotations

import errno
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from app.learner.buffer import ReplayBuffer
from app.learner.checkpoints import Checkpoint, Progress
from app.learner.heart import Heart, Status
from app.learner.inbox import Inbox
from app.learner.outbox import Directives, Outbox
from app.learner.publisher import Publisher, Save
from app.protocol.errors import LearnerError, Unavailable
from app.protocol.learner import EvalReport, LearnerDirectives, StepReport
from app.snapshots.rates import Rate
from tests.unit.learner.fakes import FENCED, FakeControl, FakeSink

WORD = LearnerDirectives(command="run", staleness_budget=3, publish_period=2)


def report(step: int) -> StepReport:
    return StepReport(step=step, t_train=1, t_idle=0, reward=0, trained=[f"w{step}"], lags={0: 1})


@pytest.fixture
def parts(tmp_path: Path):
    control, sink, directives = FakeControl(), FakeSink(), Directives(WORD)
    outbox = Outbox(control, directives)  # type: ignore[arg-type]
    saved: list[int] = []

    def keep(root: Path, checkpoint: Checkpoint) -> None:
        saved.append(checkpoint.progress.step)

    publisher = Publisher(sink, tmp_path, outbox, directives, save_checkpoint=keep)
    outbox.start()
    publisher.start()
    yield control, sink, directives, outbox, publisher, saved
    control.gate.set()
    sink.gate.set()
    publisher.stop()
    outbox.stop()


def save_of(step: int, *, version: bool = True, checkpoint: bool = True) -> Save:
    kept = Checkpoint(Progress(job_id="j", step=step), {}, {}, torch.random.get_rng_state())
    return Save(step if version else None, {"w": torch.tensor(float(step))}, kept if checkpoint else None)


def test_reports_leave_in_order_and_are_pending_until_acknowledged(parts):
    control, _, _, outbox, _, _ = parts
    control.gate.clear()
    evaluation = EvalReport(step=2, reward=0.5, prompts=3)
    for message in (report(1), report(2), evaluation, report(3)):
        outbox.put(message)
    assert outbox.pending() == ([report(1), report(2), report(3)], [evaluation])
    control.gate.set()
    outbox.flush(20)
    assert control.log == [report(1), report(2), evaluation, report(3)]
    assert outbox.pending() == ([], [])


def test_answers_carry_directives(parts):
    control, _, directives, outbox, _, _ = parts
    control.word = WORD.model_copy(update={"command": "pause", "staleness_budget": 6})
    outbox.put(report(1))
    outbox.flush(20)
    assert directives.current().staleness_budget == 6
    assert directives.urgent.is_set()


def test_a_fenced_learner_keeps_its_reports_and_stops(parts):
    control, _, directives, outbox, _, _ = parts
    control.error = FENCED
    outbox.put(report(1))
    with pytest.raises(type(FENCED)):
        outbox.flush(20)
    assert outbox.pending()[0] == [report(1)]
    with pytest.raises(type(FENCED)):
        directives.current()


def test_flush_has_an_end(parts):
    control, _, _, outbox, _, _ = parts
    control.gate.clear()
    outbox.put(report(1))
    with pytest.raises(LearnerError, match="not acknowledged"):
        outbox.flush(0.01)


def test_checkpoint_before_version_before_announcement(parts):
    control, sink, _, outbox, publisher, _saved = parts
    order: list[str] = []
    publisher._save = lambda root, c: order.append("checkpoint")
    publish, upload = sink.publish, sink.upload
    sink.publish = lambda v, w: (order.append("publish"), publish(v, w))[1]
    sink.upload = lambda v: (order.append("upload"), upload(v))[1]
    publisher.submit(save_of(2))
    publisher.flush(20)
    outbox.flush(20)
    assert order == ["checkpoint", "publish", "upload"]
    assert control.versions == [(2, False), (2, True)]


def test_while_one_publish_runs_the_newest_waiting_one_wins(parts):
    _control, sink, _, outbox, publisher, saved = parts
    sink.gate.clear()
    publisher.submit(save_of(2))
    assert sink.entered.wait(20)
    for step in (4, 6, 8):
        publisher.submit(save_of(step))
    sink.gate.set()
    publisher.flush(20)
    outbox.flush(20)
    assert sink.published == [2, 8]
    assert saved == [2, 8]
    assert publisher.skipped == 2
    assert float(sink.weights[8]["w"]) == 8.0


def test_what_only_saves_does_not_displace_a_version_and_the_other_way_round(parts):
    _, sink, _, _, publisher, saved = parts
    sink.gate.clear()
    publisher.submit(save_of(2))
    assert sink.entered.wait(20)
    publisher.submit(save_of(4, checkpoint=False))
    publisher.submit(save_of(5, version=False))
    publisher.submit(save_of(6, checkpoint=False))
    sink.gate.set()
    publisher.flush(20)
    assert sink.published == [2, 6]
    assert saved == [2, 5]


def test_an_object_store_that_is_away_costs_only_the_stored_mark(parts):
    control, sink, _, outbox, publisher, _ = parts
    sink.upload_error = Unavailable("away")
    publisher.submit(save_of(2))
    publisher.flush(20)
    outbox.flush(20)
    assert control.versions == [(2, False)]
    assert publisher.upload_failures == 1


class Uplink(FakeSink):
    """An upload that ends once somebody has looked three times how far it is; one that is `stuck` gets nowhere."""

    def __init__(self, *, stuck: bool) -> None:
        super().__init__()
        self.stuck, self.looks, self.arrived = stuck, 0, threading.Event()

    @property
    def uploaded(self) -> int:  # type: ignore[override]
        self.looks += 1
        if self.looks == 3 and not self.stuck:
            self.arrived.set()
        return 0 if self.stuck else self.looks

    def upload(self, version: int) -> str:
        assert self.arrived.wait(20)
        return "full"


@pytest.mark.parametrize("stuck", [False, True])
def test_an_upload_is_waited_for_as_long_as_it_gets_on(parts, stuck: bool):
    control, _, _, outbox, publisher, _ = parts
    publisher._sink = uplink = Uplink(stuck=stuck)
    publisher.submit(save_of(2))
    with pytest.raises(LearnerError, match="got no further") if stuck else nullcontext():
        publisher.flush(0.01)
    uplink.arrived.set()
    publisher.flush(20)
    outbox.flush(20)
    assert control.versions == [(2, False), (2, True)]


def test_a_checkpoint_that_fails_ends_the_learner_and_publishes_nothing(parts):
    _, sink, _directives, _, publisher, _ = parts

    def full(root: Path, checkpoint: Checkpoint) -> None:
        raise LearnerError("disk full")

    publisher._save = full
    publisher.submit(save_of(2))
    with pytest.raises(LearnerError, match="disk full"):
        publisher.flush(20)
    assert sink.published == []


class Tensors(dict):
    """A mapping whose end can be seen."""


def test_a_slow_upload_holds_no_copy_of_weights_or_optimizer(parts):
    _, sink, _, _, publisher, _ = parts
    weights, optimizer = Tensors(w=torch.ones(1)), Tensors(m=torch.ones(1))
    ends = {"weights": weakref.ref(weights), "optimizer": weakref.ref(optimizer)}
    seen: dict[str, list[str]] = {}
    publish = sink.publish

    def alive() -> list[str]:
        return [name for name, end in ends.items() if end() is not None]

    def watch(version: int, given) -> object:
        made = publish(version, given)
        seen["publish"] = alive()
        return made

    def upload(version: int) -> str:
        seen["upload"] = alive()
        return "full"

    sink.publish, sink.upload = watch, upload
    kept = Checkpoint(Progress(job_id="j", step=2), weights, optimizer, torch.random.get_rng_state())
    publisher.submit(Save(2, weights, kept))
    del weights, optimizer, kept
    publisher.flush(20)
    assert seen == {"publish": ["weights"], "upload": []}


def test_a_disk_that_refuses_a_snapshot_ends_the_learner(parts):
    _, sink, directives, _, publisher, _ = parts

    def full(version: int, weights) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sink.publish = full
    publisher.submit(save_of(2))
    with pytest.raises(LearnerError, match=r"the learner's disk: .*No space left"):
        publisher.flush(20)
    assert directives.urgent.is_set()


class Unforeseen(Exception):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["publisher", "outbox", "heart", "inbox"])
def test_no_thread_ends_unnoticed(name: str, tmp_path: Path):
    """A process without it would go on as if nothing had happened. The job is not to blame: a new process may do it."""

    class Broken:
        def __getattr__(self, call: str):
            def fail(*_: object) -> None:
                raise Unforeseen(call)

            return fail

    broken, directives = Broken(), Directives(WORD)
    outbox = Outbox(broken, directives)  # type: ignore[arg-type]
    publisher = Publisher(broken, tmp_path, outbox, directives)  # type: ignore[arg-type]
    heart = Heart(broken, Status(), directives, lambda: 0)  # type: ignore[arg-type]
    inbox = Inbox(broken, broken, ReplayBuffer(), directives)  # type: ignore[arg-type]
    thread = {"publisher": publisher, "outbox": outbox, "heart": heart, "inbox": inbox}[name]
    thread.start()
    outbox.put(report(1))
    publisher.submit(save_of(2, checkpoint=False))
    try:
        assert directives.urgent.wait(20)
        with pytest.raises(Unavailable, match=f"the thread {name} "):
            directives.current()
    finally:
        thread.stop()


def test_heartbeats_go_on_while_the_service_is_away_and_end_when_fenced():
    control, directives = FakeControl(), Directives(WORD)
    status = Status()
    heart = Heart(control, status, directives, lambda: 7, period_s=0.01)  # type: ignore[arg-type]
    control.error = Unavailable("restarting")
    heart.start()
    try:
        assert directives.urgent.wait(0.3) is False
        assert control.beats > 3
        control.error = FENCED
        assert directives.urgent.wait(20)
        with pytest.raises(type(FENCED)):
            directives.current()
    finally:
        heart.stop()


@pytest.mark.parametrize("overtaken", [False, True])
def test_an_answer_to_a_heartbeat_that_a_reports_answer_has_overtaken_brings_no_old_s_back(overtaken: bool):
    """A step that is made again needs the greater S that it was made under; the answer to the one before has it."""
    directives, beaten = Directives(WORD), threading.Event()
    greater = WORD.model_copy(update={"staleness_budget": 4})
    if not overtaken:
        directives.update(greater)

    class Slow(FakeControl):
        def heartbeat(self, body: object) -> LearnerDirectives:
            self.beats += 1
            if self.beats == 1 and overtaken:
                directives.update(greater)
            if self.beats == 2:
                beaten.set()
            return WORD

    seen: list[int] = []

    def look() -> int:
        seen.append(directives.current().staleness_budget)
        return 0

    heart = Heart(Slow(), Status(), directives, look, period_s=0.01)  # type: ignore[arg-type]
    heart.start()
    assert beaten.wait(20)
    heart.stop()
    assert seen[:2] == ([3, 4] if overtaken else [4, 3])


def test_a_heartbeat_says_how_long_it_has_waited():
    now = [0.0]
    status = Status(clock=lambda: now[0])
    status.set("waiting", 4)
    now[0] = 5.0
    status.set("waiting")
    beat = status.heartbeat(11)
    assert (beat.step, beat.state, beat.waiting_for_s, beat.bytes_served) == (4, "waiting", 5.0, 11)
    assert (beat.up_bytes_per_s, beat.up_limited) == (None, False)
    status.set("training", 5)
    assert status.heartbeat(11).waiting_for_s == 0


def test_a_heartbeat_tells_what_the_relay_measured():
    beat = Status().heartbeat(11, Rate(2e6, True))
    assert (beat.up_bytes_per_s, beat.up_limited) == (2e6, True)
