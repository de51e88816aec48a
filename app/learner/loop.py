"""The training loop: gather, step, report, publish, evaluate, until something says stop.

Invariant: every rollout is trained on at most once on the way to any one version, and every step is reported with what
it consumed and dropped. The loop owns the order of things; what is slow happens in the threads of its collaborators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from app.learner.adaptive import Adaptive
from app.learner.buffer import Group, ReplayBuffer, lag_histogram
from app.learner.checkpoints import Checkpoint, Progress
from app.learner.heart import Status
from app.learner.journal import supply_metrics
from app.learner.outbox import FLUSH_S, Directives, Outbox
from app.learner.position import Ending, Journal, NoJournal, Position, Trainer
from app.learner.publisher import Publisher, Save
from app.learner.supply import Supply
from app.learner.trainer import TrainerState
from app.protocol.errors import TaskFailed
from app.protocol.job import JobSpec
from app.protocol.learner import EvalReport, StepReport

_POLL_S = 0.5


class Loop:
    """One learner process's training. All collaborators are handed in."""

    def __init__(
        self,
        spec: JobSpec,
        job_id: str,
        *,
        trainer: Trainer,
        evaluate: Callable[[], float],
        eval_prompts: int,
        buffer: ReplayBuffer,
        publisher: Publisher,
        outbox: Outbox,
        directives: Directives,
        status: Status,
        position: Position,
        extra_metrics: Callable[[], dict[str, float]] = dict,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._job_id = job_id
        self._trainer = trainer
        self._evaluate = evaluate
        self._eval_prompts = eval_prompts
        self._buffer = buffer
        self._publisher = publisher
        self._outbox = outbox
        self._directives = directives
        self._status = status
        self._extra_metrics = extra_metrics
        self._clock = clock
        self._seen = clock()
        self._journal = journal or NoJournal()
        self._adaptive = Adaptive(spec, position.adaptive)
        self._supply = Supply(buffer, outbox, directives, budget=spec.first_staleness)
        self._copy_s = 0.0
        self._idle_s = 0.0
        self._reached: float | None = None
        """The first held-out reward that was as good as the job wants it, whoever measured it."""
        self._own: tuple[int, float] | None = None
        """Step and value of the newest held-out reward that this process measured."""
        self.position = position

    def run(self) -> Ending:
        """Train until a stop rule or a directive. Raises LearnerError and what collaborators fail with."""
        if self.position.evaluated < 0 or self._eval_due():
            self.evaluate()
        while True:
            ending = self._obey() or self._stop_rule()
            if ending is not None:
                return ending
            groups = self._gather()
            if groups:
                self._step(groups)
            if groups and self._eval_due():
                self.evaluate()

    def evaluate(self, *, final: bool = False) -> float:
        """Held-out reward of the current weights, reported. The same weights are not sampled twice."""
        step = self._trainer.steps
        if self._own is None or self._own[0] != step:
            self._status.set("evaluating", step)
            self._own = (step, self._evaluate())
        reward = self._own[1]
        self._measured(reward)
        initial = self.position.evaluated < 0 and step == 0
        self.position.evaluated = step
        report = EvalReport(step=step, reward=reward, prompts=self._eval_prompts, initial=initial, final=final)
        self._outbox.put(report)
        self._journal.evaluation(report)
        if self.position.best is None or reward > self.position.best[1]:
            self.position.best = (step, reward)
            if step > 0:
                self._publisher.keep(self.checkpoint())
        return reward

    def last_evaluation(self) -> TaskFailed | None:
        """`evaluate` of the weights that the job ends with; if the task keeps it from that, why: what was paid for is
        saved before the job fails."""
        try:
            self.evaluate(final=True)
        except TaskFailed as error:
            return error
        return None

    def checkpoint(self, state: TrainerState | None = None) -> Checkpoint:
        """Everything that a later process needs, as it is now."""
        state = state or self._trainer.snapshot()
        self._tick()
        # A result that came meanwhile decides which checkpoints stay.
        self._hear()
        steps, evals = self._outbox.pending()
        progress = Progress(
            job_id=self._job_id,
            step=state.steps,
            active_s=self.position.active_s,
            evaluated=self.position.evaluated,
            steps=steps,
            evals=evals,
            best_step=None if self.position.best is None else self.position.best[0],
            best_reward=None if self.position.best is None else self.position.best[1],
            candidates=self.position.candidates,
            adaptive=self._adaptive.state(self._directives.current()),
            skipped=state.skipped,
        )
        return Checkpoint(progress, state.weights, state.optimizer, torch.random.get_rng_state())

    def _step(self, groups: Sequence[Group]) -> None:
        t = self._trainer.steps
        self._status.set("training", t)
        done = self._trainer.step(groups)
        lags, directives = lag_histogram(groups, t), self._directives.current()
        move = self._adaptive.after(done.values, lags, directives)
        if move is not None:
            self._directives.ask(move)
        supply = self._supply
        supply.evict(t + 1)
        metrics = done.values | done.times | self._extra_metrics() | {"publish_copy_s": self._copy_s}
        metrics |= supply_metrics(groups, self._spec.batch.prompts, [*supply.told, *supply.dropped])
        report = StepReport(
            step=t + 1,
            t_train=done.t_train,
            t_idle=self._idle_s,
            reward=done.reward,
            trained=[g.work_item for g in groups],
            dropped=supply.dropped,
            told=supply.told,
            lags=lags,
            metrics=metrics | {"skipped_versions": float(self._publisher.skipped)},
            staleness=move,
        )
        self._outbox.put(report)
        self._journal.step(report)
        self._idle_s = 0.0
        # Not the S that the step asked for.
        supply.reported(directives.staleness_budget)
        self._status.set("training", t + 1)
        self._save_if_due(t + 1)

    def _save_if_due(self, step: int) -> None:
        every = self._spec.learner.checkpoint_every
        publish = self._publish_due(step)
        keep = publish if every is None else step % every == 0
        due = publish and self.exam_due(step)
        if due or (publish and self._publisher.waiting in self.position.candidates):
            # A candidate that still waits is about to be replaced, and the fleet will evaluate what replaces it. It is
            # taken back first: else it could be begun in this moment, and its evaluation would be nobody's.
            replaced = self._publisher.withdraw()
            if due or replaced in self.position.candidates:
                self._hear()
                self.position.enter(step, replaced=replaced)
                keep = True
        began = self._clock()
        if publish or keep:
            state = self._trainer.snapshot(optimizer=keep)
            checkpoint = self.checkpoint(state) if keep else None
            self._publisher.submit(Save(step if publish else None, state.weights, checkpoint))
        if publish:
            self.position.last_publish = self.position.published = step
        self._copy_s = self._clock() - began

    def _publish_due(self, step: int) -> bool:
        position, period = self.position, self._directives.current().publish_period
        return step > position.published and step - position.last_publish >= period

    def _gather(self) -> list[Group]:
        """A whole batch; nothing when the control service wants something else, or the time is over."""
        t, prompts = self._trainer.steps, self._spec.batch.prompts
        began, least = self._clock(), prompts
        if self._spec.adaptive and self._buffer.replays(t):
            # Greater S that earlier steps asked for hold once they are answered, as they were when this step was made.
            self._outbox.flush(FLUSH_S)
        while not self._buffer.wait(t, self._directives.current().staleness_budget, prompts, _POLL_S):
            self._status.set("waiting", t)
            self._supply.tell(t)
            if self._publish_due(t):
                # The publish period was shortened: without a younger version no admissible rollout could come.
                self._save_if_due(t)
            if self._publisher.idle:
                self._supply.check(t, self.position.published, prompts, self._extra_metrics)
            if self._directives.urgent.is_set() or self._out_of_time():
                break
            if self._late(began) and self._buffer.ready(t, self._directives.current().staleness_budget, 1):
                least = 1
                break
        groups, dropped = self._buffer.take(
            t,
            self._directives.current().staleness_budget,
            prompts,
            least=least,
            most=self._spec.learner.most_groups(prompts),
        )
        self._supply.dropped += dropped
        self._idle_s += self._clock() - began
        return groups

    def _late(self, began: float) -> bool:
        """Whether the job wants to train now on what came."""
        batch = self._spec.batch
        if batch.on_late != "train" or batch.group_deadline_s is None:
            return False
        return self._clock() - began >= batch.group_deadline_s

    def _obey(self) -> Ending | None:
        """Do what the control service wants; returns when it is `run`, or with the end."""
        paused = False
        while (wanted := self._directives.current()).command != "run":
            if wanted.command == "abort":
                return Ending("aborted", wanted.reason)
            if wanted.command == "finish":
                return Ending("finished", wanted.reason)
            if not paused:
                self._publisher.submit(Save(None, {}, self.checkpoint()))
                self._status.set("waiting", self._trainer.steps)
                paused = True
            time.sleep(_POLL_S)
            self._seen = self._clock()
        return None

    def _stop_rule(self) -> Ending | None:
        stop = self._spec.stop
        self._hear()
        if stop.steps is not None and self._trainer.steps >= stop.steps:
            return Ending("succeeded", f"{stop.steps} steps are done")
        if self._reached is not None:
            return Ending("succeeded", f"held-out reward {self._reached:.3f} reached {stop.target_reward}")
        if self._out_of_time():
            return Ending("succeeded", f"{stop.max_hours} hours are over")
        return None

    def _out_of_time(self) -> bool:
        self._tick()
        return self._spec.stop.max_hours is not None and self.position.active_s >= self._spec.stop.max_hours * 3600

    def _eval_due(self) -> bool:
        step, learner = self._trainer.steps, self._spec.learner
        return learner.eval_by == "learner" and step % learner.eval_every == 0 and self.position.evaluated < step

    def exam_due(self, step: int) -> bool:
        """Whether the fleet will evaluate this version: the first that is published at or after each multiple."""
        learner = self._spec.learner
        return learner.eval_by == "fleet" and step // learner.eval_every > self.position.evaluated // learner.eval_every

    def _hear(self) -> None:
        """What the fleet's evaluations said: for the stop rule, and for which checkpoint is the best. Several may have
        ended since the last look, and each of them counts; not yet one of a version that is still to be made again."""
        for step, reward in self._directives.current().results:
            if step <= self._trainer.steps:
                self._measured(reward)
                self.position.heard(step, reward)
                self._journal.heard(step, reward)

    def _measured(self, reward: float) -> None:
        target = self._spec.stop.target_reward
        if target is not None and reward >= target and self._reached is None:
            self._reached = reward

    def _tick(self) -> None:
        """Count the job's time, pauses left out."""
        now = self._clock()
        self.position.active_s += now - self._seen
        self._seen = now
