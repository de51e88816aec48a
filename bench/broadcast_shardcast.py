"""SHARDCAST on the same network: the package from PyPI, in an environment of its own, as its users would run it.

Invariant: nothing of it is changed. Each host has a copy of the package, since it keeps a scratch file in its own
folder, and its relay asks for news every second instead of every 30.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from bench.broadcast_cases import Case, Result
from bench.wan import Link, Wan

VERSION = "0.3.2"
ENVIRONMENT = Path(__file__).parents[1] / ".venv-shardcast"
HOST = Path(__file__).with_name("broadcast_shardcast_host.py")
INSTALL_TIMEOUT_S, START_TIMEOUT_S = 300.0, 60.0


def prepare() -> str:
    """Make the environment; why it can't be had, or nothing."""
    if shutil.which("wget") is None:
        return "SHARDCAST needs the command wget"
    if next(ENVIRONMENT.glob("lib/python*/site-packages/shardcast"), None) is not None:
        return ""
    try:
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True, timeout=INSTALL_TIMEOUT_S)
        command = [str(ENVIRONMENT / "bin/python"), "-m", "pip", "install", "--quiet", f"shardcast=={VERSION}"]
        subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        return f"shardcast=={VERSION} can't be installed: {error}"
    return ""


def measure(case: Case, folder: Path) -> Result:
    """One broadcast through a relay: host 0 the origin, host 1 the relay, the rest clients."""
    half = case.rtt_ms / 4
    big = Link(case.learner_mbps, case.learner_mbps, half)
    links = [big, big, *(Link(case.node_mbps, case.node_mbps, half) for _ in range(case.n))]
    with ExitStack() as stack:
        wan = stack.enter_context(Wan(links, folder, idle_restart=case.idle_restart))
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        stores = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory, prefix="bench-shardcast-")))
        payload = stores / "payload"
        payload.write_bytes(os.urandom(case.size))
        roles = [
            ["origin", str(payload)],
            ["relay", wan.address(0)],
            *(["client", wan.address(1)] for _ in range(case.n)),
        ]
        hosts = [_start(stack, wan, k, stores / str(k), role) for k, role in enumerate(roles)]
        origin = hosts[0]
        assert origin.stdin is not None
        origin.stdin.write("publish\n")
        origin.stdin.flush()
        _wait([origin], "published", START_TIMEOUT_S)
        published = time.monotonic()
        done = _wait(hosts[2:], "have", case.limit_s * (case.n + 5) * 2 + 60)
        return Result(case, {k + 1: at - published for k, at in done.items()})


def _start(stack: ExitStack, wan: Wan, host: int, folder: Path, role: list[str]) -> subprocess.Popen[str]:
    """Start one and wait until it serves; one after the other, for they share a scratch file in /tmp."""
    package = next(ENVIRONMENT.glob("lib/python*/site-packages/shardcast"))
    shutil.copytree(package, folder / "lib" / "shardcast")
    process = subprocess.Popen(
        [ENVIRONMENT / "bin/python", HOST, role[0], str(folder / "data"), *role[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder / "lib")},
        preexec_fn=lambda: wan.enter(host),
    )
    stack.callback(process.communicate, timeout=START_TIMEOUT_S)
    stack.callback(process.kill)
    _wait([process], "ready", START_TIMEOUT_S)
    return process


def _wait(processes: list[subprocess.Popen[str]], word: str, timeout_s: float) -> dict[int, float]:
    """When each said the word; RuntimeError if one didn't in time."""
    deadline, said = time.monotonic() + timeout_s, dict[int, float]()
    pipes: dict[IO[str], int] = {p.stdout: k for k, p in enumerate(processes) if p.stdout is not None}
    while len(said) < len(processes):
        left = deadline - time.monotonic()
        for pipe in select.select([p for p, k in pipes.items() if k not in said], [], [], max(0.0, left))[0]:
            line = pipe.readline()
            if not line:
                raise RuntimeError(f"a SHARDCAST process ended before it was {word}")
            if line.strip() == word:
                said[pipes[pipe]] = time.monotonic()
        if left <= 0:
            raise RuntimeError(f"SHARDCAST: {len(said)} of {len(processes)} were {word} within {timeout_s:.0f} s")
    return said
