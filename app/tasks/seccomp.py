"""Calls of the kernel that a task has no use for, refused by a filter (seccomp), without root's rights.

Invariant: a process that was restricted can't undo it, nor can what it starts. On processors whose numbers are not
here, or without seccomp, nothing is restricted, and the answer says so.

Structures: <linux/filter.h>, <linux/seccomp.h>, <linux/audit.h>; numbers: <asm/unistd.h>.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterator

_SET_SECCOMP, _FILTER = 22, 2
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
_X32 = 0x40000000
_NAMESPACES = 0x7E020000
"""The flags of `clone` that make new ones."""
_INTERNET = (2, 10, 16)
"""IPv4, IPv6, and netlink, by which addresses are looked up."""
_UNIX = 1
_REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "syslog": (103, 116),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
}  # fmt: skip
_ABSENT = {
    "clone3": (435, 435), "io_uring_setup": (425, 425), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
}  # fmt: skip
"""As if the kernel had none of them. For the first, programs then take `clone`, whose flags can be looked at; the
second goes past this filter; the others hold memory that belongs to no process."""
_CLONE, _SOCKET = (56, 220), (41, 198)


def restrict(libc: ctypes.CDLL, *, network: bool) -> list[str]:
    """Refuse those calls to this process from now on, and without `network` all sockets but pairs; new privileges must
    be ruled out already. Returns `calls` if that could be had."""
    machine = _MACHINES.get(os.uname().machine) if sys.platform == "linux" else None
    if machine is None or struct.calcsize("P") != 8:
        return []
    code = b"".join(_program(*machine, network=network))
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(kept))
    return ["calls"] if libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) == 0 else []


def _program(column: int, arch: int, *, network: bool) -> Iterator[bytes]:
    yield _line(_LOAD, _ARCH)
    yield from _unless(_EQUAL, arch, errno.EPERM)
    yield _line(_LOAD, _NUMBER)
    yield from _when(_AT_LEAST, _X32, errno.EPERM)
    for refused, answer in ((_REFUSED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for numbers in refused.values():
            yield from _when(_EQUAL, numbers[column], answer)
    # Other calls than these two skip what follows for each: a load, and what is asked of the argument.
    yield _line(_EQUAL, _CLONE[column], 0, 4)
    yield _line(_LOAD, _ARGUMENT)
    yield from _when(_ANY_BIT, _NAMESPACES, errno.EPERM)
    yield _line(_RETURN, _ALLOW)
    families = (_UNIX, *_INTERNET) if network else ()
    yield _line(_EQUAL, _SOCKET[column], 0, 2 + len(families))
    yield _line(_LOAD, _ARGUMENT)
    for left, family in zip(range(len(families), 0, -1), families, strict=True):
        yield _line(_EQUAL, family, left, 0)
    yield _line(_RETURN, _ERRNO | errno.EACCES)
    yield _line(_RETURN, _ALLOW)


def _when(test: int, value: int, answer: int) -> Iterator[bytes]:
    yield _line(test, value, 0, 1)
    yield _line(_RETURN, _ERRNO | answer)


def _unless(test: int, value: int, answer: int) -> Iterator[bytes]:
    yield _line(test, value, 1, 0)
    yield _line(_RETURN, _ERRNO | answer)


def _line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; how many to skip where its test holds, or doesn't."""
    return struct.pack("=HBBI", code, then, otherwise, value)
