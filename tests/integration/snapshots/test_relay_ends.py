"""What a relay leaves behind when it can't start, when it is asked for nonsense, and when it stops."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import httpx
import pytest

from app.snapshots import Relay
from tests.integration.snapshots.helpers import TOKEN, make_store, publish, relay_of, url

DEADLINE_S = 20.0


async def test_a_start_that_is_given_up_leaves_no_server(tmp_path: Path) -> None:
    relay = Relay(make_store(tmp_path), token=TOKEN, host="127.0.0.1", port=0, uplink_bytes_per_s=None)
    starting = asyncio.create_task(relay.start())
    await asyncio.sleep(0)
    assert relay.port, "it is bound, and waits for its server"
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", relay.port)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await relay.stop()


@pytest.mark.parametrize("leaves", ["0", "x", "-1"])
async def test_a_request_out_of_bounds_does_not_keep_the_version(leaves: str, tmp_path: Path) -> None:
    store = make_store(tmp_path, keep=1)
    publish(store, 1)
    async with relay_of(store) as relay, httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        refused = await client.get(f"{url(relay)}/snapshots/1/stream?leaves={leaves}")
        assert refused.status_code == 422
    publish(store, 2)
    assert store.versions == [2]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the process's files in /proc")
async def test_a_stop_ends_connections_whose_child_takes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    sent = publish(store, 1, elements=8_000_000)
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket() as child:
        child.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with relay_of(store) as relay:
            child.connect(("127.0.0.1", relay.port))
            child.sendall(
                f"GET /snapshots/1/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
            )
            served = -1
            async with asyncio.timeout(DEADLINE_S):
                while relay.bytes_served != served or served <= 0:
                    served = relay.bytes_served
                    await asyncio.sleep(0.1)
            assert served < sent.manifest.payload_bytes
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) == before + 1
