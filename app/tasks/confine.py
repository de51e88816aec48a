"""How a process gives up what a task's code must not have: network, other processes, memory without end.

Invariant: `confine` is called before anything of the task is imported, while the process has one thread. Limits of
resources always hold; namespaces as far as the kernel lets this user make them, and the answer says which.

Linux, from ctypes: Python 3.11 has no `os.unshare`. Constants: <linux/sched.h>, <linux/prctl.h>, <linux/mount.h>.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_NO_NEW_PRIVS, _PDEATHSIG = 38, 1
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_WAYS = (
    (_NEWUSER | _NEWNET | _NEWPID | _NEWIPC | _NEWNS, ["network", "processes"]),
    (_NEWNET | _NEWPID | _NEWIPC, ["network", "processes"]),
    (_NEWUSER | _NEWNET, ["network"]),
    (_NEWNET, ["network"]),
)
MAX_FILE_BYTES = 1 << 30
MAX_OPEN_FILES = 256
WATCH_S = 0.5


def confine(memory_bytes: int, *, network: bool = False) -> list[str]:
    """Go on in a forked process without network and without sight of others, as far as that can be had. `network`:
    keep the network.

    Returns, in the new process only, what it is cut off from: some of `network`, `processes`, `proc`. The old one
    stays as its keeper: it ends when the new one ends, and kills it when its own parent is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    cut = _unshare(libc, keep=_NEWNET if network else 0)
    parent = os.getppid()
    child = os.fork()
    if child:
        os._exit(_keep(child, parent))
    if sys.platform == "linux":
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _end_at_cpu_limit(libc)
    if "processes" in cut and _private_proc(libc):
        cut.append("proc")
    for kind, bound in (
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        hard = resource.getrlimit(kind)[1]
        least = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (least, least))
    return cut


def allow_cpu(seconds: float) -> None:
    """Let this process compute for so long from now; then the kernel ends it, should nobody else have done so."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _unshare(libc: ctypes.CDLL, keep: int) -> list[str]:
    if sys.platform != "linux":
        return []
    for flags, cut in _WAYS:
        if libc.unshare(flags & ~keep) == 0:
            return [word for word in cut if word != "network" or not keep]
    return []


def _end_at_cpu_limit(libc: ctypes.CDLL) -> None:
    """Exit, with the signal's number, where the processor time is used up: the first process of a namespace ignores
    signals that it has no handler for, and one in Python would wait for a loop in C to end."""
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGXCPU, ctypes.cast(libc._exit, ctypes.c_void_p))


def _private_proc(libc: ctypes.CDLL) -> bool:
    """A /proc that shows this namespace's processes only: the environment of others is then out of reach."""
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    return bool(libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0)


def _keep(child: int, parent: int) -> int:
    """Wait for `child`; kill it when `parent` is gone. Returns an exit status: 128 + the signal that ended it."""
    os.close(0)
    os.close(1)
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if os.getppid() != parent:
            os.kill(child, signal.SIGKILL)
        time.sleep(WATCH_S)
