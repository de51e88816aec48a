"""A wide-area network on one Linux machine: hosts in network namespaces, joined by the user-space router `wan.c`.

Needs root, /dev/net/tun, iproute2 and a C compiler, and says which of them is missing. Invariant: what was set up is
removed when the `with` block is left, also by an exception; what a killed run left behind goes with the next one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "e2wan"
CLONE_NEWNET = 0x40000000
COMMAND_TIMEOUT_S = 20.0
SUBNET = "10.99.0"
MIN_SEGMENTS = 22


@dataclass(frozen=True, slots=True)
class Link:
    """A host's connection: Mbit/s of IP packets each way, its half of the one-way delay, and the queue before it."""

    up_mbps: float
    down_mbps: float
    delay_ms: float
    queue_ms: float = 50.0


def missing() -> str:
    """Why there can be no lab on this machine; empty when there can."""
    if os.geteuid() != 0:
        return "needs root (network namespaces); run it as root"
    absent = [tool for tool in ("ip", "cc") if shutil.which(tool) is None]
    if absent:
        return f"needs the commands {' and '.join(absent)} (packages iproute2, gcc)"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun (modprobe tun; in a container: --device /dev/net/tun --cap-add NET_ADMIN,SYS_ADMIN)"
    return ""


class Wan:
    """Hosts 0, 1, … with addresses `address(k)`. Use as a context manager; `enter(k)` moves a process into host k."""

    def __init__(self, links: list[Link], folder: Path, *, idle_restart: bool) -> None:
        self._links = links
        self._folder = folder
        self._idle_restart = idle_restart
        self._names = [f"{PREFIX}{os.getpid()}-{k}" for k in range(len(links))]
        self._router: subprocess.Popen[str] | None = None

    @staticmethod
    def address(host: int) -> str:
        """Where the other hosts reach it."""
        return f"{SUBNET}.{host + 1}"

    def rate(self, host: int, up_mbps: float, down_mbps: float) -> None:
        """Change a host's link from now on."""
        self._tell(f"rate {host} {up_mbps} {down_mbps}")

    def cut(self, host: int, off: bool) -> None:
        """Lose all packets of a host from now on, silently; or let them through again."""
        self._tell(f"cut {host} {int(off)}")

    def enter(self, host: int) -> None:
        """Move the calling process (it must have one thread) into the host's network."""
        namespace = os.open(f"/run/netns/{self._names[host]}", os.O_RDONLY | os.O_CLOEXEC)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter {self._names[host]}")
        os.close(namespace)
        # What one connection learnt of the path must not help the next case.
        _set_ipv4("tcp_no_metrics_save", "1")
        # Large segments, as a fast network card would be given them: all hosts and the router share this machine.
        _set_ipv4("tcp_min_tso_segs", str(MIN_SEGMENTS))
        _set_ipv4("tcp_slow_start_after_idle", str(int(self._idle_restart)))

    def __enter__(self) -> Self:
        _sweep()
        try:
            self._build()
        except BaseException:
            # Interrupted half-way, namespaces would outlive the process: __exit__ does not run if this raises.
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _build(self) -> None:
        program = self._folder / "wan"
        if not program.exists():
            _run("cc", "-O2", "-o", str(program), str(Path(__file__).with_name("wan.c")))
        _batch("".join(f"netns add {name}\n" for name in self._names))
        hosts = [
            f"{name}:{link.up_mbps}:{link.down_mbps}:{link.delay_ms}:{link.queue_ms}"
            for name, link in zip(self._names, self._links, strict=True)
        ]
        self._router = subprocess.Popen([program, *hosts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._router.stdout is not None
        if self._router.stdout.readline() != "up\n":
            raise RuntimeError("the router of the lab did not start; what it says is above")
        for k, name in enumerate(self._names):
            # Large segments would make a slow link bursty; on a fast one they save the router's time.
            segment = 40000 if self._links[k].up_mbps <= 300 else 65536
            _batch(
                f"-n {name}",
                f"link set lo up\nlink set wan0 gso_max_size {segment} txqueuelen 2000\n"
                f"addr add {self.address(k)}/24 dev wan0\nlink set wan0 up\n",
            )

    def _remove(self) -> None:
        if self._router is not None:
            self._router.kill()
            self._router.communicate(timeout=COMMAND_TIMEOUT_S)
        for name in self._names:
            if Path(f"/run/netns/{name}").exists():
                _run("ip", "netns", "del", name)

    def _tell(self, line: str) -> None:
        assert self._router is not None
        assert self._router.stdin is not None
        self._router.stdin.write(line + "\n")
        self._router.stdin.flush()


def use_congestion_control(name: str) -> None:
    """Set it for the connections that this process's listening sockets will accept."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:  # the one that listed the folder
            continue
        if is_socket:
            with socket.socket(fileno=os.dup(fd)) as found:
                if found.family == socket.AF_INET and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def _set_ipv4(key: str, value: str) -> None:
    Path(f"/proc/sys/net/ipv4/{key}").write_text(value)


def _sweep() -> None:
    """Remove the namespaces of runs that were killed."""
    for path in Path("/run/netns").glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{owner}").exists():
            _run("ip", "netns", "del", path.name)


def _batch(*parts: str) -> None:
    *options, lines = parts
    words = [word for option in options for word in option.split()]
    _run("ip", *words, "-batch", "-", given=lines)


def _run(*command: str, given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
