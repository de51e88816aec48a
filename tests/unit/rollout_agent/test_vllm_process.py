"""The engine's process: its log stays short, whoever writes to it."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from app.rollout_agent.engines.vllm_process import EngineProcess

TALKS = """
import sys
for line in sys.stdin:
    print(line.strip() * 1000, flush=True)
"""


async def test_a_long_log_begins_anew_and_goes_on(tmp_path: Path):
    log = tmp_path / "engine.log"
    log.write_text("of the one before")
    process = await EngineProcess.start([sys.executable, "-c", TALKS], {}, log)
    try:
        await say(process, b"a\n")
        await grown(log, 1001)
        process.trim_log(2000)
        assert log.stat().st_size == 1001, "not long yet"
        process.trim_log(1000)
        await say(process, b"b\n")
        await grown(log, 1001)
        assert log.read_text() == "b" * 1000 + "\n", "no hole where the old lines were"
        assert process.tail() == "b" * 1000
        assert log.with_suffix(".log.1").read_text() == "of the one before"
    finally:
        await process.stop(0.0)


async def say(process: EngineProcess, text: bytes) -> None:
    assert process._process.stdin is not None
    process._process.stdin.write(text)
    await process._process.stdin.drain()


async def grown(path: Path, size: int) -> None:
    await asyncio.to_thread(wait_for, path, size)


def wait_for(path: Path, size: int) -> None:
    deadline = time.monotonic() + 20
    while path.stat().st_size < size and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.stat().st_size == size
