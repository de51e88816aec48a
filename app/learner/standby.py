"""Files of the model that are in the store only once they are wanted there.

Invariant: an upload that fails is tried again and never ends the training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from app.learner.outbox import Directives
from app.learner.threads import watched
from app.protocol.errors import EchoError
from app.storage.objects import ObjectStore

log = logging.getLogger(__name__)

LOOK_S, AGAIN_S = 2.0, 30.0


class Standby:
    """A thread that puts files into the store once the control service wants them there."""

    def __init__(
        self,
        objects: ObjectStore,
        job_id: str,
        files: Sequence[Path],
        directives: Directives,
        *,
        look_s: float = LOOK_S,
        again_s: float = AGAIN_S,
    ) -> None:
        self._objects, self._job_id, self._left = objects, job_id, list(files)
        self._directives = directives
        self._look_s, self._again_s = look_s, again_s
        self._stopped, self._done = threading.Event(), threading.Event()
        self._thread = watched("standby", self._run, directives.fail)

    @property
    def done(self) -> bool:
        """Whether all files were wanted and are in the store."""
        return self._done.is_set()

    def start(self) -> None:
        """Begin to look; without files there is nothing to look for."""
        if self._left:
            self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Begin nothing more; waits up to `timeout_s` for what runs."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        pause = self._look_s
        while not self._stopped.wait(pause):
            try:
                if not self._directives.current().store_model:
                    continue
            except EchoError:
                # Another thread has failed: the session ends.
                return
            try:
                self._put()
                return
            except (EchoError, OSError) as error:
                pause = self._again_s
                log.warning("the model's files are not in the object store: %s; trying again", error)

    def _put(self) -> None:
        # What lies there may be of another commit, from a process before this one: it is replaced.
        while self._left and not self._stopped.is_set():
            path = self._left[0]
            log.info("a node did not get %s from the Hugging Face Hub: it goes into the object store", path.name)
            self._objects.put_file(f"jobs/{self._job_id}/model/{path.name}", path)
            self._left.pop(0)
        if not self._left:
            self._done.set()
