"""The loop with an S that moves, and with groups to spare."""

from __future__ import annotations

import threading
from pathlib import Path

from app.learner.adaptive import State
from app.learner.buffer import ReplayBuffer
from app.learner.checkpoints import save
from app.learner.outbox import Directives
from app.learner.position import Position
from app.learner.resume import resume
from app.learner.trainer import StepMetrics, TrainerState
from app.protocol.learner import LearnerDirectives, StalenessMove, StartAnswer
from tests.unit.learner.samples import group
from tests.unit.learner.test_loop import Rig

CALM = {"ess": 1.0, "mismatch_kl": 0.0, "reward": 0.5}
BAD = {"ess": 0.2, "mismatch_kl": 0.3, "reward": 0.5}


def answering(rig: Rig, values: dict[str, float]) -> None:
    """Steps say these numbers of themselves."""
    step = rig.trainer.step

    def told(groups) -> StepMetrics:
        done = step(groups)
        return StepMetrics(done.reward, done.t_train, values)

    rig.trainer.step = told


def test_a_bad_step_asks_for_a_lower_s_in_its_own_report(tmp_path: Path):
    spec = {"staleness": {"max": 3, "adaptive": True}, "stop": {"steps": 2}}
    with Rig(tmp_path, **spec) as rig:
        answering(rig, BAD)
        rig.feed(2, version=-2)
        rig.feed(2, version=1)
        rig.run()
    first, second = rig.control.steps
    assert (first.staleness.staleness_budget, first.staleness.publish_period) == (1, 1)
    assert "ESS 0.200 is below 0.5" in first.staleness.reason
    assert second.staleness is None


def test_a_step_is_made_again_under_the_greater_s_that_it_was_made_under(tmp_path: Path):
    """Step 11 asked for S = 4, and step 12 had it. Made again, it must not come before the answer to step 11."""
    spec = {"staleness": {"max": 6, "adaptive": True}, "stop": {"steps": 12}}
    position = Position(evaluated=10, published=10, last_publish=10, adaptive=State(3, calm=9))
    with Rig(tmp_path, position=position, **spec) as rig:
        rig.trainer.steps = 10
        answering(rig, CALM)
        rig.buffer.plan({11: ["w0", "w1"], 12: ["w3", "w2"]})
        rig.feed(2, version=10)
        rig.feed(2, version=7)
        answered = rig.control.step

        def adopt(body):
            if body.staleness is not None:
                rig.control.word = rig.control.word.model_copy(
                    update={"staleness_budget": body.staleness.staleness_budget}
                )
            return answered(body)

        rig.control.step = adopt  # type: ignore[method-assign]
        rig.control.gate.clear()
        opening = threading.Timer(0.5, rig.control.gate.set)
        opening.start()
        rig.run()
        opening.join(5)
    assert rig.trainer.seen == [["w0", "w1"], ["w3", "w2"]]
    assert rig.control.steps[0].staleness.staleness_budget == 4
    assert rig.control.steps[1].lags == {4: 8}


def test_a_lower_s_holds_for_the_next_batch_whenever_it_is_answered(tmp_path: Path):
    spec = {"staleness": {"max": 3, "adaptive": True}, "stop": {"steps": 2}}
    with Rig(tmp_path, **spec) as rig:
        answering(rig, BAD)
        rig.control.gate.clear()
        rig.feed(4, version=-2)
        rig.feed(2, version=1)
        rig.loop.run()
        assert rig.control.steps == []
        rig.control.gate.set()
        rig.outbox.flush(20)
    first, second = rig.control.steps
    assert (first.trained, first.lags) == (["w0", "w1"], {2: 8})
    assert [(d.work_item, d.reason, d.lag) for d in first.dropped] == [("w2", "stale", 3), ("w3", "stale", 3)]
    assert (second.trained, second.lags) == (["w4", "w5"], {0: 8})


def test_an_answer_from_before_a_move_does_not_bring_the_old_s_back():
    old = LearnerDirectives(command="run", staleness_budget=3, publish_period=2)
    directives = Directives(old)
    directives.ask(StalenessMove(staleness_budget=1, publish_period=1, reason=""))
    for answer in (old, old.model_copy(update={"staleness_budget": 1, "publish_period": 1}), old):
        directives.update(answer)
        told = directives.current()
        assert (told.staleness_budget, told.publish_period) == (1, 1)


def test_a_greater_s_counts_once_it_is_answered():
    old = LearnerDirectives(command="run", staleness_budget=3, publish_period=2)
    directives = Directives(old)
    directives.ask(StalenessMove(staleness_budget=4, publish_period=3, reason=""))
    assert directives.current() == old
    new = old.model_copy(update={"staleness_budget": 4, "publish_period": 1})
    directives.update(new)
    assert directives.current() == new, "κ too is what the control service says"


def test_what_was_under_way_when_a_step_lowered_s_is_no_fault(tmp_path: Path):
    spec = {"staleness": {"max": 3, "adaptive": True}, "stop": {"steps": 2}}
    with Rig(tmp_path, position=Position(evaluated=0, published=0), **spec) as rig:
        answering(rig, BAD)
        rig.feed(2, version=-2)
        thread = threading.Thread(target=rig.loop.run)
        thread.start()
        while rig.trainer.steps < 1:
            thread.join(0.01)
        rig.feed(7, version=-1)
        while not rig.control.dropped.wait(0.01):
            assert thread.is_alive()
        rig.publisher.flush(20)
        thread.join(1.2)
        assert thread.is_alive()
        rig.feed(2, version=1)
        thread.join(20)
        assert not thread.is_alive()


def test_adaptive_staleness_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path):
    """Nine calm steps: the tenth asks for a greater S, also if another process goes on after the fifth."""

    def course(name: str, first: int, last: int, position: Position | None = None) -> Rig:
        spec = {"staleness": {"max": 6, "adaptive": True}, "stop": {"steps": last}}
        with Rig(tmp_path / name, position=position, **spec) as rig:
            rig.trainer.steps = first
            answering(rig, CALM)
            rig.feed(2 * (last - first), version=11)
            rig.run()
        return rig

    whole, died = course("whole", 0, 12), course("died", 0, 5)
    answer = StartAnswer(job_id="j", epoch=2, spec=died.spec, relay_token="t", last_step=5, published_version=4)
    save(tmp_path / "disk", died.loop.checkpoint())
    position = resume(answer, tmp_path / "disk", Restored(), ReplayBuffer(), died.outbox)
    heir = course("heir", 5, 12, position)
    assert [s.step for s in whole.control.steps if s.staleness] == [10]
    assert [s.staleness for s in heir.control.steps] == [s.staleness for s in whole.control.steps[5:]]


class Restored:
    """A trainer that only takes up a state."""

    steps = 0

    def restore(self, state: TrainerState) -> None:
        self.steps = state.steps


def test_without_adaptive_staleness_nothing_is_asked_for(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 1}) as rig:
        answering(rig, BAD)
        rig.feed(2)
        rig.run()
    assert rig.control.steps[0].staleness is None


def test_what_a_lower_s_makes_stale_is_reported_and_is_no_fault(tmp_path: Path):
    """Seven groups of v_0 are more than S = 1 ever lets be ahead; the learner waits for younger ones all the same."""
    with Rig(tmp_path, stop={"steps": 3}, position=Position(evaluated=0, published=0)) as rig:
        rig.feed(4)
        thread = threading.Thread(target=rig.loop.run)
        thread.start()
        while rig.trainer.steps < 2:
            thread.join(0.01)
        rig.outbox.flush(20)
        rig.control.word = rig.control.word.model_copy(update={"staleness_budget": 1, "publish_period": 1})
        rig.directives.update(rig.control.word)
        rig.feed(7)
        while not any(d.dropped for d in rig.control.drop_reports):
            assert thread.is_alive()
            thread.join(0.01)
        thread.join(1.2)
        assert thread.is_alive()
        rig.feed(2, version=2)
        thread.join(20)
        assert not thread.is_alive()
        rig.outbox.flush(20)
    assert [d.reason for report in rig.control.drop_reports for d in report.dropped] == ["stale"] * 7
    assert rig.control.steps[-1].lags == {0: 8}


def test_groups_without_a_signal_are_made_up_for_and_count_as_trained(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 2}) as rig:
        for name, rewards in [("a", (1.0,) * 4), ("b", (0.0, 1.0) * 2), ("c", (0.0, 1.0) * 2)]:
            rig.buffer.add(group(name, rewards=rewards))
        rig.feed(2)
        rig.run()
    assert [s.trained for s in rig.control.steps] == [["a", "b", "c"], ["w3", "w4"]]


def test_refill_can_be_switched_off(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 2}, learner={"refill": False}) as rig:
        rig.buffer.add(group("a", rewards=(1.0,) * 4))
        rig.feed(4)
        rig.run()
    assert [len(s.trained) for s in rig.control.steps] == [2, 2]
