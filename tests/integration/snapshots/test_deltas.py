"""Versions travel as deltas over real HTTP: the same bits for fewer bytes, and the whole version where that fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
import torch

from app.snapshots import Snapshot, SnapshotStore, Source, delta, upstream
from app.snapshots.frames import frame
from app.snapshots.publish import Publication
from app.snapshots.upload import upload, upload_delta
from tests.integration.snapshots.helpers import (
    KEY,
    LEAF,
    FakeUpstream,
    MemoryObjects,
    Node,
    make_store,
    relay_of,
    running,
    url,
)

ELEMENTS = 40_000


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as made:
        yield made


def weights(version: int) -> dict[str, torch.Tensor]:
    """Weights of which about one in a hundred changes from version to version."""
    state = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    for v in range(1, version + 1):
        generator = torch.Generator().manual_seed(v)
        state += (torch.rand(ELEMENTS, generator=generator) < 0.01) * 0.5
    return {"w": state}


def publish(store: SnapshotStore, version: int) -> Publication:
    return store.publish(weights(version), version=version, key=KEY)


def bits(snapshot: Snapshot) -> bytes:
    return snapshot.payload_path.read_bytes()


@pytest.mark.parametrize("direct", [True, False])
async def test_a_chain_gets_bit_exact_copies_over_deltas(
    direct: bool, tmp_path: Path, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read directly, and as relays behind TLS are read."""
    monkeypatch.setattr(upstream, "direct", lambda _: direct)
    learner = make_store(tmp_path / "learner")
    sent = [publish(learner, 0)]
    async with AsyncExitStack() as stack:
        head = await stack.enter_async_context(relay_of(learner))
        nodes, above = [], Source("learner", url(head))
        for name in "ABC":
            node = Node(tmp_path / name, [above], client)
            relay = await stack.enter_async_context(relay_of(node.store))
            nodes.append(node)
            above = Source("peer", url(relay), name)
        await stack.enter_async_context(running(*nodes))
        for version in range(4):
            if version:
                sent.append(publish(learner, version))
            for node in nodes:
                assert bits(await node.has(version)) == bits(sent[version].snapshot)
    full = sent[0].snapshot.manifest.payload_bytes
    deltas = [p.delta.manifest.payload_bytes for p in sent if p.delta is not None]
    assert len(deltas) == 3
    assert sum(deltas) < 0.15 * full
    for node in nodes:
        assert sum(node.puller.bytes_from.values()) == full + sum(deltas)
        assert (node.puller.deltas_applied, node.puller.bytes_saved) == (3, 3 * full - sum(deltas))
        assert (node.lies, node.stalls, node.refused) == ([], [], [])


async def test_a_joiner_and_one_that_was_away_come_to_the_newest_version(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    """The joiner takes the version whole, the other the chain of deltas that it missed."""
    learner = make_store(tmp_path / "learner")
    publish(learner, 0)
    async with relay_of(learner) as relay:
        source = Source("learner", url(relay))
        away = Node(tmp_path / "away", [source], client)
        async with running(away):
            await away.has(0)
        chain = 0
        for version in range(1, 5):
            made = publish(learner, version).delta
            assert made is not None
            chain += made.manifest.payload_bytes
        back, joiner = Node(tmp_path / "away", [source], client), Node(tmp_path / "joiner", [source], client)
        async with running(back):
            got = await back.has(4)
        assert bits(got) == bits(publish(learner, 4).snapshot)
        assert back.puller.bytes_from == {"learner": chain}
        async with running(joiner):
            assert bits(await joiner.has(4)) == bits(got)
        assert joiner.puller.bytes_from == {"learner": got.manifest.payload_bytes}


async def test_a_joiner_in_mid_publish_gets_the_version_before_and_then_the_newest(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    """Its upstream has half of a delta, which is no use to it alone."""
    learner = make_store(tmp_path / "learner")
    first = publish(learner, 0).snapshot
    feed = make_store(tmp_path / "feed")
    whole = feed.begin(first.document)
    for n in range(first.manifest.leaves):
        whole.write_leaf(n, bits(first)[n * LEAF : (n + 1) * LEAF])
    whole.complete()
    second = publish(learner, 1)
    made = second.delta
    assert made is not None
    data = made.path.read_bytes()
    arriving = feed.begin_delta(made.document, made.whole)
    async with relay_of(feed) as relay:
        joiner = Node(tmp_path / "J", [Source("peer", url(relay), "A")], client)
        async with running(joiner):
            await joiner.has(0)
            for n in range(made.manifest.leaves):
                arriving.write_leaf(n, data[n * LEAF : (n + 1) * LEAF])
            assert bits(await joiner.has(1)) == bits(second.snapshot), "before its upstream has applied the delta"
        assert joiner.installed == [0, 1]
        assert bits(await asyncio.to_thread(arriving.complete)) == bits(second.snapshot)


async def test_after_a_lost_delta_the_whole_version_is_fetched(tmp_path: Path, client: httpx.AsyncClient) -> None:
    learner = make_store(tmp_path / "learner", keep_deltas=1)
    publish(learner, 0)
    async with relay_of(learner) as relay:
        source = Source("learner", url(relay))
        node = Node(tmp_path / "N", [source], client)
        async with running(node):
            await node.has(0)
        publish(learner, 1)
        newest = publish(learner, 2)
        assert newest.delta is not None
        assert learner.delta(1) is None, "one delta is kept, and its base isn't what the node has"
        again = Node(tmp_path / "N", [source], client)
        async with running(again):
            assert bits(await again.has(2)) == bits(newest.snapshot)
        assert again.puller.bytes_from == {"learner": newest.snapshot.manifest.payload_bytes}


async def test_a_delta_of_a_base_that_is_not_here_is_refused(tmp_path: Path, client: httpx.AsyncClient) -> None:
    """An upstream that offers it although it knows better has lied; the version comes whole from the next."""
    learner = make_store(tmp_path / "learner")
    publish(learner, 0)
    async with relay_of(learner) as relay:
        source = Source("learner", url(relay))
        first = Node(tmp_path / "N", [source], client)
        async with running(first):
            await first.has(0)
        publish(learner, 1)
        newest = publish(learner, 2)
        assert newest.delta is not None
        pushy = FakeUpstream(newest.snapshot, _silent)
        pushy.document, pushy.delta = newest.delta.whole, newest.delta.document
        async with pushy.serve() as pushy_url:
            peer = Source("peer", pushy_url, "pushy")
            node = Node(tmp_path / "N", [peer, source], client)
            async with running(node):
                assert bits(await node.has(2)) == bits(newest.snapshot)
                await node.until(lambda: node.lies)
        assert node.lies[0] == (peer, -1)
        assert node.installed == [2]


async def _silent(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    await up.release.wait()


async def test_a_tampered_delta_is_a_lie_and_comes_from_the_next(tmp_path: Path, client: httpx.AsyncClient) -> None:
    learner = make_store(tmp_path / "learner")
    publish(learner, 0)
    async with relay_of(learner) as relay:
        source = Source("learner", url(relay))
        first = Node(tmp_path / "N", [source], client)
        async with running(first):
            await first.has(0)
        newest = publish(learner, 1)
        made = newest.delta
        assert made is not None
        liar = FakeUpstream(Snapshot(1, made.manifest, made.whole, made.path), _flips)
        liar.delta = made.document
        async with liar.serve() as liar_url:
            peer = Source("peer", liar_url, "liar")
            node = Node(tmp_path / "N", [peer, source], client)
            async with running(node):
                assert bits(await node.has(1)) == bits(newest.snapshot)
                await node.until(lambda: node.lies)
        assert node.lies == [(peer, 1)]
        rest = made.manifest.payload_bytes - LEAF
        assert node.puller.bytes_from == {"peer": LEAF, "learner": rest}, "the first leaf was right"
        assert node.puller.deltas_applied == 1


async def _flips(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    data = up.snapshot.payload_path.read_bytes()
    for n in range(first, up.snapshot.manifest.leaves):
        leaf = data[n * LEAF : (n + 1) * LEAF]
        writer.write(frame(n, leaf if n == 0 else bytes([leaf[0] ^ 1]) + leaf[1:]))


async def test_after_a_delta_that_does_not_give_the_version_it_comes_whole(
    tmp_path: Path, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed, but made wrong: asked again for it, the relay would give the same."""

    def wrong(base: delta.Readable, new: delta.Readable, out: BinaryIO, **about: Any) -> delta.Encoded:
        data = bytearray(new.read(about["size"]))
        data[-3] ^= 1
        return delta.write(base, delta.Memory(data), out, **about)

    learner = make_store(tmp_path / "learner")
    publish(learner, 0)
    async with relay_of(learner) as relay:
        node = Node(tmp_path / "N", [Source("learner", url(relay))], client)
        async with running(node):
            await node.has(0)
            monkeypatch.setattr("app.snapshots.publish.write", wrong)
            newest = publish(learner, 1)
            assert bits(await node.has(1)) == bits(newest.snapshot)
            monkeypatch.undo()
            after = publish(learner, 2)
            assert bits(await node.has(2)) == bits(after.snapshot)
        assert [version for _, version in node.refused] == [1]
        assert (node.installed, node.lies, node.puller.deltas_applied) == ([0, 1, 2], [], 1)


async def test_a_base_that_rotted_on_disk_is_not_passed_off_as_a_version(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    learner = make_store(tmp_path / "learner")
    publish(learner, 0)
    async with relay_of(learner) as relay:
        node = Node(tmp_path / "N", [Source("learner", url(relay))], client)
        async with running(node):
            old = await node.has(0)
            data = bytearray(bits(old))
            data[-5] ^= 1
            old.payload_path.write_bytes(data)
            newest = publish(learner, 1)
            assert bits(await node.has(1)) == bits(newest.snapshot)
        assert [version for _, version in node.refused] == [1]
        assert (node.installed, node.lies) == ([0, 1], [])
        assert node.store.versions == [1], "the damaged one is gone"


async def test_a_store_with_a_keyframe_and_deltas_is_enough(tmp_path: Path) -> None:
    learner, objects = make_store(tmp_path / "learner"), MemoryObjects()
    sent = [publish(learner, version) for version in range(4)]
    upload(make_and(tmp_path, 0), objects, "jobs/j/snapshots")
    for made in sent[1:]:
        assert made.delta is not None
        upload_delta(made.delta, objects, "jobs/j/snapshots")
    newest = sent[3].snapshot
    async with objects.client() as client:
        joiner = Node(tmp_path / "J", [Source("store")], client, fetch_urls=objects.fetch_urls)
        joiner.target = 3
        async with running(joiner):
            assert bits(await joiner.has(3)) == bits(newest)
        assert joiner.puller.deltas_applied == 3
        assert joiner.lies == []


def make_and(root: Path, version: int) -> Snapshot:
    """The version as another store publishes it: the learner has removed its own."""
    return publish(make_store(root / f"again-{version}"), version).snapshot
