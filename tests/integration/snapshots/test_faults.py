"""Upstreams that die, fall silent or lie: what it costs is one leaf, and nothing false is installed or passed on."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.snapshots import Source, decode, puller, upload
from app.snapshots.frames import KEEP_ALIVE, frame
from tests.integration.snapshots.helpers import (
    LEAF,
    FakeUpstream,
    MemoryObjects,
    Node,
    Script,
    leaf,
    make_store,
    publish,
    relay_of,
    running,
    url,
)

CUT = 5
"""The leaf at which upstreams fail here."""


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as made:
        yield made


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


async def flips_a_bit(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    for n in range(first, up.snapshot.manifest.leaves):
        writer.write(frame(n, flipped(leaf(up.snapshot, n))) if n == CUT else up.frame(n))


async def announces_too_long_a_leaf(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"".join(up.frame(n) for n in range(first, CUT)) + frame(CUT, b"x" * (LEAF + 1)))


async def skips_a_leaf(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"".join(up.frame(n) for n in range(first, up.snapshot.manifest.leaves) if n != CUT))


async def dies(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"".join(up.frame(n) for n in range(first, CUT)) + up.frame(CUT)[:100])


async def falls_silent(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    await dies(up, first, writer)
    await up.release.wait()


async def lies_from_then_on(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    for n in range(first, up.snapshot.manifest.leaves):
        writer.write(frame(n, flipped(leaf(up.snapshot, n))) if n >= CUT else up.frame(n))


async def test_a_flipped_bit_costs_one_leaf_and_names_who_flipped_it(tmp_path: Path, client: httpx.AsyncClient) -> None:
    learner = make_store(tmp_path / "learner")
    sent = publish(learner, 1)
    liar = FakeUpstream(sent, flips_a_bit)
    async with liar.serve() as liar_url, relay_of(learner) as head:
        peer = Source("peer", liar_url, "liar")
        node = Node(tmp_path / "N", [peer, Source("learner", url(head))], client)
        async with running(node):
            got = await node.has(1)
            await node.until(lambda: node.lies)
        assert got.payload_path.read_bytes() == sent.payload_path.read_bytes()
        assert node.lies == [(peer, 1)]
        assert node.stalls == []
        assert liar.asked == [0], "the liar's stream went on"
        assert head.bytes_served == LEAF
        assert node.puller.bytes_from == {"peer": sent.manifest.payload_bytes - LEAF, "learner": LEAF}


async def test_who_lies_twice_is_left_for_the_last_peer(tmp_path: Path, client: httpx.AsyncClient) -> None:
    """A liar goes on pulling from its parent, whose link would have to carry both."""
    sent = publish(make_store(tmp_path / "origin"), 1)
    names = ("liar", "parent", "tail")
    ups = dict(zip(names, (FakeUpstream(sent, s) for s in (lies_from_then_on, stream_all, stream_all)), strict=True))
    async with ups["liar"].serve() as one, ups["parent"].serve() as two, ups["tail"].serve() as three:
        sources = [Source("peer", at, name) for at, name in zip((one, two, three), names, strict=True)]
        node = Node(tmp_path / "N", sources, client)
        async with running(node):
            got = await node.has(1)
            await node.until(lambda: len(node.lies) == 2)
        assert got.payload_path.read_bytes() == sent.payload_path.read_bytes()
        assert node.lies == [(sources[0], 1)] * 2
        assert (ups["parent"].asked, ups["tail"].asked) == ([CUT], [CUT + 1]), "one leaf here, the rest there"


async def test_a_leaf_that_nobody_else_has_right_ends_the_liars_stream(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    learner = make_store(tmp_path / "learner")
    sent = publish(learner, 1)
    liars = [FakeUpstream(sent, flips_a_bit), FakeUpstream(sent, lies_from_then_on)]
    async with liars[0].serve() as one, liars[1].serve() as two, relay_of(learner) as head:
        sources = [Source("peer", one, "1"), Source("peer", two, "2"), Source("learner", url(head))]
        node = Node(tmp_path / "N", sources, client)
        async with running(node):
            await node.has(1)
            await node.until(lambda: len(node.lies) == 2)
        assert {source.node_id for source, _ in node.lies} == {"1", "2"}
        assert head.bytes_served == LEAF


async def test_two_peers_that_wait_for_each_other_both_move_on(tmp_path: Path, client: httpx.AsyncClient) -> None:
    """Each lost its parent at the same leaf and turned to the other, which says that it is alive and has nothing."""
    learner = make_store(tmp_path / "learner")
    sent = publish(learner, 1)
    dead = [FakeUpstream(sent, dies) for _ in range(2)]
    async with AsyncExitStack() as stack:
        head = await stack.enter_async_context(relay_of(learner))
        urls = [await stack.enter_async_context(up.serve()) for up in dead]
        nodes = [Node(tmp_path / str(i), [], client, stall_s=1.0) for i in range(2)]
        relays = [await stack.enter_async_context(relay_of(node.store)) for node in nodes]
        for i, node in enumerate(nodes):
            other = Source("peer", url(relays[1 - i]), str(1 - i))
            node.sources = [Source("peer", urls[i], f"dead {i}"), other, Source("learner", url(head))]
        await stack.enter_async_context(running(*nodes))
        for node in nodes:
            got = await node.has(1)
            assert got.payload_path.read_bytes() == sent.payload_path.read_bytes()


@pytest.mark.parametrize("script", [announces_too_long_a_leaf, skips_a_leaf])
async def test_a_stream_that_is_none_is_not_installed_not_passed_on_reported_and_fetched_elsewhere(
    script: Script, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    learner = make_store(tmp_path / "learner")
    sent = publish(learner, 1)
    liar = FakeUpstream(sent, script)
    async with liar.serve() as liar_url, relay_of(learner) as head:
        peer = Source("peer", liar_url, "liar")
        node = Node(tmp_path / "N", [peer, Source("learner", url(head))], client)
        async with relay_of(node.store) as below_relay:
            below = Node(tmp_path / "below", [Source("peer", url(below_relay), "N")], client)
            async with running(node, below):
                got = await node.has(1)
                passed_on = await below.has(1)
                await node.until(lambda: node.lies)
        assert got.payload_path.read_bytes() == sent.payload_path.read_bytes()
        assert passed_on.payload_path.read_bytes() == sent.payload_path.read_bytes()
        assert node.lies == [(peer, 1)]
        assert below.lies == []
        rest = sent.manifest.payload_bytes - CUT * LEAF
        assert node.puller.bytes_from == {"peer": CUT * LEAF, "learner": rest}
        assert head.bytes_served == rest, "only what was missing is fetched again"


@pytest.mark.parametrize("script", [dies, falls_silent])
async def test_a_dead_or_silent_upstream_is_left_at_the_leaf_where_it_stopped(
    script: Script, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    sent = publish(make_store(tmp_path / "origin"), 1)
    first, second = FakeUpstream(sent, script), FakeUpstream(sent, stream_all)
    async with first.serve() as first_url, second.serve() as second_url:
        sources = [Source("peer", first_url, "1"), Source("peer", second_url, "2")]
        node = Node(tmp_path / "N", sources, client, stall_s=0.3)
        async with running(node):
            got = await node.has(1)
        assert got.payload_path.read_bytes() == sent.payload_path.read_bytes()
        assert (first.asked, second.asked) == ([0], [CUT])
        assert (node.lies, node.stalls) == ([], [sources[0]])


async def stream_all(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    for n in range(first, up.snapshot.manifest.leaves):
        writer.write(up.frame(n))


async def starves(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
    """Says that it lives for much longer than stall_s, then goes on."""
    writer.write(b"".join(up.frame(n) for n in range(first, CUT)))
    for _ in range(8):
        await writer.drain()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(up.release.wait(), 0.2)
        writer.write(KEEP_ALIVE)
    await stream_all(up, CUT, writer)


async def test_a_starved_upstream_that_says_so_is_not_left(tmp_path: Path, client: httpx.AsyncClient) -> None:
    sent = publish(make_store(tmp_path / "origin"), 1)
    first, second = FakeUpstream(sent, starves), FakeUpstream(sent, stream_all)
    async with first.serve() as first_url, second.serve() as second_url:
        node = Node(
            tmp_path / "N", [Source("peer", first_url, "1"), Source("peer", second_url, "2")], client, stall_s=1.0
        )
        async with running(node):
            await node.has(1)
        assert (first.asked, second.asked, node.stalls) == ([0], [], [])


async def test_saying_alive_for_ever_does_not_hold_a_node(tmp_path: Path, client: httpx.AsyncClient) -> None:
    async def only_talks(up: FakeUpstream, first: int, writer: asyncio.StreamWriter) -> None:
        while not up.release.is_set():
            writer.write(KEEP_ALIVE)
            await writer.drain()

    sent = publish(make_store(tmp_path / "origin"), 1)
    first, second = FakeUpstream(sent, only_talks), FakeUpstream(sent, stream_all)
    async with first.serve() as first_url, second.serve() as second_url:
        sources = [Source("peer", first_url, "1"), Source("peer", second_url, "2")]
        node = Node(tmp_path / "N", sources, client, stall_s=5.0, starve_s=0.4)
        async with running(node):
            await node.has(1)
        assert second.asked == [0]


async def test_a_forged_announcement_is_reported_and_the_next_source_asked(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    learner = make_store(tmp_path / "learner")
    sent = publish(learner, 1)
    forger = FakeUpstream(sent, stream_all)
    document = json.loads(sent.document)
    document["manifest"] = document["manifest"].replace('"version":1', '"version":9')
    forger.document = json.dumps(document).encode()
    async with forger.serve() as forged_url, relay_of(learner) as head:
        peer = Source("peer", forged_url, "forger")
        node = Node(tmp_path / "N", [peer, Source("learner", url(head))], client)
        async with running(node):
            await node.has(1)
            await node.until(lambda: node.lies)
        assert node.lies[0] == (peer, -1)
        assert node.puller.bytes_from == {"learner": sent.manifest.payload_bytes}


@pytest.mark.parametrize("knows_ranges", [True, False])
async def test_when_all_peers_are_dead_the_object_store_gives_the_rest(knows_ranges: bool, tmp_path: Path) -> None:
    sent = publish(make_store(tmp_path / "origin"), 1)
    objects = MemoryObjects()
    objects.knows_ranges = knows_ranges
    upload(sent, objects, "jobs/j/snapshots")
    assert objects.order[-1] == "jobs/j/snapshots/1/manifest.json"
    peer = FakeUpstream(sent, dies)
    async with objects.client() as client, peer.serve() as peer_url:
        dead = Source("peer", "http://127.0.0.1:1", "dead")
        node = Node(
            tmp_path / "N",
            [dead, Source("peer", peer_url, "1"), Source("store")],
            client,
            fetch_urls=objects.fetch_urls,
        )
        async with running(node):
            got = await node.has(1)
    assert got.payload_path.read_bytes() == sent.payload_path.read_bytes()
    assert decode(got.payload_path)["w"].shape == (8000,)
    assert node.puller.bytes_from == {"peer": CUT * LEAF, "store": sent.manifest.payload_bytes - CUT * LEAF}
    assert objects.ranges == [f"bytes={(CUT - 4) * LEAF}-"], "within the chunk it goes on where it stopped"
    assert objects.authorization == {""}, "the relay token is not for the store"


async def test_the_store_alone_is_enough_once_the_target_is_known(tmp_path: Path) -> None:
    sent = publish(make_store(tmp_path / "origin"), 3)
    objects = MemoryObjects()
    async with objects.client() as client:
        node = Node(tmp_path / "N", [Source("store")], client, fetch_urls=objects.fetch_urls)
        node.target = 3
        async with running(node):
            upload(sent, objects, "jobs/j/snapshots")
            await node.has(3)


async def test_a_damaged_object_is_refused_and_a_relay_heals_it(tmp_path: Path) -> None:
    learner = make_store(tmp_path / "learner")
    sent = publish(learner, 1)
    objects = MemoryObjects()
    upload(sent, objects, "jobs/j/snapshots")
    objects.objects["jobs/j/snapshots/1/chunks/1"] = flipped(objects.objects["jobs/j/snapshots/1/chunks/1"])
    async with objects.client() as client, relay_of(learner) as head:
        bucket = Source("store")
        node = Node(tmp_path / "N", [bucket, Source("learner", url(head))], client, fetch_urls=objects.fetch_urls)
        node.target = 1
        async with running(node):
            got = await node.has(1)
            await node.until(lambda: node.lies)
    assert got.payload_path.read_bytes() == sent.payload_path.read_bytes()
    assert node.lies == [(bucket, 1)]
    assert node.puller.bytes_from["learner"] == LEAF


async def test_a_node_killed_during_the_download_goes_on_with_what_it_can_verify(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    sent = publish(make_store(tmp_path / "origin"), 1)
    upstream = FakeUpstream(sent, falls_silent)
    async with upstream.serve() as up_url:
        node = Node(tmp_path / "N", [Source("peer", up_url, "1")], client)
        async with running(node):
            await node.until(lambda: node.leaves(1) == CUT)
        payload = tmp_path / "N" / "1.part" / "payload.safetensors"
        data = payload.read_bytes()
        payload.write_bytes(data[: 3 * LEAF] + flipped(data[3 * LEAF :]))

        upstream.script = stream_all
        again = Node(tmp_path / "N", node.sources, client)
        async with running(again):
            got = await again.has(1)
    assert got.payload_path.read_bytes() == sent.payload_path.read_bytes()
    assert upstream.asked == [0, 3]


async def test_a_learner_killed_in_mid_publish_leaves_no_half_and_completes_it_when_it_is_back(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    origin = make_store(tmp_path / "origin")
    first = publish(origin, 1)
    async with AsyncExitStack() as stack:
        learner = await stack.enter_async_context(relay_of(origin))
        node = Node(tmp_path / "N", [Source("learner", url(learner))], client)
        child = Node(tmp_path / "child", [], client)
        node.target = child.target = 2
        async with running(node), relay_of(node.store) as between:
            child.sources = [Source("peer", url(between), "N")]
            async with running(child):
                await node.has(1)
                await child.has(1)
                second = publish(make_store(tmp_path / "second"), 2)
                upstream = FakeUpstream(second, dies)
                dying = await stack.enter_async_context(upstream.serve())
                node.sources = [Source("learner", dying)]
                await node.until(lambda: node.leaves(2) == CUT)
                upstream.announces, upstream.script = False, dies
                assert node.store.latest().version == 1, "half a version is not installed"
                assert child.store.latest().version == 1
                assert first.payload_path.read_bytes() != second.payload_path.read_bytes()

                # It comes back at another address, with the same signed version out of its checkpoint.
                back = FakeUpstream(second, stream_all)
                node.sources = [Source("learner", await stack.enter_async_context(back.serve()))]
                got, passed_on = await node.has(2), await child.has(2)
    assert back.asked == [CUT], "the node goes on at its leaf"
    assert got.payload_path.read_bytes() == second.payload_path.read_bytes()
    assert passed_on.payload_path.read_bytes() == second.payload_path.read_bytes()


async def test_a_version_that_died_with_its_learner_gives_way_to_the_next(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    lost = publish(make_store(tmp_path / "lost"), 2)
    upstream = FakeUpstream(lost, falls_silent)
    next_store = make_store(tmp_path / "next")
    newer = publish(next_store, 3)
    async with upstream.serve() as dying, relay_of(next_store) as heir:
        node = Node(tmp_path / "N", [Source("learner", dying)], client)
        async with running(node):
            await node.until(lambda: node.leaves(2) == CUT)
            node.sources = [Source("learner", url(heir))]
            upstream.release.set()
            got = await node.has(3)
            assert node.store.get(2) is None, "the half is nobody's version"
    assert got.payload_path.read_bytes() == newer.payload_path.read_bytes()


async def test_a_source_that_does_not_announce_the_target_is_passed_over(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    behind, learner = make_store(tmp_path / "behind"), make_store(tmp_path / "learner")
    publish(learner, 1)
    async with relay_of(behind) as slow, relay_of(learner) as head:
        node = Node(
            tmp_path / "N",
            [Source("peer", url(slow), "slow"), Source("learner", url(head))],
            client,
            announce_grace_s=0.3,
        )
        node.target = 1
        async with running(node):
            await node.has(1)


async def test_a_new_list_of_sources_takes_effect_while_waiting(tmp_path: Path, client: httpx.AsyncClient) -> None:
    learner = make_store(tmp_path / "learner")
    mute = FakeUpstream(publish(learner, 1), stream_all)
    mute.announces = False
    async with mute.serve() as mute_url, relay_of(learner) as head:
        node = Node(tmp_path / "N", [Source("peer", mute_url, "mute")], client)
        async with running(node):
            await asyncio.wait_for(mute.polled.wait(), 10)
            node.sources = [Source("learner", url(head))]
            await node.has(1)


async def test_a_slow_installation_holds_up_neither_download_nor_children(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    learner = make_store(tmp_path / "learner")
    publish(learner, 1)
    go_on = asyncio.Event()
    installed: list[int] = []

    async def install(snapshot: object) -> None:
        installed.append(snapshot.version)  # type: ignore[attr-defined]
        node.store.changes.notify()
        await asyncio.wait_for(go_on.wait(), 20)

    async with relay_of(learner) as head:
        node = Node(tmp_path / "N", [Source("learner", url(head))], client, on_complete=install)
        async with running(node):
            await node.until(lambda: installed == [1])
            for version in (2, 3, 4):
                publish(learner, version)
                await node.until(partial(node.store.get, version))
            being_installed = node.store.get(1)
            assert being_installed is not None, "what is being installed is not removed"
            assert decode(being_installed.payload_path)["w"].shape == (8000,)
            go_on.set()
            await node.until(lambda: installed == [1, 4])


async def test_a_failing_installation_ends_the_puller_with_its_error(tmp_path: Path, client: httpx.AsyncClient) -> None:
    learner = make_store(tmp_path / "learner")
    publish(learner, 1)

    async def install(snapshot: object) -> None:
        raise ZeroDivisionError("engine")

    async with relay_of(learner) as head:
        node = Node(tmp_path / "N", [Source("learner", url(head))], client, on_complete=install)
        with pytest.raises(ZeroDivisionError, match="engine"):
            await asyncio.wait_for(node.puller.run(), 20)


async def test_a_puller_that_ends_does_not_wait_for_the_disk(
    tmp_path: Path, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes that an earlier process received are hashed at that moment: hearts beat, and the node leaves."""
    monkeypatch.setattr(puller, "CLOSE_S", 0.05)
    node = Node(tmp_path / "N", [], client)
    hashing, ended = threading.Event(), threading.Event()

    def hashes() -> bool:
        with node.store._begin_lock:
            hashing.set()
            return ended.wait(10)

    disk = asyncio.create_task(asyncio.to_thread(hashes))
    await asyncio.to_thread(hashing.wait, 10)
    pulling = asyncio.create_task(node.puller.run())
    await asyncio.sleep(0)
    pulling.cancel()
    await asyncio.wait({pulling})
    ended.set()
    assert await disk, "the loop stood still until the disk was done"
