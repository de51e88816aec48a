"""How a process gives up what a task's code must not have: network, other processes, memory without end.

Invariant: `confine` is called before anything of the task is imported, while the process has one thread. Limits of
resources always hold; namespaces as far as the kernel lets this user make them, Landlock and seccomp as far as it knows
them, and the answer says which.

Linux, from ctypes: Python 3.11 has no `os.unshare`. Constants: <linux/sched.h>, <linux/prctl.h>, <linux/mount.h>.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Mapping

from app.tasks import keeper, landlock, seccomp

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_NO_NEW_PRIVS, _PDEATHSIG, _DUMPABLE = 38, 1, 4
_CAPABILITY_VERSION_3 = 0x20080522
_MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x4000, 1 << 18, 2, 4
_WAYS = (
    (_NEWUSER | _NEWNET | _NEWPID | _NEWIPC | _NEWNS, ["network", "processes"]),
    (_NEWNET | _NEWPID | _NEWIPC | _NEWNS, ["network", "processes"]),
    (_NEWUSER | _NEWNET, ["network"]),
    (_NEWNET, ["network"]),
)
MAX_FILE_BYTES = 1 << 30
MAX_OPEN_FILES = 256
MAX_TASKS = 1024
"""Processes and threads, where the kernel counts them by namespace (Linux 5.14) and the user isn't root."""
SHM_SHARE = 4
"""/dev/shm holds this part of the memory."""


def confine(
    memory_bytes: int, *, network: bool = False, folder: str | None = None, grants: Mapping[str, int] | None = None
) -> list[str]:
    """Go on in a forked process without network and without sight of others, as far as that can be had. `network`:
    keep the network; `folder`: what it holds is bounded; `grants`: see `landlock`, None: all files.

    Returns, in the new process only, what it is cut off from: some of `network`, `processes`, `proc`, `shm`, `files`,
    `tcp`, `signals`, `calls`. The old one stays as its keeper (`app/tasks/keeper.py`). In a namespace of processes one
    more stands between: the first one there, with which all others end, runs none of the task's code and so can't be
    talked out of dying with the keeper.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    keeper.prepare(libc)
    cut, own_user = _unshare(libc, keep=_NEWNET if network else 0)
    parent = os.getppid()
    child = os.fork()
    if child:
        os._exit(keeper.keep(child, parent, keeper.Bounds(memory_bytes, folder)))
    keeper.release()
    _die_with_parent(libc)
    if "processes" in cut:
        if _private_proc(libc):
            cut += ["proc", "shm"] if _private_shm(libc, memory_bytes // SHM_SHARE) else ["proc"]
        child = os.fork()
        if child:
            os._exit(_lead(libc, child))
        _die_with_parent(libc)
    if sys.platform == "linux":
        libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        _drop_capabilities(libc)
        if grants is not None:
            shm = {"/dev/shm": landlock.OWN} if "shm" in cut else {}
            cut += landlock.restrict(libc, {**grants, **shm}, network=network)
        cut += seccomp.restrict(libc, network=network)
    _end_at_cpu_limit(libc)
    _limit(memory_bytes, count_tasks=own_user)
    return cut


def _limit(memory_bytes: int, *, count_tasks: bool) -> None:
    bounds = [
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ]
    # An older kernel would count everything that this user runs on the machine.
    if count_tasks and tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) >= (5, 14):
        bounds.append((resource.RLIMIT_NPROC, MAX_TASKS))
    for kind, bound in bounds:
        hard = resource.getrlimit(kind)[1]
        least = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (least, least))


def allow_cpu(seconds: float) -> None:
    """Let this process compute for so long from now; then the kernel ends it, should nobody else have done so."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _unshare(libc: ctypes.CDLL, keep: int) -> tuple[list[str], bool]:
    """What was cut, and whether a namespace of users was made."""
    if sys.platform != "linux":
        return [], False
    user, group = os.geteuid(), os.getegid()
    for flags, cut in _WAYS:
        if libc.unshare(flags & ~keep) == 0:
            if flags & _NEWUSER:
                _stay(user, group)
            return [word for word in cut if word != "network" or not keep], bool(flags & _NEWUSER)
    return [], False


def _stay(user: int, group: int) -> None:
    """Be the same user in a new namespace of users: nobody in particular could make no files in its own mounts."""
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _die_with_parent(libc: ctypes.CDLL) -> None:
    if sys.platform == "linux":
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Who made a user namespace may do anything in it: also take the private /proc away and look at what is beneath.

    Raises OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if libc.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "the capabilities of a task's process can't be dropped")


def _end_at_cpu_limit(libc: ctypes.CDLL) -> None:
    """Exit, with the signal's number, where the processor time is used up: a handler in Python would wait for a loop
    in C to end."""
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGXCPU, ctypes.cast(libc._exit, ctypes.c_void_p))


def _private_proc(libc: ctypes.CDLL) -> bool:
    """A /proc that shows this namespace's processes only: the environment of others is then out of reach."""
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    return bool(libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0)


def _private_shm(libc: ctypes.CDLL, size: int) -> bool:
    """A /dev/shm of this namespace's own, of so many bytes."""
    options = f"size={size},nr_inodes=10000,mode=1777".encode()
    return bool(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV, options) == 0)


def _lead(libc: ctypes.CDLL, child: int) -> int:
    """As the first process of a namespace, wait for `child`, and for orphans. Returns an exit status as `_keep`."""
    os.close(0)
    os.close(1)
    if sys.platform == "linux":
        # Nobody of the same user may attach to it.
        libc.prctl(_DUMPABLE, 0, 0, 0, 0)
    while True:
        found, status = os.waitpid(-1, 0)
        if found == child:
            return keeper.exit_status(status)
