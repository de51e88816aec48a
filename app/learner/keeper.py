"""Checkpoints in the object store: brought there beside the training, fetched when this machine has none or older ones.

Invariant: in the store a checkpoint counts only with its commit marker, which is put last and removed first; what is
fetched is held against the marker's hashes before it counts here. Training never waits for an upload.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from app.learner.checkpoints import MARKER, progress_of, promises, steps_on_disk, weights_of, why_left
from app.learner.files import fsync_path, write_durable
from app.learner.prepare import put_folder
from app.learner.trainer import TrainerState
from app.protocol.errors import EchoError, LearnerError, NotFound
from app.storage.objects import ObjectStore

log = logging.getLogger(__name__)
_WAIT_S = 60.0


def stored_steps(objects: ObjectStore, prefix: str) -> list[int]:
    """Steps of the committed checkpoints under `prefix`, newest first. Raises Unavailable."""
    return [step for step, whole in _steps(objects, prefix).items() if whole]


def _steps(objects: ObjectStore, prefix: str) -> dict[int, bool]:
    """Step → whether its checkpoint is committed, newest first."""
    found: dict[int, bool] = {}
    for info in objects.list(prefix):
        step, _, name = info.key.removeprefix(prefix).partition("/")
        if step.isdigit():
            found[int(step)] = name == MARKER or found.get(int(step), False)
    return dict(sorted(found.items(), reverse=True))


def fetch_newer(objects: ObjectStore, prefix: str, root: Path, *, last_step: int | None = None) -> int | None:
    """Bring the store's newest whole checkpoint into `root` if it is newer than all that are there; its step.

    Damaged ones are passed over for the one before, and so are those of a course that was left: `last_step` is what the
    control service has on record. Raises Unavailable, LearnerError when the disk refuses.
    """
    here = max(steps_on_disk(root), default=-1)
    for step in stored_steps(objects, prefix):
        if step <= here:
            break
        if fetch_step(objects, prefix, root, step, last_step=last_step):
            return step
    return None


def fetch_step(objects: ObjectStore, prefix: str, root: Path, step: int, *, last_step: int | None = None) -> bool:
    """Bring one checkpoint of the store into `root`; False if it is damaged or of a course that was left.

    Raises Unavailable, LearnerError when the disk refuses.
    """
    try:
        if left := why_left(progress_of(objects.get(f"{prefix}{step}/state.json")), last_step):
            log.warning("checkpoint %s%d/ in the object store is passed over: %s", prefix, step, left)
            return False
        _fetch(objects, f"{prefix}{step}/", root, step)
    except (NotFound, ValueError, KeyError, TypeError) as error:
        log.warning("checkpoint %s%d/ in the object store is damaged and passed over: %s", prefix, step, error)
        return False
    except OSError as error:
        raise LearnerError(f"the checkpoint of step {step} can't be written to {root}: {error}") from error
    log.info("fetched the checkpoint of step %d from the object store", step)
    return True


def _fetch(objects: ObjectStore, prefix: str, root: Path, step: int) -> None:
    part = root / f".part-{uuid.uuid4().hex}"
    part.mkdir(parents=True)
    try:
        marker = objects.get(prefix + MARKER)
        for name, promised in promises(marker).items():
            path = part / Path(name).name
            objects.get_file(prefix + path.name, path)
            fsync_path(path)
            if not promised.kept(path):
                raise ValueError(f"{name} is not the file that was committed")
        write_durable(part / MARKER, marker)
        fsync_path(part)
        shutil.rmtree(root / f"{step:09d}", ignore_errors=True)
        part.rename(root / f"{step:09d}")
        fsync_path(root)
    finally:
        shutil.rmtree(part, ignore_errors=True)


class Restorable(Protocol):
    """The part of a trainer that `take_best` uses."""

    steps: int

    def restore(self, state: TrainerState) -> None: ...


def take_best(
    trainer: Restorable, root: Path, best: tuple[int, float] | None, fetch: Callable[[int], object] = lambda _: None
) -> str:
    """Put the weights with the best held-out reward into the model; what is to be said about the final model.

    `fetch` brings the checkpoint of a step from elsewhere: a learner on another machine may have made it. Raises what
    that raises.
    """
    if best is None or best[0] == trainer.steps:
        return ""
    step, reward = best
    if step not in steps_on_disk(root):
        fetch(step)
    try:
        weights = weights_of(root, step)
    except LearnerError as error:
        log.warning("%s", error.detail)
        return f"; the checkpoint of v{step}, the best, is lost: the final model is that of the last step"
    trainer.restore(TrainerState(step, weights, {}))
    return f"; the final model is v{step}, the best with {reward:.3f}"


class Keeper:
    """A thread that puts checkpoints into the store, one at a time; a newer one takes the place of one that waits."""

    def __init__(
        self,
        objects: ObjectStore,
        prefix: str,
        root: Path,
        *,
        every: int | None,
        keep: int = 2,
        also: Callable[[], None] = lambda: None,
    ) -> None:
        """`every`: each so many checkpoints one is put there; None: none. `also` is called after each."""
        self._objects, self._prefix, self._root = objects, prefix, root
        self._every, self._keep, self._also = every, keep, also
        self._staging = root.parent / "uploading"
        self._count = 0
        self._waiting: tuple[int, Path] | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self.failures = 0

    def start(self) -> None:
        """Begin to work. What a predecessor left half done is removed."""
        shutil.rmtree(self._staging, ignore_errors=True)
        self._thread.start()

    def saved(self, step: int) -> None:
        """A checkpoint is on disk. It is linked at once, so that it may go from its own folder meanwhile."""
        self._count += 1
        if self._every is None or self._count % self._every:
            return
        staged = self._staging / f"{step}-{uuid.uuid4().hex}"
        try:
            shutil.copytree(self._root / f"{step:09d}", staged, copy_function=_link)
        except (OSError, shutil.Error) as error:
            self.failures += 1
            log.warning("the checkpoint of step %d can't be brought to the object store: %s", step, error)
            return
        with self._changed:
            old, self._waiting = self._waiting, (step, staged)
            self._changed.notify_all()
        if old is not None:
            shutil.rmtree(old[1], ignore_errors=True)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Begin nothing more; waits up to `timeout_s` for what runs."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def put(self, step: int, folder: Path) -> None:
        """Put one checkpoint there now, with the best one, and take away those that are superfluous then.

        Raises Unavailable, OSError.
        """
        best = json.loads((folder / "state.json").read_bytes()).get("best_step")
        stored = stored_steps(self._objects, self._prefix)
        if best is not None and best not in {step, *stored} and best in steps_on_disk(self._root):
            self._put(best, self._root / f"{best:09d}")
        self._put(step, folder)
        found = _steps(self._objects, self._prefix)
        for old in [s for s, whole in found.items() if whole][self._keep :]:
            # Newer ones may be damaged, or of a course that was left.
            if old not in {step, best}:
                self._remove(old)
        for old in [s for s, whole in found.items() if not whole and s < step]:
            # A process died while it was putting this one there, or taking it away.
            self._remove(old)

    def _put(self, step: int, folder: Path) -> None:
        # One of the same step, from before the learner went back, must not count while its files are replaced.
        self._objects.delete(f"{self._prefix}{step}/{MARKER}")
        put_folder(self._objects, f"{self._prefix}{step}/", folder)

    def _remove(self, step: int) -> None:
        prefix = f"{self._prefix}{step}/"
        self._objects.delete(prefix + MARKER)
        for info in list(self._objects.list(prefix)):
            self._objects.delete(info.key)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._stopped, _WAIT_S)
                if self._stopped:
                    return
                job, self._waiting = self._waiting, None
            if job is None:
                continue
            step, staged = job
            try:
                self.put(step, staged)
                self._also()
            except (EchoError, OSError) as error:
                # The checkpoint is on this disk, and the next one is tried again.
                self.failures += 1
                log.warning("the checkpoint of step %d is not in the object store: %s", step, error)
            finally:
                shutil.rmtree(staged, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """A second name for a file, or a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
