"""The processes of the broadcast benchmark: a learner and nodes, made of the project's own store, relay and puller.

Each is forked from the benchmark, which has the libraries loaded already, and moves into its host's network. It tells
what happens as JSON lines in a pipe, with the time of the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.protocol.errors import NotFound
from app.protocol.node import SnapshotUrls
from app.snapshots import Puller, Reader, Relay, Snapshot, SnapshotStore, Source, public_hex
from bench.wan import use_congestion_control

JOB, TOKEN, PORT = "bench", "bench-token", 7000
Event = dict[str, Any]
Tell = Callable[..., None]


@dataclass(frozen=True)
class Role:
    """What a forked process needs to know. `lies`: leaves that it falsifies for its children."""

    host: int
    folder: Path
    key: Ed25519PrivateKey
    uplink_mbps: float | None
    sources: Sequence[Source] = ()
    lies: range | None = None
    congestion: str = "cubic"


@dataclass
class Process:
    """A forked process and the pipes to it."""

    host: int
    pid: int
    events_fd: int
    commands_fd: int
    rest: bytes = b""
    alive: bool = field(default=True)

    def kill(self) -> None:
        """End it at once, without a goodbye."""
        if self.alive:
            self.alive = False
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self.commands_fd)

    def command(self, **words: Any) -> None:
        """Tell it what to do."""
        os.write(self.commands_fd, json.dumps(words).encode() + b"\n")


def fork(role: Role, enter: Callable[[int], None], main: Callable[[Role, int, Tell], None]) -> Process:
    """Start `main(role, commands, tell)` in a process of its own, inside the role's host."""
    events_read, events_write = os.pipe()
    commands_read, commands_write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(events_write)
        os.close(commands_read)
        os.set_blocking(events_read, False)
        return Process(role.host, pid, events_read, commands_write)
    status = 1
    try:
        os.close(events_read)
        os.close(commands_write)

        def tell(event: str, **more: Any) -> None:
            line = {"host": role.host, "event": event, "at": time.monotonic(), **more}
            os.write(events_write, json.dumps(line).encode() + b"\n")

        enter(role.host)
        _hurry()
        main(role, commands_read, tell)
        status = 0
    except BaseException:
        # os._exit below would swallow whatever it is without a word.
        traceback.print_exc()
        sys.stderr.flush()
        raise
    finally:
        os._exit(status)


def _hurry() -> None:
    """Other work on this machine is none of the lab's: its hosts go before it, as if each had a processor."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def events(processes: Sequence[Process], timeout_s: float) -> list[Event]:
    """What the processes have told since; waits up to `timeout_s` for the first line."""
    open_pipes = {p.events_fd: p for p in processes if p.alive}
    found: list[Event] = []
    for fd in select.select(list(open_pipes), [], [], timeout_s)[0]:
        process = open_pipes[fd]
        data = os.read(fd, 65536)
        if not data:
            raise RuntimeError(f"the process of host {process.host} ended; what it says is above")
        *lines, process.rest = (process.rest + data).split(b"\n")
        found += [json.loads(line) for line in lines]
    return found


def learner(role: Role, commands: int, tell: Tell) -> None:
    """Publishes random weights when told {"version", "bytes"}."""
    torch.set_num_threads(1)
    store = _store(role)
    relay = Relay(store, token=TOKEN, host="0.0.0.0", port=PORT, uplink_bytes_per_s=_bytes_per_s(role.uplink_mbps))
    relay.run_in_thread()
    use_congestion_control(role.congestion)
    tell("ready")
    with os.fdopen(commands) as lines:
        for line in lines:
            order = json.loads(line)
            bits = torch.randint(-(2**15), 2**15, (order["bytes"] // 2,), dtype=torch.int16)
            store.publish_full({"w": bits.view(torch.bfloat16)}, version=order["version"], key=role.key)
            tell("published", version=order["version"])


def node(role: Role, commands: int, tell: Tell) -> None:
    """Pulls for ever and relays."""
    asyncio.run(_node(role, tell))


async def _node(role: Role, tell: Tell) -> None:
    store = _store(role)
    relay = Relay(store, token=TOKEN, host="0.0.0.0", port=PORT, uplink_bytes_per_s=_bytes_per_s(role.uplink_mbps))
    await relay.start()
    use_congestion_control(role.congestion)

    async def complete(snapshot: Snapshot) -> None:
        tell("have", version=snapshot.version, cpu=time.process_time(), bytes_from=puller.bytes_from)

    async def lied(source: Source, version: int, detail: str) -> None:
        tell("lie", source=source.label, version=version, detail=detail)

    async def stalled(source: Source, version: int, detail: str) -> None:
        tell("stall", source=source.label, version=version, detail=detail)

    async def no_store(version: int, first: int, count: int) -> SnapshotUrls:
        raise NotFound("there is no object store in this lab")

    async with httpx.AsyncClient(limits=httpx.Limits(keepalive_expiry=600)) as client:
        puller = Puller(
            store,
            token=TOKEN,
            sources=lambda: list(role.sources),
            target=lambda: None,
            fetch_urls=no_store,
            on_complete=complete,
            on_lie=lied,
            on_stall=stalled,
            client=client,
        )
        tell("ready")
        await puller.run()


class _LyingReader(Reader):
    """Reads what it has, but for one bit of some leaves."""

    lies = range(0)

    def read(self, n: int) -> bytes:
        data = super().read(n)
        return bytes([data[0] ^ 1]) + data[1:] if n in self.lies else data


class _LyingStore(SnapshotStore):
    lies = range(0)

    def open(self, version: int) -> Reader | None:
        reader = super().open(version)
        if reader is not None:
            liar = _LyingReader.__new__(_LyingReader)
            liar.__dict__.update(reader.__dict__)
            liar.lies = self.lies
            return liar
        return None


def _store(role: Role) -> SnapshotStore:
    kind = SnapshotStore if role.lies is None else _LyingStore
    store = kind(role.folder, job_id=JOB, public_key=public_hex(role.key), keep=1)
    if isinstance(store, _LyingStore) and role.lies is not None:
        store.lies = role.lies
    return store


def _bytes_per_s(mbps: float | None) -> float | None:
    return None if mbps is None else mbps * 1e6 / 8


__all__ = ["Event", "Process", "Role", "events", "fork", "learner", "node"]
