"""The order of things: what is trained, reported, published, evaluated, and when it ends."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from app.learner.buffer import ReplayBuffer
from app.learner.heart import Status
from app.learner.journal import Journal
from app.learner.loop import Loop
from app.learner.outbox import Directives, Outbox
from app.learner.position import Position
from app.learner.publisher import Publisher, Save
from app.learner.trainer import StepMetrics, TrainerState
from app.protocol.errors import LearnerError
from app.protocol.learner import HeldOut
from tests.unit.learner.fakes import FakeControl, FakeSink
from tests.unit.learner.samples import group, job


class CountingTrainer:
    def __init__(self) -> None:
        self.steps = 0
        self.seen: list[list[str]] = []
        self.copied: list[tuple[int, bool]] = []

    def step(self, groups) -> StepMetrics:
        self.seen.append([g.work_item for g in groups])
        self.steps += 1
        return StepMetrics(0.5, 1.0, {"loss": 0.0})

    def snapshot(self, *, optimizer: bool = True) -> TrainerState:
        self.copied.append((self.steps, optimizer))
        return TrainerState(self.steps, {"w": torch.tensor(float(self.steps))}, {})


class Rig:
    """A loop with everything around it in memory."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        reward: float = 0.25,
        position: Position | None = None,
        journal: Journal | None = None,
        **spec,
    ) -> None:
        spec = {"batch": {"prompts": 2, "group_size": 4}, "stop": {"steps": 4}, **spec}
        self.spec = job(**spec)
        self.control, self.sink = FakeControl(), FakeSink()
        self.directives = Directives(self.control.word)
        self.outbox = Outbox(self.control, self.directives)  # type: ignore[arg-type]
        self.saved: list = []
        self.publisher = Publisher(
            self.sink, tmp_path, self.outbox, self.directives, save_checkpoint=lambda _, c: self.saved.append(c)
        )
        self.buffer, self.trainer, self.status = ReplayBuffer(), CountingTrainer(), Status()
        self.evaluations: list[int] = []
        self.position = position or Position()
        self.loop = Loop(
            self.spec,
            "j",
            trainer=self.trainer,
            evaluate=lambda: self.evaluations.append(self.trainer.steps) or reward,
            eval_prompts=7,
            buffer=self.buffer,
            publisher=self.publisher,
            outbox=self.outbox,
            directives=self.directives,
            status=self.status,
            position=self.position,
            journal=journal,
        )

    def __enter__(self):
        self.outbox.start()
        self.publisher.start()
        return self

    def __exit__(self, *_):
        self.publisher.stop()
        self.outbox.stop()

    def run(self):
        ending = self.loop.run()
        self.publisher.flush(20)
        self.outbox.flush(20)
        return ending

    def feed(self, count: int, version: int = 0) -> None:
        for _ in range(count):
            self.buffer.add(group(f"w{self.buffer._arrived}", version=version))


def test_steps_until_the_stop_rule(tmp_path: Path):
    with Rig(tmp_path, learner={"eval_every": 3, "eval_by": "learner"}) as rig:
        rig.feed(9, version=2)
        ending = rig.run()
    assert (ending.kind, ending.reason) == ("succeeded", "4 steps are done")
    assert rig.trainer.seen == [["w0", "w1"], ["w2", "w3"], ["w4", "w5"], ["w6", "w7"]]
    assert [s.step for s in rig.control.steps] == [1, 2, 3, 4]
    assert [s.trained for s in rig.control.steps] == rig.trainer.seen
    assert [s.lags for s in rig.control.steps] == [{-2: 8}, {-1: 8}, {0: 8}, {1: 8}]
    assert rig.evaluations == [0, 3]
    assert [(e.step, e.initial, e.reward, e.prompts) for e in rig.control.evals] == [
        (0, True, 0.25, 7),
        (3, False, 0.25, 7),
    ]


def test_a_version_every_kappa_steps_each_after_its_checkpoint(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 5}) as rig:
        rig.feed(10, version=2)
        rig.run()
    assert rig.sink.published[-1] == 4
    assert {*rig.sink.published} <= {2, 4}
    assert [c.progress.step for c in rig.saved] == rig.sink.published


def test_a_version_without_a_checkpoint_leaves_the_optimizer_where_it_is(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 6}, learner={"checkpoint_every": 3}) as rig:
        rig.feed(12, version=4)
        rig.run()
    # Versions at 2, 4 and 6, checkpoints at 3 and 6.
    assert rig.trainer.copied == [(2, False), (3, True), (4, False), (6, True)]


def test_stale_groups_are_reported_by_the_step_after_which_they_are(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 5}) as rig:
        rig.feed(11, version=0)
        rig.feed(2, version=4)
        ending = rig.run()
    # S = 3: at v_4 nothing of v_0 may be used; that is known as soon as step 4 is done.
    assert ending.kind == "succeeded"
    dropped = {s.step: [(d.work_item, d.reason) for d in s.dropped] for s in rig.control.steps}
    assert dropped == {1: [], 2: [], 3: [], 4: [("w8", "stale"), ("w9", "stale"), ("w10", "stale")], 5: []}
    assert rig.trainer.seen[-1] == ["w11", "w12"]


def test_rejected_groups_are_reported(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 1}) as rig:
        rig.buffer.reject("bad", "invalid")
        rig.feed(2)
        rig.run()
    assert [(d.work_item, d.reason) for d in rig.control.steps[0].dropped] == [("bad", "invalid")]


def test_target_reward_ends_it(tmp_path: Path):
    with Rig(tmp_path, reward=0.9, stop={"steps": None, "target_reward": 0.8}) as rig:
        ending = rig.run()
    assert ending.kind == "succeeded"
    assert "0.900 reached 0.8" in ending.reason


@pytest.mark.parametrize(("command", "kind"), [("finish", "finished"), ("abort", "aborted")])
def test_a_directive_ends_a_learner_that_waits(tmp_path: Path, command: str, kind: str):
    with Rig(tmp_path) as rig:
        rig.feed(1)
        word = rig.control.word.model_copy(update={"command": command, "reason": "because"})
        timer = threading.Timer(0.1, lambda: rig.directives.update(word))
        timer.start()
        ending = rig.loop.run()
        timer.join(5)
    assert (ending.kind, ending.reason) == (kind, "because")
    assert rig.trainer.steps == 0


def test_a_pause_checkpoints_and_goes_on_where_it_was(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 2}) as rig:
        rig.feed(4)
        rig.control.word = rig.control.word.model_copy(update={"command": "pause"})
        rig.directives.update(rig.control.word)
        thread = threading.Thread(target=rig.loop.run)
        thread.start()
        rig.publisher.flush(20)
        for _ in range(200):
            if rig.saved:
                break
            thread.join(0.05)
        assert [c.progress.step for c in rig.saved] == [0]
        assert rig.trainer.steps == 0
        rig.control.word = rig.control.word.model_copy(update={"command": "run"})
        rig.directives.update(rig.control.word)
        thread.join(20)
        assert not thread.is_alive()
    assert rig.trainer.steps == 2


def test_a_changed_staleness_budget_and_period_hold_from_the_next_step(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 2}) as rig:
        word = rig.control.word.model_copy(update={"staleness_budget": 1, "publish_period": 1})
        rig.control.word = word
        rig.directives.update(word)
        rig.feed(4)
        rig.run()
    assert rig.sink.published[-1] == 2
    assert rig.position.published == 2


def test_unacknowledged_reports_are_in_the_checkpoint(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 2}) as rig:
        rig.control.gate.clear()
        rig.feed(4)
        rig.loop.run()
        rig.publisher.flush(20)
        kept = rig.saved[-1].progress
        rig.control.gate.set()
    assert kept.step == 2
    assert [s.step for s in kept.steps] == [1, 2]
    assert [(e.step, e.initial) for e in kept.evals] == [(0, True)]
    assert kept.evaluated == 0


def test_a_resumed_learner_does_not_publish_an_old_number_again(tmp_path: Path):
    position = Position(evaluated=0, published=4, last_publish=2)
    with Rig(tmp_path, stop={"steps": 6}, position=position) as rig:
        rig.trainer.steps = 2
        rig.feed(8, version=4)
        rig.run()
    assert rig.sink.published == [5]
    assert rig.evaluations == []


def test_an_evaluation_that_was_lost_is_made_up_for(tmp_path: Path):
    position = Position(evaluated=0, published=4, last_publish=4)
    with Rig(tmp_path, stop={"steps": 4}, learner={"eval_every": 2, "eval_by": "learner"}, position=position) as rig:
        rig.trainer.steps = 4
        rig.run()
    assert rig.evaluations == [4]


def test_hours_end_it_even_without_rollouts(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": None, "max_hours": 1e-9}) as rig:
        ending = rig.run()
    assert ending.kind == "succeeded"
    assert "hours" in ending.reason


def test_the_final_evaluation_reuses_a_fresh_one(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 2}, learner={"eval_every": 2, "eval_by": "learner"}) as rig:
        rig.feed(4)
        rig.run()
        rig.loop.evaluate(final=True)
        rig.outbox.flush(20)
    assert rig.evaluations == [0, 2]
    assert [(e.step, e.final) for e in rig.control.evals] == [(0, False), (2, False), (2, True)]


def test_when_all_groups_are_refused_it_ends_with_the_reason(tmp_path: Path):
    with Rig(tmp_path, position=Position(evaluated=0, published=0)) as rig:
        for number in range(8):
            rig.buffer.reject(f"bad{number}", "invalid")
        timer = threading.Timer(0.2, lambda: rig.buffer.reject("one too many", "invalid"))
        timer.start()
        # S = 3, v_0, two prompts a step: admission lets 8 be ahead.
        with pytest.raises(LearnerError, match="9 groups since step 0"):
            rig.loop.run()
        timer.join(5)


def test_a_shortened_period_publishes_what_the_waiting_learner_has(tmp_path: Path):
    """S falls from 6 to 1 at v_4 with v_0 published: only a younger version can bring admissible rollouts."""
    with Rig(tmp_path, stop={"steps": 5}, position=Position(evaluated=0, published=0)) as rig:
        rig.control.word = rig.control.word.model_copy(update={"staleness_budget": 6, "publish_period": 5})
        rig.directives.update(rig.control.word)
        rig.feed(8)
        thread = threading.Thread(target=rig.loop.run)
        thread.start()
        while rig.trainer.steps < 4:
            thread.join(0.01)
        rig.outbox.flush(20)
        assert rig.sink.published == []
        rig.control.word = rig.control.word.model_copy(update={"staleness_budget": 1, "publish_period": 1})
        rig.directives.update(rig.control.word)
        assert rig.sink.entered.wait(20)
        rig.feed(2, version=4)
        thread.join(20)
        assert not thread.is_alive()
        rig.publisher.flush(20)
    assert rig.sink.published == [4, 5]


def test_what_can_not_be_trained_on_is_told_without_a_step(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 1}) as rig:
        for number in range(3):
            rig.buffer.reject(f"bad{number}", "invalid")
        rig.feed(1)
        thread = threading.Thread(target=rig.loop.run)
        thread.start()
        for _ in range(200):
            if rig.control.drop_reports:
                break
            thread.join(0.05)
        (report,) = rig.control.drop_reports
        assert report.step == 0
        assert [(d.work_item, d.reason) for d in report.dropped] == [(f"bad{n}", "invalid") for n in range(3)]
        assert rig.trainer.steps == 0
        rig.feed(1)
        thread.join(20)
        assert not thread.is_alive()
        rig.outbox.flush(20)
    (step,) = rig.control.steps
    assert step.dropped == [], "told before: the job's totals have them"
    assert [d.work_item for d in step.told] == ["bad0", "bad1", "bad2"]
    assert step.metrics["dropped_invalid"] == 3.0


def test_what_was_told_is_in_the_record_of_one_step_only(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 2}) as rig:
        rig.buffer.reject("told", "invalid")
        feeder = threading.Thread(target=lambda: rig.control.dropped.wait(20) and rig.feed(4))
        feeder.start()
        rig.run()
        feeder.join(20)
    assert [[d.work_item for d in s.told] for s in rig.control.steps] == [["told"], []]
    assert ["dropped_invalid" in s.metrics for s in rig.control.steps] == [True, False]


def test_refused_groups_beside_good_ones_do_not_end_the_job(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 1}, position=Position(evaluated=0, published=0)) as rig:
        for number in range(9):
            rig.buffer.reject(f"bad{number}", "invalid")
        rig.feed(1)
        timer = threading.Timer(1.2, lambda: rig.feed(1))
        timer.start()
        assert rig.run().kind == "succeeded"
        timer.join(5)


def test_a_late_group_is_not_waited_for_if_the_job_says_so(tmp_path: Path):
    batch = {"prompts": 3, "group_size": 4, "on_late": "train", "group_deadline_s": 0.7}
    with Rig(tmp_path, stop={"steps": 2}, batch=batch) as rig:
        rig.feed(4, version=1)
        ending = rig.run()
    assert ending.kind == "succeeded"
    assert rig.trainer.seen == [["w0", "w1", "w2"], ["w3"]]
    assert [s.metrics["missing_groups"] for s in rig.control.steps] == [0.0, 2.0]
    assert rig.control.steps[1].t_idle >= 0.7


def test_by_default_a_whole_batch_is_waited_for(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 1}, batch={"prompts": 3, "group_size": 4, "group_deadline_s": 0.1}) as rig:
        rig.feed(2)
        timer = threading.Timer(1.2, lambda: rig.feed(1))
        timer.start()
        rig.run()
        timer.join(5)
    assert rig.trainer.seen == [["w0", "w1", "w2"]]


def test_steps_tell_what_was_dropped_by_reason_and_age(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 5}) as rig:
        rig.feed(11, version=0)
        rig.feed(2, version=4)
        rig.run()
    assert rig.control.steps[3].metrics["dropped_stale"] == 3.0
    assert rig.control.steps[3].metrics["dropped_lag_4"] == 3.0
    assert [d.lag for d in rig.control.steps[3].dropped] == [4, 4, 4]


def test_the_best_evaluation_keeps_its_checkpoint(tmp_path: Path):
    rewards = {0: 0.2, 2: 0.5, 4: 0.5, 6: 0.4}
    with Rig(tmp_path, stop={"steps": 6}, learner={"eval_every": 2, "eval_by": "learner"}) as rig:
        rig.loop._evaluate = lambda: rewards[rig.trainer.steps]
        rig.feed(12, version=5)
        rig.run()
    assert rig.position.best == (2, 0.5)
    assert (2, 2, 0.5) in [(c.progress.step, c.progress.best_step, c.progress.best_reward) for c in rig.saved]
    assert rig.saved[-1].progress.best_step == 2


def test_a_replayed_step_waits_for_its_own_groups(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 2}) as rig:
        rig.buffer.plan({1: ["w3", "w0"]})
        rig.feed(3)
        timer = threading.Timer(0.7, lambda: rig.feed(1))
        timer.start()
        rig.run()
        timer.join(5)
    assert rig.trainer.seen == [["w3", "w0"], ["w1", "w2"]]


def told(rig: Rig, step: int, reward: float) -> None:
    """The fleet has evaluated v_step; the next answer of the control service says so."""
    rig.control.word = rig.control.word.model_copy(update={"evaluated_step": step, "evaluated_reward": reward})
    rig.directives.update(rig.control.word)


def test_the_learner_does_not_stop_for_an_evaluation_by_the_fleet(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 6}, learner={"eval_every": 3}) as rig:
        rig.feed(12, version=5)
        rig.run()
        rig.publisher.flush(20)
    assert rig.evaluations == [0], "v0 only"
    assert rig.position.candidates[-1] == 6
    assert (rig.saved[-1].progress.step, rig.saved[-1].progress.candidates) == (6, rig.position.candidates)


def test_a_version_that_another_replaces_is_not_waited_for(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 6}, learner={"eval_every": 4}) as rig:
        rig.sink.gate.clear()  # v0 takes long, so that later versions wait, and the newest of them wins
        rig.publisher.submit(Save(0, {}, None))
        assert rig.sink.entered.wait(20)
        rig.feed(12, version=5)
        rig.loop.run()
        assert rig.publisher.waiting == 6
        rig.sink.gate.set()
        rig.publisher.flush(20)
    assert rig.sink.published == [0, 6]
    assert rig.position.candidates == (6,), "v4 is never published, so that nobody evaluates it"


def test_what_the_fleet_measured_ends_the_job_and_picks_the_best_checkpoint(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 100, "target_reward": 0.6}, learner={"eval_every": 2}) as rig:
        rig.trainer.steps = 4
        rig.position.candidates = (2,)
        told(rig, 2, 0.5)
        rig.feed(2, version=3)

        def later() -> None:
            told(rig, 4, 0.7)
            rig.feed(2, version=3)

        timer = threading.Timer(0.5, later)
        timer.start()
        ending = rig.run()
        timer.join(5)
    assert ending.kind == "succeeded"
    assert "0.700 reached 0.6" in ending.reason
    assert rig.position.best == (2, 0.5), "v4 was not this learner's candidate: there is no checkpoint of it"


def both_told(rig: Rig, *results: tuple[int, float]) -> None:
    """Several evaluations have ended since the last answer; the pair of old is of the newest."""
    step, reward = results[-1]
    rig.control.word = rig.control.word.model_copy(
        update={
            "evaluated_step": step,
            "evaluated_reward": reward,
            "evaluations": [HeldOut(step=s, reward=r) for s, r in reversed(results)],
        }
    )
    rig.directives.update(rig.control.word)


@pytest.mark.parametrize(("first", "second", "best"), [(0.7, 0.5, 2), (0.5, 0.7, 4), (0.5, 0.5, 2)])
def test_of_two_results_within_a_step_both_count(tmp_path: Path, first: float, second: float, best: int):
    position = Position(evaluated=4, published=4, last_publish=4, candidates=(2, 4))
    with Rig(tmp_path, stop={"steps": 5}, learner={"eval_every": 2}, position=position) as rig:
        rig.trainer.steps = 4
        step = rig.trainer.step

        def during(groups) -> StepMetrics:
            both_told(rig, (2, first), (4, second))
            return step(groups)

        rig.trainer.step = during
        rig.feed(2, version=4)
        rig.run()
        kept = rig.loop.checkpoint().progress
    assert (kept.best_step, kept.best_reward, kept.candidates) == (best, max(first, second), ())


def test_what_the_fleet_measured_is_written_down_once_each(tmp_path: Path):
    position = Position(evaluated=4, published=4, last_publish=4, candidates=(2, 4))
    journal = Journal(tmp_path, resume_step=4)
    with Rig(tmp_path, stop={"steps": 6}, learner={"eval_every": 99}, position=position, journal=journal) as rig:
        rig.trainer.steps = 4
        both_told(rig, (0, 0.25), (2, 0.5), (4, 0.75), (6, 0.5))
        rig.feed(4, version=4)
        rig.run()
        rig.loop.evaluate(final=True)
    rows = [json.loads(line) for line in journal.path.read_text().splitlines()]
    told = [(r["step"], r["reward"]) for r in rows if r["kind"] == "evaluation"]
    assert told == [(0, 0.25), (2, 0.5), (4, 0.75), (6, 0.5), (6, 0.25)]
    assert [r["step"] for r in rows].index(5) < [r["step"] for r in rows].index(6), "v6 was still to be made"


def test_the_older_of_two_results_ends_the_job_too(tmp_path: Path):
    position = Position(evaluated=4, published=4, last_publish=4, candidates=(2, 4))
    stop = {"steps": 9, "target_reward": 0.6}
    with Rig(tmp_path, stop=stop, learner={"eval_every": 2}, position=position) as rig:
        rig.trainer.steps = 4
        both_told(rig, (2, 0.65), (4, 0.4))
        ending = rig.run()
    assert "0.650 reached 0.6" in ending.reason


def test_a_result_of_a_version_that_is_still_to_be_made_again_waits(tmp_path: Path):
    position = Position(evaluated=2, published=8, last_publish=2, candidates=(2,))
    stop = {"steps": 100, "target_reward": 0.6}
    with Rig(tmp_path, stop=stop, learner={"eval_every": 2}, position=position) as rig:
        rig.trainer.steps = 2
        both_told(rig, (8, 0.7))
        rig.feed(12, version=8)
        ending = rig.run()
    assert rig.trainer.steps == 8, "the weights that reached it"
    assert "0.700 reached 0.6" in ending.reason


def test_a_pause_while_an_exams_version_waits_loses_neither_checkpoint(tmp_path: Path):
    with Rig(tmp_path, stop={"steps": 5}, learner={"eval_every": 4}) as rig:
        rig.sink.gate.clear()  # v0 takes long, so that v4, which is to be evaluated, waits
        rig.publisher.submit(Save(0, {}, None))
        assert rig.sink.entered.wait(20)
        rig.feed(10, version=4)
        rig.loop.run()
        assert (rig.publisher.waiting, rig.trainer.steps) == (4, 5)
        rig.publisher.submit(Save(None, {}, rig.loop.checkpoint()))  # what a pause does
        rig.sink.gate.set()
        rig.publisher.flush(20)
    assert rig.sink.published == [0, 4]
    assert [c.progress.step for c in rig.saved] == [4, 5]
    assert float(rig.saved[0].weights["w"]) == float(rig.sink.weights[4]["w"]) == 4.0
    assert rig.saved[1].progress.candidates == (4,), "so that v4's stays"


def test_a_version_that_begins_in_this_moment_is_still_evaluated(tmp_path: Path):
    """v4 waits and is taken up just after the loop has looked: it is published, and v6 is no exam then."""
    with Rig(tmp_path, stop={"steps": 6}, learner={"eval_every": 4}) as rig:
        rig.sink.gate.clear()
        rig.publisher.submit(Save(0, {}, None))
        assert rig.sink.entered.wait(20)
        withdraw = rig.publisher.withdraw
        calls: list[int | None] = []

        def late() -> int | None:
            if rig.trainer.steps == 6:
                rig.sink.gate.set()
                rig.publisher.flush(20)
            calls.append(withdraw())
            return calls[-1]

        rig.publisher.withdraw = late  # type: ignore[method-assign]
        rig.feed(12, version=5)
        rig.run()
    assert rig.sink.published == [0, 4, 6]
    assert calls == [2, None]
    assert rig.position.candidates == (4,), "the fleet evaluates v4, and v6 only if another multiple was passed"


def test_an_exam_that_is_overtaken_can_still_be_the_best(tmp_path: Path):
    position = Position(evaluated=2, published=2, last_publish=2, candidates=(2,))
    with Rig(tmp_path, stop={"steps": 4}, learner={"eval_every": 2}, position=position) as rig:
        rig.trainer.steps = 2
        rig.feed(4, version=3)
        rig.run()
        assert rig.saved[-1].progress.candidates == (2, 4)
        told(rig, 2, 0.5)
        after = rig.loop.checkpoint().progress
        assert (after.best_step, after.best_reward, after.candidates) == (2, 0.5, (4,))
        told(rig, 4, 0.4)
        after = rig.loop.checkpoint().progress
    assert (after.best_step, after.candidates) == (2, ())


def test_a_result_that_comes_in_the_step_of_the_next_exam_is_heard_before_that_is_saved(tmp_path: Path):
    position = Position(evaluated=6, published=6, last_publish=6, candidates=(2, 4, 6))
    with Rig(tmp_path, stop={"steps": 8}, learner={"eval_every": 2}, position=position) as rig:
        rig.trainer.steps = 7
        step = rig.trainer.step

        def during(groups) -> StepMetrics:
            told(rig, 2, 0.5)
            return step(groups)

        rig.trainer.step = during
        rig.feed(2, version=7)
        rig.run()
    assert rig.saved[-1].progress.best_step == 2
    assert rig.saved[-1].progress.candidates == (4, 6, 8)


def test_only_the_newest_candidates_wait_for_a_result():
    position = Position()
    for step in (2, 4, 6, 8):
        position.enter(step, replaced=None)
    assert (position.evaluated, position.candidates) == (8, (4, 6, 8))
    position.heard(6, 0.5)
    assert (position.best, position.candidates) == ((6, 0.5), (8,))


@pytest.mark.parametrize(
    ("candidates", "evaluated", "told", "due", "found", "news"),
    [
        ((4,), 4, 2, False, (5,), True),  # v4 never came out: the fleet will evaluate v5
        ((2, 4), 4, 2, False, (2, 5), True),
        ((5,), 5, 2, False, (5,), False),
        ((2,), 2, 2, False, (2,), False),
        ((), 0, 4, True, (5,), True),  # the checkpoint is not of a version, and the multiple was passed since
    ],
)
def test_a_resumed_learners_first_version_takes_the_place_of_an_exam_that_never_came_out(
    candidates, evaluated, told, due, found, news
):
    position = Position(evaluated=evaluated, candidates=candidates)
    assert position.published_first(5, told=told, due=due) is news
    assert position.candidates == found
    assert position.evaluated == (5 if 5 in found else evaluated)
