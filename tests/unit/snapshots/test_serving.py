"""A child that takes nothing holds neither a version nor a connection."""

import asyncio
from pathlib import Path
from typing import cast

import pytest
from starlette.types import Message

from app.snapshots.pacer import Pacer, Shares
from app.snapshots.serving import Outlet, Stream
from tests.integration.snapshots.helpers import make_store, publish

CHILD = ("127.0.0.1", 40_000)


class Transport:
    """A connection that knows how it was ended."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.closed = False

    def get_extra_info(self, name: str) -> None:
        return None

    def close(self) -> None:
        """Does nothing yet while the child takes nothing: what was sent waits in the buffer."""
        self.closed = True

    def abort(self) -> None:
        self.gone.set()


async def serve(root: Path, stuck_at: str) -> tuple[Transport, list[Message], bool]:
    """One stream to a child that takes nothing from a message of the kind `stuck_at` on."""
    store = make_store(root, keep=1)
    publish(store, 1)
    transport, sent = Transport(), list[Message]()
    outlet = Outlet(store.changes, Pacer(None), Shares(None), send_timeout_s=0.05)
    outlet.connections[CHILD] = cast(asyncio.Transport, transport)

    async def receive() -> Message:
        await transport.gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        kind = message["type"].rpartition(".")[2]
        if kind == "body":
            kind = "leaf" if message["more_body"] else "end"
        if kind == stuck_at:
            await asyncio.wait_for(transport.gone.wait(), 10)
        sent.append(message)

    reader = store.open(1)
    assert reader is not None
    async with asyncio.timeout(10):
        await Stream(outlet, reader, 0)({"type": "http", "client": CHILD}, receive, send)
    publish(store, 2)
    return transport, sent, store.get(1) is None


@pytest.mark.parametrize("stuck_at", ["start", "leaf", "end"])
async def test_a_child_that_takes_nothing_is_cut_off(stuck_at: str, tmp_path: Path) -> None:
    transport, _, removed = await serve(tmp_path, stuck_at)
    assert transport.gone.is_set()
    assert removed


async def test_a_child_that_takes_all_keeps_its_connection(tmp_path: Path) -> None:
    transport, sent, removed = await serve(tmp_path, "nowhere")
    assert not transport.gone.is_set()
    assert not transport.closed
    assert removed
    assert [m.get("more_body") for m in sent][-2:] == [True, False]
