"""One process of a sandboxed task, seen from outside.

Invariant: a process that did not answer in time, or answered what it should not have, is dead when the error is
raised; no call waits longer than its timeout. It inherits no descriptor but its two pipes and no variable of ours.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.protocol.errors import BadInput, FieldError, TaskFailed
from app.tasks import keeper

MAX_ANSWER_BYTES = 16 << 20
MAX_WORDS = 2000
"""Characters of what a task says about an error."""
MAX_FIELDS = 20
ENVIRONMENT_KEPT = ("LANG", "LC_ALL", "TZ")
END_S = 5.0
_TOP = str(Path(__file__).parents[2])
_PROGRAM = (
    "import json, sys; told = json.loads(sys.argv.pop()); sys.path.insert(0, told['code']); "
    "from app.tasks.child import main; sys.exit(main(**told))"
)
SAID = {
    keeper.OVER_MEMORY: f"its processes together use more than {keeper.TOGETHER} times limits.memory_mb",
    keeper.OVER_FOLDER: f"it has more than {keeper.MOST_FOLDER_BYTES >> 30} GiB or {keeper.MOST_FILES} files",
}
"""What its keeper ended it for, by exit status."""
_BLOCK = 1 << 16


class WorkerProcess:
    """Started by the constructor. One question at a time; not safe to use from two threads at once."""

    def __init__(self, folder: Path, memory_bytes: int, *, network: bool, readable: Sequence[str] = ()) -> None:
        """It works in a folder of its own in `folder`, and may read `readable` besides what Python needs."""
        self._own = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
        told = {"memory": memory_bytes, "network": network, "code": _TOP, "readable": list(readable)}
        own = str(self._own)
        environment = {name: os.environ[name] for name in ENVIRONMENT_KEPT if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-c", _PROGRAM, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=own,
            env={"PATH": os.defpath, "HOME": own, "TMPDIR": own, "PYTHONHASHSEED": "0", **environment},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        for pipe in (self._in, self._out):
            os.set_blocking(pipe.fileno(), False)
        self._asked = 0
        self._removing = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether it can be asked anything more."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process that was started; it leads its own session."""
        return self._process.pid

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer. Raises BadInput or TaskFailed by the task's own word, TaskFailed for one that is dead now."""
        self._asked += 1
        line = json.dumps({**question, "id": self._asked, "cpu_s": timeout_s}).encode() + b"\n"
        try:
            answer = self._read(line, time.monotonic() + timeout_s, timeout_s)
        except TaskFailed:
            self.kill()
            raise
        if "bad_input" in answer:
            raise BadInput(str(answer["bad_input"])[:MAX_WORDS], errors=_wrong_fields(answer.get("errors")))
        if "failed" in answer:
            raise TaskFailed(str(answer["failed"])[:MAX_WORDS])
        return answer

    def stop(self) -> None:
        """End it and all that it started, and remove its folder; from any thread. Who waits for its answer learns that
        it is dead."""
        # Its keeper kills what no signal of ours would reach, unless the task has stopped it.
        for numbers, wait_s in ((signal.SIGTERM, signal.SIGCONT), keeper.CLEAR_S + 1), ((signal.SIGKILL,), END_S):
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    for number in numbers:
                        (os.killpg if number == signal.SIGKILL else os.kill)(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    # It ends as soon as the kernel lets it go, and nobody waits longer for that.
                    self._process.wait(wait_s)
        with self._removing:
            keeper.remove(self._own)

    def kill(self) -> None:
        """`stop`, and close its pipes; only while nobody asks it. A second call changes nothing."""
        self.stop()
        self._in.close()
        self._out.close()

    def _read(self, line: bytes, deadline: float, timeout_s: float) -> dict[str, Any]:
        raw = self._exchange(line, deadline, timeout_s)
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("id") != self._asked:
            raise TaskFailed("its process answered something that is no answer")
        return answer

    def _exchange(self, line: bytes, deadline: float, timeout_s: float) -> bytes:
        """Write a line, read a line."""
        sent, got = memoryview(line), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._in, selectors.EVENT_WRITE)
            selector.register(self._out, selectors.EVENT_READ)
            while not got.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TaskFailed(f"it took longer than {timeout_s:g} s, and its process was killed")
                for key, _ in selector.select(left):
                    if key.fileobj is self._in:
                        sent = self._write(sent)
                        if not sent:
                            selector.unregister(self._in)
                    else:
                        got += self._more()
                if len(got) > MAX_ANSWER_BYTES:
                    raise TaskFailed(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
        return bytes(got)

    def _write(self, data: memoryview) -> memoryview:
        try:
            return data[os.write(self._in.fileno(), data[:_BLOCK]) :]
        except BrokenPipeError:
            raise TaskFailed(self._death()) from None

    def _more(self) -> bytes:
        block = os.read(self._out.fileno(), _BLOCK)
        if not block:
            raise TaskFailed(self._death())
        return block

    def _death(self) -> str:
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "its process closed its pipes"
        if code in SAID:
            return SAID[code]
        number = -code if code < 0 else code - 128 if code > 128 else 0
        if signal.SIGXCPU in (code, number):
            return "its process used more processor time than it may"
        name = signal.Signals(number).name if number in set(signal.Signals) else f"exit status {code}"
        return f"its process ended by itself ({name})"


def number_of(answer: Mapping[str, Any], field: str) -> float:
    """A finite number of an answer. Raises TaskFailed."""
    value = answer.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise TaskFailed(f"its {field} is not a finite number: {str(value)[:100]}")
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # A whole number beyond what a float can hold.
        return False


def _wrong_fields(given: Any) -> list[FieldError]:
    """What the answer says about single fields, as far as it has the form of that."""
    pairs = given[:MAX_FIELDS] if isinstance(given, list) else []
    return [
        FieldError(str(pair[0])[:MAX_WORDS], str(pair[1])[:MAX_WORDS])
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2
    ]
