"""Learner processes that start fast: forks of one process that has imported everything.

A line of JSON `{"env": {…}, "log": path}` starts one and is answered with its process id; `{"wait": pid}` with its exit
code, negative for a signal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Zygote:
    """The parent of the learners, and the test's end of its pipes."""

    def __init__(self, cache: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.learner.zygote", str(cache)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[3],
        )  # fmt: skip

    def start(self, env: dict[str, str], log: Path) -> int:
        """Process id of a new learner."""
        return self._ask({"env": env, "log": str(log)})

    def wait(self, pid: int) -> int:
        """Its exit code; the test's own timeout bounds it."""
        return self._ask({"wait": pid})

    def close(self) -> None:
        """End; learners that still run are killed with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _ask(self, question: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _child(order: dict[str, Any]) -> None:
    from app.learner.process import main

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(order["env"])
    code = 70
    try:
        code = main(order["env"]["ECHO2_JOB_ID"])
    finally:
        os._exit(code)


def _serve(cache: Path) -> None:
    import reasoning_gym  # noqa: F401
    import torch

    import app.learner.process  # noqa: F401
    from app.learner.model import load
    from app.learner.tiny import tiny_model

    torch.set_num_threads(1)
    load(tiny_model(cache))
    running: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            running.discard(order["wait"])
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _child(order)
        running.add(pid)
        print(pid, flush=True)
    for pid in running:
        os.kill(pid, 9)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
