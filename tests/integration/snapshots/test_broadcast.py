"""Snapshots go down a chain over real HTTP: every node gets the learner's bits, and peers carry the load."""

import asyncio
import statistics
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.protocol.errors import BadInput
from app.snapshots import Incoming, Relay, Snapshot, SnapshotStore, Source, public_hex
from app.snapshots.frames import KEEP_ALIVE, LeafParser
from tests.integration.snapshots.helpers import (
    KEY,
    LEAF,
    TOKEN,
    Node,
    leaf,
    make_store,
    publish,
    relay_of,
    running,
    url,
)

AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as made:
        yield made


async def test_a_chain_gets_bit_exact_copies_and_peers_carry_two_thirds(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    learner = make_store(tmp_path / "learner")
    async with AsyncExitStack() as stack:
        head = await stack.enter_async_context(relay_of(learner))
        relays, nodes, above = [head], [], Source("learner", url(head))
        for name in "ABC":
            node = Node(tmp_path / name, [above], client)
            relays.append(await stack.enter_async_context(relay_of(node.store)))
            nodes.append(node)
            above = Source("peer", url(relays[-1]), name)
        await stack.enter_async_context(running(*nodes))
        for version in range(3):
            sent = publish(learner, version)
            for node in nodes:
                assert (await node.has(version)).payload_path.read_bytes() == sent.payload_path.read_bytes()
        total = 3 * sent.manifest.payload_bytes
        assert [node.puller.bytes_from for node in nodes] == [{"learner": total}, {"peer": total}, {"peer": total}]
        assert [relay.bytes_served for relay in relays] == [total, total, total, 0]
        assert all(node.installed == [0, 1, 2] for node in nodes)


async def test_a_node_passes_leaves_on_before_it_has_all(tmp_path: Path, client: httpx.AsyncClient) -> None:
    """The learner's place is taken by a download that the test feeds leaf by leaf."""
    sent = publish(make_store(tmp_path / "origin"), 1)
    feed = make_store(tmp_path / "feed")
    incoming = feed.begin(sent.document)
    async with AsyncExitStack() as stack:
        top = await stack.enter_async_context(relay_of(feed))
        a = Node(tmp_path / "A", [Source("learner", url(top))], client)
        middle = await stack.enter_async_context(relay_of(a.store))
        b = Node(tmp_path / "B", [Source("peer", url(middle), "A")], client)
        await stack.enter_async_context(running(a, b))
        for n in range(sent.manifest.leaves - 1):
            incoming.write_leaf(n, leaf(sent, n))
            await b.until(partial(lambda have: b.leaves(1) == have, n + 1))
            assert a.leaves(1) == n + 1
        assert a.store.latest() is None
        progress = b.puller.progress
        assert progress is not None
        assert (progress.bytes_have, progress.source) == ((sent.manifest.leaves - 1) * LEAF, "peer")
        incoming.write_leaf(sent.manifest.leaves - 1, leaf(sent, sent.manifest.leaves - 1))
        assert (await b.has(1)).payload_path.read_bytes() == sent.payload_path.read_bytes()


async def test_a_joiner_in_mid_publish_gets_the_newest_version(tmp_path: Path, client: httpx.AsyncClient) -> None:
    origin = make_store(tmp_path / "origin")
    old, new = publish(origin, 1), publish(origin, 2)
    feed = make_store(tmp_path / "feed")
    first = feed.begin(old.document)
    for n in range(old.manifest.leaves):
        first.write_leaf(n, leaf(old, n))
    first.complete()
    second = feed.begin(new.document)
    second.write_leaf(0, leaf(new, 0))
    async with relay_of(feed) as relay:
        joiner = Node(tmp_path / "J", [Source("peer", url(relay), "A")], client)
        async with running(joiner):
            await joiner.until(lambda: joiner.leaves(2) == 1)
            for n in range(1, new.manifest.leaves):
                second.write_leaf(n, leaf(new, n))
            await joiner.has(2)
        assert joiner.installed == [2]


async def test_a_version_that_comes_in_the_middle_of_a_look_for_the_newest_is_handed_out_once(
    tmp_path: Path, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To put a version in force twice costs an engine its caches, and the node a pause."""
    installed, may_install, may_return = asyncio.Event(), asyncio.Event(), threading.Event()
    handed: list[int] = []
    complete = Incoming.complete

    def slow(incoming: Incoming) -> Snapshot:
        snapshot = complete(incoming)
        assert snapshot.version != 2 or may_return.wait(20)
        return snapshot

    async def install(snapshot: Snapshot) -> None:
        handed.append(snapshot.version)
        installed.set()
        await may_install.wait()
        node.store.changes.notify()

    monkeypatch.setattr(Incoming, "complete", slow)
    learner = make_store(tmp_path / "learner")
    async with relay_of(learner) as relay:
        node = Node(tmp_path / "n", [Source("learner", url(relay))], client, on_complete=install)
        async with running(node):
            try:
                publish(learner, 0)
                await asyncio.wait_for(installed.wait(), 20)
                for version in (1, 2):
                    publish(learner, version)
                    await node.until(lambda version=version: node.store.get(version) is not None)  # type: ignore[misc]
                may_install.set()
                await node.until(lambda: handed == [0, 2])
            finally:
                may_return.set()
            publish(learner, 3)
            await node.until(lambda: handed[-1] == 3)
    assert handed == [0, 2, 3]


async def test_nobody_without_the_jobs_token_gets_anything(tmp_path: Path, client: httpx.AsyncClient) -> None:
    store = make_store(tmp_path / "s")
    publish(store, 1)
    async with relay_of(store) as relay:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            for path in ("/snapshots/next?after=0", "/snapshots/1/stream", "/snapshots/9/stream"):
                answer = await client.get(url(relay) + path, headers=headers)
                assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        assert relay.bytes_served == 0
    with pytest.raises(BadInput):
        Relay(store, token="", host="127.0.0.1", port=0, uplink_bytes_per_s=None)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/snapshots/next?after=99999999999", 422),
        ("/snapshots/next?after=-2", 422),
        ("/snapshots/next?after=1&wait_s=31", 422),
        ("/snapshots/next?after=1&wait_s=nan", 422),
        (f"/snapshots/{'9' * 5000}/stream", 422),
        ("/snapshots/1/stream?from_leaf=-1", 422),
        ("/snapshots/1/stream?leaves=0", 422),
        ("/snapshots/7/stream", 404),
        ("/snapshots/next?after=1&wait_s=0.01", 204),
    ],
)
async def test_requests_are_bounded(path: str, status: int, tmp_path: Path, client: httpx.AsyncClient) -> None:
    store = make_store(tmp_path / "s")
    publish(store, 1)
    async with relay_of(store) as relay:
        assert (await client.get(url(relay) + path, headers=AUTH)).status_code == status


async def test_a_starved_relay_says_that_it_is_alive(tmp_path: Path, client: httpx.AsyncClient) -> None:
    sent = publish(make_store(tmp_path / "origin"), 1)
    feed = make_store(tmp_path / "feed")
    incoming = feed.begin(sent.document)
    incoming.write_leaf(0, leaf(sent, 0))
    async with (
        relay_of(feed) as relay,
        client.stream("GET", url(relay) + "/snapshots/1/stream?from_leaf=0", headers=AUTH, timeout=5) as answer,
    ):
        data = answer.aiter_raw()
        assert list(LeafParser(sent.manifest, 0, framed=True).feed(await anext(data))) == [(0, leaf(sent, 0))]
        assert await anext(data) == KEEP_ALIVE
        incoming.close()
        with pytest.raises(httpx.RemoteProtocolError):  # cut off: no leaf comes, and it can't be taken for the whole
            await anext(data)


async def test_a_few_leaves_can_be_asked_for(tmp_path: Path, client: httpx.AsyncClient) -> None:
    store = make_store(tmp_path / "s")
    sent = publish(store, 1)
    async with relay_of(store) as relay:
        answer = await client.get(url(relay) + "/snapshots/1/stream?from_leaf=3&leaves=2", headers=AUTH)
    got = list(LeafParser(sent.manifest, 3, framed=True).feed(answer.content))
    assert got == [(3, leaf(sent, 3)), (4, leaf(sent, 4))]
    assert relay.bytes_served == 2 * LEAF


async def test_sending_is_paced_over_all_streams(tmp_path: Path, client: httpx.AsyncClient) -> None:
    """Large enough for the kernel's pacing, which lets the first ten segments (64 KiB each on loopback) pass."""
    store = SnapshotStore(tmp_path / "s", job_id="j", public_key=public_hex(KEY))
    sent = publish(store, 1, elements=2_000_000)
    size = sent.manifest.payload_bytes
    async with relay_of(store, uplink=2 * size) as relay:
        started = time.monotonic()
        address = url(relay) + "/snapshots/1/stream"
        answers = await asyncio.gather(*(client.get(address, headers=AUTH) for _ in range(2)))
        took = time.monotonic() - started
    assert all(len(answer.content) > size for answer in answers)
    assert took >= (2 * size - 20 * 65536) / (2 * size)
    assert relay.bytes_served == 2 * size


async def test_small_streams_are_not_held_back_for_acknowledgements(tmp_path: Path, client: httpx.AsyncClient) -> None:
    """With Nagle's algorithm on, each would wait about 40 ms for the other side's delayed acknowledgement."""
    store = make_store(tmp_path / "s")
    publish(store, 1)
    took = []
    async with relay_of(store) as relay:
        for _ in range(15):
            started = time.monotonic()
            await client.get(url(relay) + "/snapshots/1/stream", headers=AUTH)
            took.append(time.monotonic() - started)
    assert statistics.median(took) < 0.03


async def test_stopping_does_not_wait_for_those_who_wait_or_take_nothing(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    store = make_store(tmp_path / "s")
    publish(store, 1, elements=8_000_000)
    relay = Relay(store, token=TOKEN, host="127.0.0.1", port=0, uplink_bytes_per_s=None)
    await relay.start()
    waiting = asyncio.create_task(
        client.get(url(relay) + "/snapshots/next?after=1&wait_s=30", headers=AUTH, timeout=30)
    )
    async with client.stream("GET", url(relay) + "/snapshots/1/stream", headers=AUTH) as unread:
        assert unread.status_code == 200
        await asyncio.wait_for(relay.stop(), 5)
        assert (await waiting).status_code == 204


async def test_a_relay_in_a_thread_announces_what_another_thread_publishes(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    store = make_store(tmp_path / "s")
    relay = Relay(store, token=TOKEN, host="127.0.0.1", port=0, uplink_bytes_per_s=None)
    relay.run_in_thread()
    try:
        waiting = asyncio.create_task(
            client.get(url(relay) + "/snapshots/next?after=-1&wait_s=20", headers=AUTH, timeout=30)
        )
        sent = await asyncio.to_thread(publish, store, 4)
        answer = await waiting
        assert (answer.content, answer.headers["echo2-version"]) == (sent.document, "4")
    finally:
        relay.stop_thread()
    relay.stop_thread()
    with pytest.raises(httpx.ConnectError):
        await client.get(url(relay) + "/snapshots/next", headers=AUTH)


def test_an_address_in_use_is_an_error_at_once(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s")
    first = Relay(store, token=TOKEN, host="127.0.0.1", port=0, uplink_bytes_per_s=None)
    first.run_in_thread()
    try:
        second = Relay(store, token=TOKEN, host="127.0.0.1", port=first.port, uplink_bytes_per_s=None)
        with pytest.raises(OSError, match="in use"):
            second.run_in_thread()
    finally:
        first.stop_thread()
