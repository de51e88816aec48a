"""What files and ports a task's process may use, by Landlock (Linux 5.13, better from 6.12 on), without root's rights.

Invariant: a process that was restricted can't undo it, nor can what it starts. Where the kernel has no Landlock,
nothing is restricted, and the answer says so.

Constants and structures: <linux/landlock.h>; the numbers of the calls are the same on all architectures.
"""

from __future__ import annotations

import ctypes
import os
import site
import stat
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _READ_DIR, _REFER, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 13, 1 << 14, 1 << 15
_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_NEWEST = max(_ALL)
_TCP, _SCOPES = 0b11, 0b11
_TCP_SINCE, _SCOPES_SINCE = 4, 6
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
USE = _EXECUTE | _READ | _READ_DIR
"""Read files, list folders, run programs."""
OWN = _ALL[_NEWEST]
"""Everything."""
DEVICE = _READ | _WRITE | _TRUNCATE
SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/proc", "/sys", "/opt/conda",
    "/run/systemd/resolve", "/run/resolvconf", "/var/lib/ca-certificates",
    *(f"/etc/{name}" for name in (
        "alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "fonts", "gai.conf", "group",
        "host.conf", "hostname", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf",
        "localtime", "machine-id", "mime.types", "networks", "nsswitch.conf", "os-release", "passwd", "pki/ca-trust",
        "pki/tls/certs", "pki/tls/cert.pem", "pki/tls/openssl.cnf", "protocols", "resolv.conf", "services", "ssl/certs",
        "ssl/cert.pem", "ssl/openssl.cnf", "static", "timezone",
    )),
)  # fmt: skip
"""Of /etc only what programs look up: it also holds keys and passwords, which a service of root could read."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def version(libc: ctypes.CDLL) -> int:
    """Of the kernel's Landlock; 0 without."""
    if sys.platform != "linux":
        return 0
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))))


def restrict(libc: ctypes.CDLL, grants: Mapping[str, int], *, network: bool) -> list[str]:
    """Let this process do what `grants` says of paths, and nothing else with files; new privileges must be ruled out
    already. Returns what it is cut off from now: some of `files`, `tcp`, `signals`. Raises OSError."""
    known = version(libc)
    if not known:
        return []
    tcp = _TCP if known >= _TCP_SINCE and not network else 0
    scopes = _SCOPES if known >= _SCOPES_SINCE else 0
    handled = _ALL[min(known, _NEWEST)]
    attributes = struct.pack("=QQQ", handled, tcp, scopes)
    rules = _checked(libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)))
    try:
        for path, rights in grants.items():
            _allow(libc, rules, path, rights & handled)
        _checked(libc.syscall(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0)))
    finally:
        os.close(rules)
    return ["files", *(["tcp"] if tcp else []), *(["signals"] if scopes else [])]


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        # What isn't there needs no leave.
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, opened)
        _checked(libc.syscall(_ADD, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)))
    finally:
        os.close(opened)


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return answer


def grants(own: str, code: str, readable: Iterable[str]) -> dict[str, int]:
    """What a task needs: its own folder, Python and what is installed for it, the system's libraries, our code in
    `code`/app, and `readable` besides."""
    found = dict.fromkeys((*SYSTEM, *python_folders(), f"{code}/app", f"{code}/providers", *readable), USE)
    found |= dict.fromkeys(DEVICES, DEVICE)
    return {**found, own: OWN}


def python_folders() -> list[str]:
    """Where this interpreter and its packages are, those included that are installed in place."""
    found = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *site.getsitepackages()}
    found.add(str(Path(sys.executable).resolve().parent))
    found |= {path for path in sys.path[1:] if path.startswith("/")}
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):
            places = [str(place) for place in getattr(module, "MAPPING", {}).values()]
            # A module that is one file stands there without its suffix.
            found |= {*places, *(f"{place}.py" for place in places)}
    return sorted(found - {"/"})
