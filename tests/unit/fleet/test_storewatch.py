"""An object store that is slow to say whether it can be used."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from app.fleet.storewatch import StoreWatch
from app.storage.stores import FolderStore


class Slow(FolderStore):
    """Answers when it is let."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.answered = threading.Event(), threading.Event()
        self.checks = 0

    def check(self) -> None:
        """After a while."""
        self.checks += 1
        self.gate.wait(20)
        super().check()
        self.answered.set()


async def test_an_answer_that_comes_after_its_round_counts(tmp_path: Path) -> None:
    store, now = Slow(tmp_path), [1000.0]
    watch = StoreWatch(store, lambda: now[0], patience_s=0.01)
    await watch.look()
    store.gate.set()
    assert await asyncio.to_thread(store.answered.wait, 20)
    await asyncio.to_thread(lambda: None)
    watch.patience_s = 20.0
    now[0] += 30.0
    await watch.look()
    assert (watch.away, store.checks) == (None, 1)
    now[0] += 31.0
    await watch.look()
    assert (watch.away, store.checks) == (None, 2)


async def test_no_answer_at_all_is_told_and_asked_for_once(tmp_path: Path) -> None:
    store, now = Slow(tmp_path), [1000.0]
    watch = StoreWatch(store, lambda: now[0], patience_s=0.01)
    try:
        for _ in range(4):
            await watch.look()
            now[0] += 10.0
        assert watch.away is not None
        assert "no answer within 20 s" in watch.away.why
        assert store.checks == 1
    finally:
        store.gate.set()
        await watch.stop()
