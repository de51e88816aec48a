"""A task whose code runs in processes of its own.

Invariant: the process that asks runs none of the task's code and survives whatever it does; a call that fails is an
error, never a reward. A process that was killed is replaced at the next call.
"""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app.protocol.errors import BadInput, TaskFailed
from app.protocol.task_spec import TaskSpec
from app.tasks.base import Prompt, Reply, Split, is_unicode
from app.tasks.worker_process import END_S, WorkerProcess, number_of

log = logging.getLogger(__name__)

MOST_PROCESSES = 4
"""Of a task that says nothing about it."""
CUT_OFF = ("network", "processes", "proc", "shm", "files", "tcp", "signals", "calls")
MAX_SIZE = 1 << 40
QUEUE_SHARE = 4.0
"""A call waits for a free process as long as this many calls may take."""


def open_sandboxed(spec: TaskSpec, seed: int, folder: Path | None = None) -> SandboxTask:
    """Load a task in a process of its own. Raises BadInput by the task's word, TaskFailed if it does not load."""
    pool = _Pool(spec, seed, folder)
    try:
        about = pool.about()
    except (BadInput, TaskFailed):
        pool.close()
        raise
    if open_to := reached(_listed(about.get("cut_off")), network=spec.limits.network):
        log.warning("this machine's kernel does not keep the task %s from %s", spec.name, ", ".join(open_to))
    return (MultiTurnSandboxTask if about.get("multi_turn") is True else SandboxTask)(pool, about)


def reached(cut_off: Sequence[str], *, network: bool) -> list[str]:
    """In words, what a task can reach that it should not, given what it is cut off from."""
    found = {
        "the network": network or "network" in cut_off or "calls" in cut_off,
        "what other processes are": "processes" in cut_off or "signals" in cut_off,
        "shared memory of others": "shm" in cut_off or "files" in cut_off,
        "the user's files": "files" in cut_off,
    }
    return [word for word, kept in found.items() if not kept]


class SandboxTask:
    """`Task` over a pool of processes; safe to use from several threads, which then run side by side."""

    def __init__(self, pool: _Pool, about: Mapping[str, Any]) -> None:
        self._pool = pool
        self.name = str(about.get("name"))[:200]
        self.deterministic = about.get("deterministic") is not False
        self.cut_off: Sequence[str] = [word for word in CUT_OFF if word in _listed(about.get("cut_off"))]
        """What the kernel lets its processes not reach: some of CUT_OFF."""
        self._sizes: dict[Split, int] = {}
        weakref.finalize(self, pool.close)

    @property
    def train_size(self) -> int:
        """Number of training prompts."""
        return self._size("train")

    @property
    def heldout_size(self) -> int:
        """Number of held-out prompts."""
        return self._size("heldout")

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`. Raises BadInput, TaskFailed."""
        return self._prompt("train", index)

    def heldout(self, index: int) -> Prompt:
        """Held-out prompt number `index`. Raises BadInput, TaskFailed."""
        return self._prompt("heldout", index)

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        """Reward of an answer. Raises TaskFailed: it failed, took too long, or is not finite."""
        return self._reward(prompt, [completion_text])

    @property
    def longest_call_s(self) -> float:
        """A call on a free process ends within so many seconds, even if the process has to be started first."""
        return self._pool.longest_call_s

    def close(self) -> None:
        """End its processes; calls that run fail. A second call changes nothing."""
        self._pool.close()

    def _reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        answer = self._pool.ask({"op": "reward", **prompt.entry, "turns": list(turns)})
        return number_of(answer, "reward")

    def _prompt(self, split: Split, index: int) -> Prompt:
        answer = self._pool.ask({"op": "prompt", "split": split, "index": index}, slow=True)
        return Prompt(index, _text(answer), {"split": split, "index": index})

    def _size(self, split: Split) -> int:
        if split not in self._sizes:
            size = number_of(self._pool.ask({"op": "size", "split": split}, slow=True), "size")
            if not 0 <= size <= MAX_SIZE:
                raise TaskFailed(f"its number of {split} prompts is {size}; it must be from 0 to {MAX_SIZE}")
            self._sizes[split] = int(size)
        return self._sizes[split]


class MultiTurnSandboxTask(SandboxTask):
    """`MultiTurnTask` over a pool of processes."""

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
        """What the environment says. Raises TaskFailed."""
        answer = self._pool.ask({"op": "respond", **prompt.entry, "turns": list(turns)})
        return None if answer.get("text") is None else Reply(_text(answer))

    def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        """Reward of an episode. Raises TaskFailed."""
        return self._reward(prompt, turns)


class _Pool:
    """Processes that all have loaded the same task; started when they are needed, the last used one first."""

    def __init__(self, spec: TaskSpec, seed: int, folder: Path | None) -> None:
        self._limits = spec.limits
        where = None if folder is None else str(folder.absolute())
        self._readable = [*(spec.limits.read or []), *([] if where is None else [where])]
        self._load = {"op": "load", "spec": spec.model_dump(mode="json"), "seed": seed, "folder": where}
        self._scratch = tempfile.TemporaryDirectory(prefix="echo2-task-", ignore_cleanup_errors=True)
        self._free: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(spec.limits.processes or min(MOST_PROCESSES, os.cpu_count() or 1)):
            self._free.put(None)
        self._lock = threading.Lock()
        self._alive: set[WorkerProcess] = set()
        self._about: dict[str, Any] = {}
        self._closed = False

    @property
    def longest_call_s(self) -> float:
        """Seconds to kill a process, start another one and ask it."""
        return self._limits.timeout_s + self._limits.load_timeout_s + 2 * END_S

    def about(self) -> dict[str, Any]:
        """What the task says of itself."""
        with self._process():
            return self._about

    def ask(self, question: Mapping[str, Any], *, slow: bool = False) -> dict[str, Any]:
        """Have a question answered by a free process. Raises BadInput, TaskFailed."""
        with self._process() as process:
            return process.ask(question, self._limits.load_timeout_s if slow else self._limits.timeout_s)

    def close(self) -> None:
        """Kill all processes and remove their folder. Who waits for an answer gets TaskFailed."""
        with self._lock:
            self._closed, alive = True, list(self._alive)
        for process in alive:
            process.stop()
        while not self._free.empty():
            with suppress(queue.Empty):
                self._forget(self._free.get_nowait())
        # Who waits for a process finds out that there will be none.
        self._free.put(None)
        self._scratch.cleanup()

    @contextmanager
    def _process(self) -> Iterator[WorkerProcess]:
        wait = QUEUE_SHARE * max(self._limits.timeout_s, self._limits.load_timeout_s)
        try:
            process = self._free.get(timeout=wait)
        except queue.Empty:
            raise TaskFailed(f"none of the task's processes was free for {wait:g} s") from None
        try:
            if process is None or not process.alive:
                self._forget(process)
                process = self._start()
            yield process
        finally:
            if process is not None and not process.alive:
                self._forget(process)
                process = None
            self._free.put(process)

    def _start(self) -> WorkerProcess:
        began = time.monotonic()
        with self._lock:
            if self._closed:
                raise TaskFailed("the task was closed")
            process = WorkerProcess(
                Path(self._scratch.name), self._limits.memory_mb << 20,
                network=self._limits.network, readable=self._readable,
            )  # fmt: skip
            self._alive.add(process)
        try:
            self._about = process.ask(self._load, self._limits.load_timeout_s)
        except (BadInput, TaskFailed):
            process.kill()
            self._forget(process)
            raise
        log.debug("task process %d loaded in %.2f s", process.pid, time.monotonic() - began)
        return process

    def _forget(self, process: WorkerProcess | None) -> None:
        if process is None:
            return
        process.kill()
        with self._lock:
            self._alive.discard(process)


def _text(answer: Mapping[str, Any]) -> str:
    text = answer.get("text")
    if not isinstance(text, str):
        raise TaskFailed("its text is not a text")
    if not is_unicode(text):
        raise TaskFailed("its text holds half a surrogate pair, which is no character")
    return text


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
