"""What a broadcast costs beside its own time: the learner's training steps, and an agent's memory. On loopback.

Invariant: nothing here needs root. The payload of the memory measurement is all zeros in sparse files, and what the
agent has received is turned into a hole again, so that 10 GB need no disk.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import httpx
import torch
from blake3 import blake3

from app.protocol.base import utcnow
from app.protocol.errors import NotFound
from app.protocol.node import SnapshotUrls
from app.snapshots import Manifest, Puller, Relay, Snapshot, SnapshotStore, Source, new_key, public_hex, sign
from app.snapshots.files import DOCUMENT, PAYLOAD, sync_folder
from app.snapshots.manifest import CHUNK_BYTES, LEAF_BYTES, leaf_bytes_for

JOB, TOKEN = "bench", "bench-token"
MB = 1_000_000
UPLINK = 200e6 / 8
STEP_WIDTH, STEP_ROWS = 1024, 1024
SPAN_S = 8.0
"""How long steps are timed before, while, and after a version is published and sent."""
HOLE_EVERY_S = 0.2
PUNCH_HOLE = 0x02 | 0x01
MEMORY_TIMEOUT_S = 900.0
spawn = multiprocessing.get_context("spawn")


def read_stream(port: int, version: int) -> int:
    """Take a version as a child would, without looking at it; the bytes that came."""
    request = f"GET /snapshots/{version}/stream?from_leaf=0 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    total, buffer = 0, bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(f"{request}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        while count := sock.recv_into(buffer):
            total += count
    return total


def child(port: int, version: int, ready: Pipe) -> None:
    """A process that waits for a word and then reads a version."""
    ready.send("ready")
    ready.recv()
    ready.send(read_stream(port, version))


class Steps:
    """Training steps of a small network, one thread, and how long each took."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(STEP_WIDTH, STEP_WIDTH) for _ in range(4)]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5)
        self._data = torch.randn(STEP_ROWS, STEP_WIDTH)

    def run(self, seconds: float) -> list[float]:
        """Steps for so long."""
        times, end = [], time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            self._model(self._data).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
        return times


def measure_training(size: int = 100 * MB) -> dict[str, Any]:
    """How much longer a step takes while the same process publishes a version and sends it to two children."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    key = new_key()
    with tempfile.TemporaryDirectory(prefix="bench-training-", dir=_memory()) as folder:
        store = SnapshotStore(Path(folder), job_id=JOB, public_key=public_hex(key))
        relay = Relay(store, token=TOKEN, host="127.0.0.1", port=0, uplink_bytes_per_s=UPLINK)
        relay.run_in_thread()
        try:
            with _children(relay.port, 1, 2) as pipes:
                bits = torch.randint(-(2**15), 2**15, (size // 2,), dtype=torch.int16)
                steps = Steps()
                steps.run(1.0)
                before = steps.run(SPAN_S)
                publishing = threading.Thread(target=_publish, args=(store, bits, key, pipes))
                publishing.start()
                during = steps.run(SPAN_S)
                publishing.join(60)
                for pipe in pipes:
                    pipe.poll(60)
                after = steps.run(SPAN_S)
        finally:
            relay.stop_thread()
            torch.set_num_threads(threads)
    quiet = statistics.fmean(before + after)
    return {
        "step_ms": round(1000 * quiet, 2),
        "step_ms_while_publishing": round(1000 * statistics.fmean(during), 2),
        "longer": round(statistics.fmean(during) / quiet - 1, 4),
        "longer_median": round(statistics.median(during) / statistics.median(before + after) - 1, 4),
        "before_against_after": round(statistics.fmean(before) / statistics.fmean(after) - 1, 4),
    }


def _publish(store: SnapshotStore, bits: torch.Tensor, key: Any, pipes: list[Pipe]) -> None:
    store.publish_full({"w": bits.view(torch.bfloat16)}, version=1, key=key)
    for pipe in pipes:
        pipe.send("go")


@contextmanager
def _children(port: int, version: int, count: int) -> Iterator[list[Pipe]]:
    """Processes that read a version when told."""
    pairs = [spawn.Pipe() for _ in range(count)]
    processes = [spawn.Process(target=child, args=(port, version, theirs), daemon=True) for _, theirs in pairs]
    try:
        for process in processes:
            process.start()
        for ours, _ in pairs:
            if not ours.poll(60):
                raise RuntimeError("a child of the training measurement did not start")
            ours.recv()
        yield [ours for ours, _ in pairs]
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def measure_memory(size: int) -> dict[str, Any]:
    """Peak memory of an agent's store, puller and relay while it receives and passes on `size` bytes, above idle."""
    key = new_key()
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as name:
        folder = Path(name)
        sparse_version(folder / "learner", 1, size, key)
        ours, theirs = spawn.Pipe()
        learner, feeds = spawn.Process(target=_serve, args=(folder / "learner", public_hex(key), theirs)), ours
        ours, theirs = spawn.Pipe()
        agent = spawn.Process(target=_agent, args=(folder / "agent", public_hex(key), theirs))
        try:
            learner.start()
            agent.start()
            _word(feeds, MEMORY_TIMEOUT_S)
            relay_port, idle = _word(ours, 120.0)
            began = time.monotonic()
            ours.send(f"http://127.0.0.1:{feeds.recv()}")
            _word(ours, MEMORY_TIMEOUT_S)
            received = read_stream(relay_port, 1)
            peak = _word(ours, MEMORY_TIMEOUT_S)
        finally:
            for process in (learner, agent):
                process.kill()
                process.join(10)
    return {
        "bytes": size,
        "idle_mb": round(idle / MB, 1),
        "peak_mb": round(peak / MB, 1),
        "above_idle_mb": round((peak - idle) / MB, 1),
        "seconds": round(time.monotonic() - began, 1),
        "passed_on": received >= size,
    }


def sparse_version(root: Path, version: int, size: int, key: Any) -> None:
    """A complete version in a store's folder whose payload is a hole."""
    target = root / str(version)
    target.mkdir(parents=True)
    with (target / PAYLOAD).open("wb") as file:
        file.truncate(size)
    leaf_bytes = leaf_bytes_for(size, LEAF_BYTES, CHUNK_BYTES)
    full, rest = divmod(size, leaf_bytes)
    hashes = [blake3(bytes(leaf_bytes)).hexdigest()] * full + ([blake3(bytes(rest)).hexdigest()] if rest else [])
    manifest = Manifest(
        job_id=JOB,
        version=version,
        payload_bytes=size,
        payload_blake3=blake3(max_threads=blake3.AUTO).update_mmap(target / PAYLOAD).hexdigest(),
        leaf_bytes=leaf_bytes,
        leaf_hashes=hashes,
        tensors=[],
        created_at=utcnow(),
    )
    (target / DOCUMENT).write_bytes(sign(manifest, key))
    sync_folder(target)


def _serve(folder: Path, public_key: str, pipe: Pipe) -> None:
    store = SnapshotStore(folder, job_id=JOB, public_key=public_key)
    relay = Relay(store, token=TOKEN, host="127.0.0.1", port=0, uplink_bytes_per_s=None)
    relay.run_in_thread()
    pipe.send("ready")
    pipe.send(relay.port)
    pipe.poll(MEMORY_TIMEOUT_S)


def _agent(folder: Path, public_key: str, pipe: Pipe) -> None:
    asyncio.run(_relay_all(folder, public_key, pipe))


async def _relay_all(folder: Path, public_key: str, pipe: Pipe) -> None:
    store = SnapshotStore(folder, job_id=JOB, public_key=public_key)
    relay = Relay(store, token=TOKEN, host="127.0.0.1", port=0, uplink_bytes_per_s=None)
    await relay.start()
    pipe.send((relay.port, _resident()))
    learner = Source("learner", await asyncio.to_thread(pipe.recv))
    complete = asyncio.Event()

    async def installed(snapshot: Snapshot) -> None:
        complete.set()

    async def lied(source: Source, version: int, detail: str) -> None:
        raise RuntimeError(f"{source.label} lied: {detail}")

    async def no_store(version: int, first: int, count: int) -> SnapshotUrls:
        raise NotFound("there is no object store here")

    async with httpx.AsyncClient() as client:
        puller = Puller(
            store, token=TOKEN, sources=lambda: [learner], target=lambda: None, fetch_urls=no_store,
            on_complete=installed, on_lie=lied, client=client,
        )  # fmt: skip
        pulling = asyncio.create_task(puller.run())
        while (seen := store.changes.count) == 0 or puller.progress is None:
            await store.changes.wait(seen, HOLE_EVERY_S)
        pipe.send("arriving")
        peak = 0
        while not (complete.is_set() and relay.bytes_served >= _payload(folder)):
            if pulling.done():
                pulling.result()
            await asyncio.sleep(HOLE_EVERY_S)
            _punch(folder)
            peak = max(peak, _resident())
        pipe.send(peak)
        await asyncio.to_thread(pipe.poll, MEMORY_TIMEOUT_S)


def _payload(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"*/{PAYLOAD}"))


def _punch(folder: Path) -> None:
    """Turn what was received into holes: it reads the same."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in folder.glob(f"*/{PAYLOAD}"):
        with path.open("r+b") as file:
            size = ctypes.c_long(os.fstat(file.fileno()).st_size)
            libc.fallocate(file.fileno(), PUNCH_HOLE, ctypes.c_long(0), size)


def _resident() -> int:
    """Bytes of anonymous memory of this process: what it holds itself, without files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _word(pipe: Pipe, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise RuntimeError("a process of the memory measurement said nothing in time")
    return pipe.recv()


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
