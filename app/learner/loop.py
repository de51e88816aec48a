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
from app.learner.outbox import Directives, Outbox
from app.learner.position import Ending, Journal, NoJournal, Position, Trainer
from app.learner.publisher import Publisher, Save
from app.learner.trainer import TrainerState
from app.protocol.errors import LearnerError
from app.protocol.job import JobSpec
from app.protocol.learner import DroppedGroup, Drops, EvalReport, StepReport

_POLL_S = 0.5
_FAULTS = ("invalid_", "audits_suspect", "audits_failed")
"""What the names of metrics begin with that count groups which were refused."""
_HARDLY = 10
"""Fewer usable groups than one in so many."""


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
        self._budget = spec.first_staleness
        """S at the last step."""
        self._dropped: list[DroppedGroup] = []
        self._told: list[DroppedGroup] = []
        """Groups since the last step that were reported as dropped before there was a batch."""
        self._told_dead = 0
        """Those of them that speak of a fault."""
        self._copy_s = 0.0
        self._idle_s = 0.0
        self._reward: tuple[int, float] | None = None
        """Step and value of the newest held-out reward, whoever measured it."""
        self._own: tuple[int, float] | None = None
        """The newest that this process measured."""
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
            self._own = self._reward = (step, self._evaluate())
        reward = self._own[1]
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
        self._dropped += self._buffer.evict(t + 1, self._directives.current().staleness_budget)
        metrics = done.values | done.times | self._extra_metrics() | {"publish_copy_s": self._copy_s}
        metrics |= supply_metrics(groups, self._spec.batch.prompts, [*self._told, *self._dropped])
        report = StepReport(
            step=t + 1,
            t_train=done.t_train,
            t_idle=self._idle_s,
            reward=done.reward,
            trained=[g.work_item for g in groups],
            dropped=self._dropped,
            told=self._told,
            lags=lags,
            metrics=metrics | {"skipped_versions": float(self._publisher.skipped)},
            staleness=move,
        )
        self._outbox.put(report)
        self._journal.step(report)
        self._dropped, self._told, self._told_dead, self._idle_s = [], [], 0, 0.0
        # What is under way was admitted under this S, not under the one that the step asked for.
        self._budget = directives.staleness_budget
        self._status.set("training", t + 1)
        self._save_if_due(t + 1)

    def _save_if_due(self, step: int) -> None:
        every = self._spec.learner.checkpoint_every
        publish = self._publish_due(step)
        keep = publish if every is None else step % every == 0
        # A candidate that still waits is about to be replaced, and the fleet will evaluate what replaces it.
        waiting = self._publisher.waiting
        if publish and (waiting in self.position.candidates or self._exam_due(step)):
            self._hear()
            self.position.enter(step, replaced=waiting)
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
        while not self._buffer.wait(t, self._directives.current().staleness_budget, prompts, _POLL_S):
            self._status.set("waiting", t)
            self._tell_drops(t)
            if self._publish_due(t):
                # The publish period was shortened: without a younger version no admissible rollout could come.
                self._save_if_due(t)
            self._check_supply(t)
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
        self._dropped += dropped
        self._idle_s += self._clock() - began
        return groups

    def _late(self, began: float) -> bool:
        """Whether the job wants to train now on what came."""
        batch = self._spec.batch
        if batch.on_late != "train" or batch.group_deadline_s is None:
            return False
        return self._clock() - began >= batch.group_deadline_s

    def _tell_drops(self, t: int) -> None:
        """Report what can't be trained on without waiting for a step: there is room for others at once."""
        dropped = self._dropped + self._buffer.evict(t, self._directives.current().staleness_budget)
        self._dropped = []
        if dropped:
            self._told += dropped
            self._told_dead += self._dead(dropped)
            self._outbox.put(Drops(step=t, dropped=dropped))

    def _dead(self, dropped: Sequence[DroppedGroup]) -> int:
        """How many of these speak of a fault. That a lower S makes old groups stale is none."""
        lowered = self._directives.current().staleness_budget < self._budget
        return sum(d.reason != "stale" or not lowered for d in dropped)

    def _check_supply(self, t: int) -> None:
        """Raise LearnerError when so many groups were refused that there is no use in waiting for others.

        Admission lets at most (S + v − t + 1) · prompts groups be ahead of the learner, v the newest version, and makes
        up for those that are dead. When more than that were since the last step, and hardly any can be trained on, it
        only burns the fleet's money.
        """
        dead = self._buffer.unreported + self._dead(self._dropped) + self._told_dead
        if len(self._buffer) * _HARDLY >= dead:
            return
        margin = self._directives.current().staleness_budget + self.position.published - t
        if self._publisher.idle and 0 < margin * self._spec.batch.prompts < dead:
            told = {name: n for name, n in self._extra_metrics().items() if name.startswith(_FAULTS)}
            reasons = ", ".join(f"{n:.0f} × {name}" for name, n in told.items()) or "stale"
            raise LearnerError(
                f"{dead} groups since step {t} can't be trained on ({reasons}), and hardly any can; "
                "do nodes and learner have the same model files and task package?"
            )

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
        if stop.target_reward is not None and self._reward is not None and self._reward[1] >= stop.target_reward:
            return Ending("succeeded", f"held-out reward {self._reward[1]:.3f} reached {stop.target_reward}")
        if self._out_of_time():
            return Ending("succeeded", f"{stop.max_hours} hours are over")
        return None

    def _out_of_time(self) -> bool:
        self._tick()
        return self._spec.stop.max_hours is not None and self.position.active_s >= self._spec.stop.max_hours * 3600

    def _eval_due(self) -> bool:
        step, learner = self._trainer.steps, self._spec.learner
        return learner.eval_by == "learner" and step % learner.eval_every == 0 and self.position.evaluated < step

    def _exam_due(self, step: int) -> bool:
        """Whether the fleet will evaluate this version: the first that is published at or after each multiple."""
        learner = self._spec.learner
        return learner.eval_by == "fleet" and step // learner.eval_every > self.position.evaluated // learner.eval_every

    def _hear(self) -> None:
        """What the fleet's evaluation said: for the stop rule, and for which checkpoint is the best."""
        said = self._directives.current()
        if said.evaluated_step is None or said.evaluated_reward is None:
            return
        if self._reward is None or said.evaluated_step > self._reward[0]:
            self._reward = (said.evaluated_step, said.evaluated_reward)
        self.position.heard(said.evaluated_step, said.evaluated_reward)

    def _tick(self) -> None:
        """Count the job's time, pauses left out."""
        now = self._clock()
        self.position.active_s += now - self._seen
        self._seen = now
