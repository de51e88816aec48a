"""One process's work on one job: from the answer to its start to its last word.

Invariant: nothing is rented before model and task have been loaded and the relay serves a version; the last word is
said after the final model and all reports are where they belong. What was opened is closed, however the work ends.
"""

from __future__ import annotations

import copy
import logging
from contextlib import ExitStack
from functools import partial

import torch

from app.learner.adaptive import again
from app.learner.audit.auditor import Auditor
from app.learner.audit.rewards import Rewards
from app.learner.audit.weights import Versions, audit_device, kept
from app.learner.boards import open_boards
from app.learner.buffer import ReplayBuffer
from app.learner.cache import FileCache
from app.learner.checkpoints import save
from app.learner.client import Control
from app.learner.config import LearnerSettings
from app.learner.heart import Heart, Status
from app.learner.inbox import Inbox, counted
from app.learner.journal import NAME, Journal
from app.learner.keeper import Keeper, fetch_step, take_best
from app.learner.loans import Loans, open_loans
from app.learner.loop import Loop
from app.learner.model import trained_weights
from app.learner.objects import open_objects
from app.learner.outbox import FLUSH_S, Directives, Outbox
from app.learner.parallel.ranks import ALONE, Ranks
from app.learner.position import Ending, Position
from app.learner.prepare import Parts, prepare, put_assets, put_final
from app.learner.probe import open_prober
from app.learner.publisher import Publisher, Save
from app.learner.reading import open_reader
from app.learner.resume import fetch_checkpoint, resume
from app.learner.rewards import Rewarder, threads
from app.learner.sink import RelaySink
from app.learner.standby import Standby
from app.protocol.errors import TaskFailed
from app.protocol.learner import Done, LearnerDirectives, Ready, StartAnswer
from app.snapshots.rates import Rate

log = logging.getLogger(__name__)


class Session:
    """One process's work on one job, after `start`."""

    def __init__(self, settings: LearnerSettings, control: Control, answer: StartAnswer, ranks: Ranks = ALONE) -> None:
        spec = answer.spec
        self._ranks = ranks
        self._settings = settings
        self._control = control
        self._answer = answer
        self._objects = open_objects(settings, answer)
        self._directives = Directives(
            LearnerDirectives(command="run", staleness_budget=spec.first_staleness, publish_period=spec.first_period)
        )
        self._status = Status()
        self._buffer = ReplayBuffer()
        self._outbox = Outbox(control, self._directives)
        self._sink: RelaySink | None = None
        self._publisher: Publisher | None = None
        self._inbox: Inbox | None = None
        self._auditor: Auditor | None = None
        self._standby: Standby | None = None
        self._heart = Heart(
            control, self._status, self._directives, self._bytes_served,
            uplink=self._uplink, model_stored=self._model_stored,
        )  # fmt: skip
        self._checkpoints = settings.work_dir / "checkpoints"
        self._prefix = f"jobs/{answer.job_id}/checkpoints/"
        self._journal: Journal | None = None
        self._keeper = Keeper(
            self._objects,
            self._prefix,
            self._checkpoints,
            every=spec.learner.checkpoint_upload_every,
            keep=spec.learner.checkpoint_keep,
            also=self._put_journal,
        )
        self.step = answer.last_step

    def run(self) -> None:
        """Train until the end and say so. Raises EchoError."""
        self._heart.start()
        self._outbox.start()
        parts = prepare(self._answer, self._settings, self._ranks)
        torch.manual_seed(self._answer.spec.seed)
        fetch = partial(
            fetch_checkpoint, self._objects, self._prefix, self._checkpoints, last_step=self._answer.last_step
        )
        position = resume(self._answer, self._checkpoints, parts.trainer, self._buffer, self._outbox, fetch)
        self.step = parts.trainer.steps
        self._open_journal()
        self._status.set("loading", self.step)
        put_assets(self._objects, self._answer.job_id, parts.files)
        sink, publisher = self._open(parts)
        loans = open_loans(self._answer.spec, self._answer.job_id, parts, self._objects)
        loop = self._loop(loans, parts, publisher, position)
        size = self._publish_current(parts, sink, publisher, position, loop)
        answer = self._control.ready(
            Ready(
                resume_step=parts.trainer.steps,
                parameters=parts.loaded.parameters,
                snapshot_bytes=size,
                train_prompts=parts.task.train_size,
                eval_prompts=parts.evaluator.prompts,
                t_train_prior=parts.t_train_prior,
                manifest_public_key=sink.public_key,
                assets=parts.assets,
                model_revision=parts.revision,
                staleness=again(self._answer.spec, position.adaptive),
            )
        )
        self._directives.update(answer)
        self._standby = Standby(self._objects, self._answer.job_id, parts.later, self._directives)
        self._standby.start()
        self._buffer.plan({step.step: step.work_items for step in answer.replay})
        self._follow(parts, sink)
        try:
            ending = loop.run()
        finally:
            self.step = parts.trainer.steps
        if ending.kind != "aborted":
            self._finish(parts, publisher, loop, ending, loans)

    def close(self) -> None:
        """Stop all threads: each of them, whatever the end of another one raises."""
        with ExitStack() as ends:  # the last one named comes first
            if self._sink is not None:
                ends.callback(self._sink.stop)
            if self._journal is not None:
                ends.callback(self._journal.close)
            ends.callback(self._outbox.stop)
            ends.callback(self._keeper.stop)
            if self._publisher is not None:
                ends.callback(self._publisher.stop)
            if self._standby is not None:
                ends.callback(self._standby.stop)
            if self._auditor is not None:
                ends.callback(self._auditor.stop)
            if self._inbox is not None:
                ends.callback(self._inbox.stop)
            ends.callback(self._heart.stop)

    def _bytes_served(self) -> int:
        return 0 if self._sink is None else self._sink.bytes_served

    def _model_stored(self) -> bool:
        return self._standby is not None and self._standby.done

    def _uplink(self) -> Rate | None:
        return None if self._sink is None else self._sink.uplink()

    def _open_journal(self) -> None:
        folder = self._settings.work_dir
        boards = open_boards(folder, self._answer.spec, job_id=self._answer.job_id, step=self.step)
        self._journal = Journal(folder, resume_step=self.step, board=boards)

    def _put_journal(self) -> None:
        if self._journal is not None and self._journal.path.exists():
            self._objects.put_file(f"jobs/{self._answer.job_id}/{NAME}", self._journal.path)

    def _open(self, parts: Parts) -> tuple[RelaySink, Publisher]:
        sink = RelaySink(
            self._settings.work_dir,
            job_id=self._answer.job_id,
            relay_token=self._answer.relay_token,
            host=self._settings.learner_relay_host,
            port=self._settings.learner_relay_port,
            announce=self._settings.learner_relay_announce,
            uplink_bytes_per_s=self._settings.learner_uplink_bytes_per_s,
            objects=self._objects,
            assets=parts.assets,
            snapshots=self._answer.spec.snapshot,
            keep=kept(self._answer.spec),
            probe=open_prober(parts.loaded, self._answer.spec, parts.prompt),
        )
        sink.start()
        self._sink = sink
        self._publisher = Publisher(
            sink,
            self._checkpoints,
            self._outbox,
            self._directives,
            save_checkpoint=partial(save, keep=self._answer.spec.learner.checkpoint_keep),
            saved=self._keeper.saved,
        )
        self._keeper.start()
        self._publisher.start()
        return sink, self._publisher

    def _publish_current(
        self, parts: Parts, sink: RelaySink, publisher: Publisher, position: Position, loop: Loop
    ) -> int:
        """Serve v_step, or the newer version that was published before a checkpoint was lost; its payload bytes.

        A version never changes, so what was published under a number is not published again from other weights.
        """
        step = parts.trainer.steps
        newest = max(self._answer.published_version or 0, sink.newest or 0)
        version = step if step >= newest else newest
        renew = position.evaluated < 0 and step == 0
        # The control service opens an exam when it is told of a version; one that is only on this disk it never was.
        told = self._answer.published_version or 0
        if version == step > told:
            renew = position.published_first(step, told=told, due=loop.exam_due(step)) or renew
        position.published = version
        if version == step or sink.newest == version:
            fresh = loop.checkpoint(parts.trainer.state()) if renew else None
            publisher.submit(Save(version, parts.trainer.weights() if fresh is None else fresh.weights, fresh))
            publisher.flush(FLUSH_S)
            self._outbox.flush(FLUSH_S)
        else:
            log.warning("v%d is published but not on this machine; nodes pull it from the object store", version)
        return 2 * sum(t.numel() for t in trained_weights(parts.loaded.model).values())

    def _loop(self, trainer: Loans, parts: Parts, publisher: Publisher, position: Position) -> Loop:
        return Loop(
            self._answer.spec,
            self._answer.job_id,
            trainer=trainer,
            evaluate=parts.evaluator.run,
            eval_prompts=parts.evaluator.prompts,
            buffer=self._buffer,
            publisher=publisher,
            outbox=self._outbox,
            directives=self._directives,
            status=self._status,
            position=position,
            extra_metrics=self._extra_metrics,
            journal=self._journal,
        )

    def _extra_metrics(self) -> dict[str, float]:
        refused = counted(self._inbox.invalid) if self._inbox else {}
        return refused | (self._auditor.metrics() if self._auditor else {})

    def _audit(self, parts: Parts, sink: RelaySink) -> Auditor | None:
        """What computes groups again; nothing if the job wants none of it."""
        spec = self._answer.spec
        if spec.trust.off:
            return None
        device = audit_device(self._settings.learner_audit_device, self._ranks)
        auditor = Auditor(
            spec,
            Versions(parts.loaded.folder, spec, device, sink.weights),
            Rewards(parts.task, copy.deepcopy(parts.loaded.tokenizer), at_once=threads(spec)),
            self._control,
            self._buffer,
            self._directives,
            never=sink.never_published,
        )
        auditor.start()
        return auditor

    def _follow(self, parts: Parts, sink: RelaySink) -> None:
        spec = self._answer.spec
        cache = FileCache(self._settings.work_dir / "trajectories", self._settings.learner_cache_bytes)
        reader = open_reader(spec, parts, self._objects, cache)
        self._auditor = self._audit(parts, sink)
        rewarder = None
        if spec.rewards != "node":
            rewarder = partial(Rewarder, spec, parts.task, copy.deepcopy(parts.loaded.tokenizer))
        self._inbox = Inbox(self._control, reader, self._buffer, self._directives, self._auditor, rewarder)
        self._inbox.start()

    def _finish(self, parts: Parts, publisher: Publisher, loop: Loop, ending: Ending, loans: Loans) -> None:
        """Last evaluation, checkpoint, the model as a Hugging Face folder in the store, last word or TaskFailed."""
        spec = self._answer.spec.learner
        self._status.set("finishing", parts.trainer.steps)
        failed = loop.last_evaluation()
        self._status.set("finishing", parts.trainer.steps)
        publisher.flush(FLUSH_S)
        self._keeper.stop(FLUSH_S)
        step = parts.trainer.steps
        self._keeper.put(step, save(self._checkpoints, loop.checkpoint(), keep=spec.checkpoint_keep))
        self._put_journal()
        said = ""
        if spec.final == "best":
            fetch = partial(fetch_step, self._objects, self._prefix, self._checkpoints)
            said = take_best(parts.trainer, self._checkpoints, loop.position.best, fetch)
        prefix = f"jobs/{self._answer.job_id}/final/"
        put_final(self._objects, prefix, parts, self._answer.spec, self._settings.work_dir / "final")
        if self._auditor is not None:
            self._auditor.stop(FLUSH_S)  # after the last word nothing is told
        self._outbox.flush(FLUSH_S)
        if failed is not None:
            raise TaskFailed(f"{failed.detail}; the model is saved all the same, under {prefix}")
        loans.end()
        status = "succeeded" if ending.kind == "succeeded" else "finished"
        self._control.done(Done(status=status, reason=ending.reason + said, step=step, final_prefix=prefix))
