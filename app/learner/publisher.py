"""Checkpoints and snapshots, beside the training.

Invariant: a version is on disk as a checkpoint before anybody can pull it (unless the job asked for fewer
checkpoints), and it is announced only when the relay can serve it. The training step pays for one copy of the tensors.

Newest wins: if a publish is still running when the next is due, the new one takes the place of the one that waits.
A checkpoint that comes alone while a version waits takes the place of that version's, unless the version is to be
evaluated: then both are written. The learner never waits for a disk or an uplink, no more than two copies are held (a
third where both are written, none of what is only uploaded), and nodes get the freshest version that can be had; what
it costs is a version number that nobody sees. The alternative, holding the step back, would turn a slow disk into idle
time of the learner.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from app.learner.checkpoints import Checkpoint, save
from app.learner.outbox import Directives, Outbox
from app.learner.threads import watched
from app.protocol.errors import EchoError, LearnerError, Unavailable
from app.protocol.learner import Published, PublishedDelta

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A version that the relay serves."""

    version: int
    bytes: int
    chunks: int
    relay_url: str
    delta: PublishedDelta | None = None
    delta_share: float | None = None
    note: str = ""
    """Why there is no delta."""


Uploaded = Literal["full", "delta"]


class SnapshotSink(Protocol):
    """Where versions go."""

    @property
    def uploaded(self) -> int:
        """How many objects went into the store: while it grows an upload gets on, however slow."""
        ...

    def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> Announcement:
        """Make a version available to nodes at once. The same version again is harmless."""
        ...

    def upload(self, version: int) -> Uploaded:
        """Put it into the object store, whole or its delta; says which. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Save:
    """Tensors that are nobody else's any more. `version` None: checkpoint only; `checkpoint` None: publish only."""

    version: int | None
    weights: Mapping[str, torch.Tensor]
    checkpoint: Checkpoint | None
    later: Checkpoint | None = None
    """A newer one that came while this version waited, which is to be evaluated, so that its own must not be lost."""


def merged(old: Save, new: Save) -> Save:
    """What waits, after `new` has come while `old` waited: the halves that `new` doesn't bring are still wanted."""
    if new.version is not None:
        return new if new.checkpoint is not None else replace(new, checkpoint=old.later or old.checkpoint)
    if old.version is None or new.checkpoint is None:
        return new
    progress, own = new.checkpoint.progress, old.checkpoint
    if own is not None and own.progress.step != progress.step and old.version in progress.undecided:
        return replace(old, later=new.checkpoint)
    return replace(old, checkpoint=new.checkpoint)


class Publisher:
    """A thread that works off what `submit` gives it."""

    def __init__(
        self,
        sink: SnapshotSink,
        checkpoints: Path,
        outbox: Outbox,
        directives: Directives,
        *,
        save_checkpoint: Callable[[Path, Checkpoint], object] = save,
        saved: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`saved` is told the step of each checkpoint once it is on disk, in the publisher's thread."""
        self._sink = sink
        self._checkpoints = checkpoints
        self._outbox = outbox
        self._directives = directives
        self._save = save_checkpoint
        self._saved = saved
        self._waiting: Save | None = None
        self._running: Save | None = None
        self._best: Checkpoint | None = None
        self._busy = False
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = watched("publisher", self._run, directives.fail)
        self.skipped = 0
        """Versions that a newer one replaced before they were published."""
        self.upload_failures = 0

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def waiting(self) -> int | None:
        """The version that is queued and not begun: a newer one would take its place."""
        with self._changed:
            return None if self._waiting is None else self._waiting.version

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        with self._changed:
            return self._settled()

    def submit(self, job: Save) -> None:
        """Queue a copy; one that still waits is replaced, but for what `merged` keeps of it."""
        with self._changed:
            old = self._waiting
            if old is not None:
                self.skipped += old.version is not None and job.version is not None
                job = merged(old, job)
            self._waiting = job
            self._changed.notify_all()

    def withdraw(self) -> int | None:
        """Take back what waits: something newer, with a checkpoint, will come at once. Its version, if it has one."""
        with self._changed:
            old, self._waiting = self._waiting, None
            version = None if old is None else old.version
            self.skipped += version is not None
            self._changed.notify_all()
            return version

    def keep(self, checkpoint: Checkpoint) -> None:
        """Queue the best one so far: only a better one takes its place."""
        with self._changed:
            self._best = checkpoint
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until nothing is queued or running. Raises the failure of a thread, LearnerError when it is not done
        `timeout_s` after the last object went into the store: a model may take longer than that to get there."""
        with self._changed:
            done, before = False, -1
            while not done and before != (now := self._sink.uploaded):
                before = now
                done = self._changed.wait_for(lambda: self._settled() or self._stopped, timeout_s)
        self._directives.current()
        if not done:
            raise LearnerError(f"a publish got no further for {timeout_s:.0f} s")

    def stop(self, timeout_s: float = 5.0) -> None:
        """Begin nothing more; waits up to `timeout_s` for what runs."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._best or self._stopped, 60)
                if self._stopped:
                    return
                self._running, self._waiting = self._waiting, None
                best, self._best = self._best, None
                self._busy = self._running is not None or best is not None
            try:
                self._do()
                if best is not None:
                    self._write(best)
            except (EchoError, OSError) as error:
                refused = LearnerError(f"the learner's disk: {error}"[:500])
                self._directives.fail(error if isinstance(error, EchoError) else refused)
                self._stopped = True
            finally:
                with self._changed:
                    self._busy, self._running = False, None
                    self._changed.notify_all()

    def _settled(self) -> bool:
        return self._waiting is None and self._best is None and not self._busy

    def _write(self, checkpoint: Checkpoint) -> None:
        self._save(self._checkpoints, checkpoint)
        self._saved(checkpoint.progress.step)

    def _do(self) -> None:
        """What was taken up. Tensors are let go as soon as they are on disk: an upload may take long."""
        if self._running is not None and self._running.checkpoint is not None:
            self._write(self._running.checkpoint)
            self._running = replace(self._running, checkpoint=None)
        if self._running is not None and self._running.later is not None:
            self._write(self._running.later)
            self._running = replace(self._running, later=None)
        if self._running is None or self._running.version is None:
            return
        version = self._running.version
        made = self._sink.publish(version, self._running.weights)
        self._running = None
        self._outbox.put(_published(made, None))
        try:
            what = self._sink.upload(version)
        except Unavailable as error:
            # Nodes still pull from the relay; the next version is tried again, and `stored` stays false for this one.
            self.upload_failures += 1
            log.warning("v%d is not in the object store: %s", version, error.detail)
            return
        self._outbox.put(_published(made, what))


def _published(made: Announcement, stored: Uploaded | None) -> Published:
    delta = made.delta
    return Published(
        version=made.version,
        bytes=made.bytes,
        chunks=made.chunks,
        relay_url=made.relay_url,
        stored=stored == "full",
        delta=delta.model_copy(update={"stored": True}) if delta is not None and stored == "delta" else delta,
        delta_share=made.delta_share,
        note=made.note[:500],
    )
