"""The process that stands over a task's: it waits for its end, bounds what all of it uses together, and leaves nothing
behind.

Invariant: when the keeper ends in order, every process that the task started is dead, also those that left their
session; it never runs code of the task.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CHILD_SUBREAPER = 36
LOOK_S = 0.5
FOLDER_EVERY = 4
"""The folder is looked at less often than the memory."""
MOST_FOLDER_BYTES = 8 << 30
MOST_FILES = 100_000
TOGETHER = 2
"""All processes of a task together may use so many times the memory of one."""
OVER_MEMORY, OVER_FOLDER = 98, 99
"""Exit statuses."""
CLEAR_S = 2.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_WOKEN = (signal.SIGTERM, signal.SIGCHLD)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of memory and of files in `folder`."""

    memory: int
    folder: str | None
    files: int = MOST_FOLDER_BYTES


def prepare(libc: ctypes.CDLL) -> None:
    """Before the fork: orphans become the keeper's, and its signals wait until it looks for them."""
    if sys.platform == "linux":
        libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, _WOKEN)


def release() -> None:
    """In the forked process: signals are as they were."""
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WOKEN)


def keep(child: int, parent: int, bounds: Bounds) -> int:
    """Wait for `child`; end it when `parent` is gone, at SIGTERM, and when it is over its bounds.

    Returns an exit status: 128 + the signal that ended it, or one of ours.
    """
    os.close(0)
    os.close(1)
    looks, most, status = 0, TOGETHER * bounds.memory, None
    while status is None:
        if _wait() == signal.SIGTERM or os.getppid() != parent:
            status = 128 + signal.SIGKILL
        elif (ended := reap(child)) is not None:
            status = ended
        elif used(child, most) > most:
            status = OVER_MEMORY
        elif looks % FOLDER_EVERY == 0 and bounds.folder is not None and too_much(bounds.folder, bounds.files):
            status = OVER_FOLDER
        looks += 1
    clear(child)
    return status


def _wait() -> int | None:
    """A signal that came within LOOK_S."""
    if not hasattr(signal, "sigtimedwait"):
        time.sleep(LOOK_S)
        return None
    found = signal.sigtimedwait(_WOKEN, LOOK_S)
    return None if found is None else found.si_signo


def reap(child: int) -> int | None:
    """Collect what has ended; the exit status of `child` if that is among it."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            found, raw = os.waitpid(-1, os.WNOHANG)
            if not found:
                break
            if found == child:
                status = exit_status(raw)
    return status


def exit_status(raw: int) -> int:
    """128 + the signal that ended a process, or its exit status."""
    return 128 + os.WTERMSIG(raw) if os.WIFSIGNALED(raw) else os.WEXITSTATUS(raw)


def clear(child: int) -> None:
    """Kill whatever is left beneath this process."""
    until = time.monotonic() + CLEAR_S
    while time.monotonic() < until:
        # With its first process a namespace ends as a whole, and the numbers in its /proc mean others out here.
        for process in [child] if _foreign_proc() else beneath(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            # Whose parent died comes to this process, and so does its end.
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.01)


def _foreign_proc() -> bool:
    """Whether /proc shows a namespace that this process is not in: then it shows that of the task, and all of it."""
    return not os.path.exists("/proc/self/stat") and os.path.exists("/proc/1/stat")


def beneath(process: int) -> list[int]:
    """Processes that a process, and those that it started, have started, by this mount of /proc."""
    found, todo = [], [process]
    while todo:
        for child in _children(todo.pop()):
            found.append(child)
            todo.append(child)
    return found


def _children(process: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{task}/children") as file:
                yield from map(int, file.read().split())


def used(child: int, most: int) -> int:
    """Bytes of memory of a task's processes together, exact where that is more than `most`: what they share counts once
    then, and what is a file's doesn't count."""
    if _foreign_proc():
        processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    else:
        processes = [child, *beneath(child)]
    resident = sum(map(_resident, processes))
    return resident if resident <= most else sum(map(_share, processes))


def _resident(process: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _share(process: int) -> int:
    """As `_resident`, less what others have a share in; with it where the process does not let itself be read."""
    for name, wanted in (("smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")), ("status", ("RssAnon:", "RssShmem:"))):
        with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{process}/{name}") as file:
            found = [int(line.split()[1]) << 10 for line in file if line.startswith(wanted)]
            if len(found) == len(wanted):
                return sum(found)
    return _resident(process)


def too_much(folder: str, most: int) -> bool:
    """Whether a folder holds more than so many bytes, too many files, or what can't be counted."""
    size = count = 0
    todo = [folder]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    if size > most or count > MOST_FILES:
                        return True
        except FileNotFoundError:
            continue
        except OSError:
            # A path too long to be followed, or closed to its own owner.
            return True
    return False


def remove(folder: Path) -> None:
    """Remove a folder that a task has filled, however deep: what is beneath its folders is moved up one by one."""
    number, ours = 0, secrets.token_hex(8)
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
        while inner := [entry.path for entry in os.scandir(folder) if _emptied(entry)]:
            for path in inner:
                os.chmod(path, 0o700)
                for entry in list(os.scandir(path)):
                    if _emptied(entry):
                        number += 1
                        os.rename(entry.path, folder / f"{ours}.{number}")
                os.rmdir(path)
        folder.rmdir()


def _emptied(entry: os.DirEntry[str]) -> bool:
    """Remove a file; True for a folder, which is still there."""
    if entry.is_dir(follow_symlinks=False):
        return True
    os.unlink(entry.path)
    return False
