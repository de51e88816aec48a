"""An announcement that nobody takes doesn't leave its connection behind."""

import asyncio
import errno
from collections.abc import Sequence
from typing import Any, cast

import pytest

from app.snapshots.connection import Connection
from app.snapshots.download import Traffic
from app.snapshots.listening import Listener
from app.snapshots.notices import Notices
from app.snapshots.sources import Announced, Source
from app.snapshots.store import SnapshotStore
from app.snapshots.upstream import Wire

RELAY = Source("learner", "http://learner.invalid")


class Socket:
    """The connection on which leaves would follow."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Answering:
    """A wire whose poll gives one announcement as soon as the gate opens."""

    def __init__(self, stream: Socket) -> None:
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self._stream = stream

    async def poll(self, source: Source, after: int, wait_s: float, held: Sequence[int]) -> Announced:
        self.asked.set()
        async with asyncio.timeout(10):
            await self.gate.wait()
        return Announced(b"{}", cast(Connection, self._stream))


class FullDisk:
    """A store that has nothing and can take nothing."""

    versions: tuple[int, ...] = ()

    def latest(self) -> None:
        return None

    def begin(self, document: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


async def nobody(*_: Any) -> None:
    raise AssertionError("nothing is to be told")


def listener(wire: Answering, sources: list[Source]) -> Listener:
    return Listener(
        cast(SnapshotStore, FullDisk()),
        cast(Wire, wire),
        lambda: sources,
        lambda: None,
        notices=Notices(on_lie=nobody, on_stall=None, on_refused=None),
        traffic=Traffic(),
        grace_s=1.0,
        retry_s=0.0,
    )


async def test_a_full_disk_is_raised_and_the_stream_closed() -> None:
    stream = Socket()
    wire = Answering(stream)
    wire.gate.set()
    with pytest.raises(OSError, match="No space"):
        await listener(wire, [RELAY]).announcement()
    assert stream.closed


async def test_an_answer_in_the_moment_of_the_end_is_closed() -> None:
    """The poll is done, but who waits for it is cancelled before he hears of it."""
    stream = Socket()
    wire = Answering(stream)
    waiting = asyncio.create_task(listener(wire, [RELAY]).announcement())
    await asyncio.wait_for(wire.asked.wait(), 10)
    wire.gate.set()
    poll = next(t for t in asyncio.all_tasks() if t not in (waiting, asyncio.current_task()))
    await asyncio.sleep(0)
    assert poll.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stream.closed


async def test_a_poll_is_given_up_when_the_sources_change() -> None:
    wire = Answering(Socket())
    sources = [RELAY]
    waiting = asyncio.create_task(listener(wire, sources).announcement())
    await asyncio.wait_for(wire.asked.wait(), 10)
    sources.append(Source("store"))
    assert await asyncio.wait_for(waiting, 10) is None
    assert asyncio.all_tasks() == {asyncio.current_task()}
