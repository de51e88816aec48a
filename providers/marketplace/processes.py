"""A machine is a process in a session of its own.

Invariant: a machine is gone only when no process of its session, and none that carries its key in the environment,
is alive; so children that left the process group are found too.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil


def _belongs(process: psutil.Process, sid: int, mark: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if os.getsid(process.pid) == sid:
            return True
        return bool(mark) and process.environ().get("CONTAINER_API_KEY") == mark
    except (psutil.Error, OSError):
        return False


def members(sid: int, mark: str) -> list[psutil.Process]:
    """Live processes of session `sid` or with CONTAINER_API_KEY = `mark`, zombies not counted."""
    return [process for process in psutil.process_iter() if _belongs(process, sid, mark)]


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Signal each; one that has just ended is no error."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def kill_leftover(pid: int, started: float, mark: str) -> int:
    """SIGKILL what a dead marketplace left behind; returns how many processes.

    `started` is the creation time of `pid`: if the number belongs to another process by now, only the mark counts.
    """
    try:
        same = abs(psutil.Process(pid).create_time() - started) < 1.0
    except psutil.Error:
        # The leader has ended; its session number can't be used again while children of the session live.
        same = True
    found = members(pid if same else -1, mark)
    send(found, signal.SIGKILL)
    psutil.wait_procs(found, timeout=5)
    return len(found)


class MachineProcess:
    """`bash -c onstart` in its own session; output goes to `log`."""

    def __init__(self, onstart: str, folder: Path, log: Path, env: Mapping[str, str], mark: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                ["bash", "-c", onstart], cwd=folder, env=dict(env), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True, close_fds=True,
            )  # fmt: skip
        self._mark = mark
        self.pid = self._popen.pid
        try:
            self.started = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            self.started = 0.0

    def exit_code(self) -> int | None:
        """Exit status of the onstart script, None while it runs."""
        return self._popen.poll()

    def alive(self) -> bool:
        """Whether any process of the machine lives."""
        self._popen.poll()
        return bool(members(self.pid, self._mark))

    def terminate(self) -> None:
        """Ask all of them to end."""
        send(members(self.pid, self._mark), signal.SIGTERM)

    def kill(self) -> None:
        """End all of them."""
        send(members(self.pid, self._mark), signal.SIGKILL)
        self._popen.poll()
