"""What is large is never whole in the service's memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.control.rig import World

BLOCK = 256 << 10


async def test_an_upload_is_not_kept_in_memory(control: World) -> None:
    store, blocks = control.svc.core.objects, 48
    put = store.presign_put("jobs/j/large", 600, blocks * BLOCK)

    async def body() -> AsyncIterator[bytes]:
        for n in range(blocks):
            yield bytes([n]) * BLOCK

    tracemalloc.start()
    try:
        answer = await control.http.put(put.url, content=body())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status_code == 200
    assert store.get("jobs/j/large") == b"".join(bytes([n]) * BLOCK for n in range(blocks))
    assert peak < blocks * BLOCK / 2


async def test_more_than_an_url_allows_leaves_nothing_behind(control: World) -> None:
    store = control.svc.core.objects
    put = store.presign_put("jobs/j/large", 600, BLOCK)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * BLOCK

    assert (await control.http.put(put.url, content=body())).status_code == 413
    assert store.head("jobs/j/large") is None


async def test_of_a_learner_s_log_only_the_end_is_read(control: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = control.supervisor.workdir("job_1")
    folder.mkdir(parents=True)
    assert control.supervisor.log_tail("job_1") == ""
    log = folder / "learner.log"
    log.write_text("one\ntwo\n")
    assert control.supervisor.log_tail("job_1") == "one | two"
    with log.open("r+b") as file:
        file.truncate(8 << 30)
        file.seek(0, 2)
        file.write(b"\nError: the disk is full\n")
    monkeypatch.setattr(Path, "read_text", None)
    assert control.supervisor.log_tail("job_1", lines=1) == "Error: the disk is full"
