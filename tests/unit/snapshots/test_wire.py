"""Frames are cut anywhere by the network, and pacing keeps under the link."""

import socket
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.errors import IntegrityError
from app.snapshots import Pacer
from app.snapshots.choice import following, patience, repairers
from app.snapshots.frames import HEADER, KEEP_ALIVE, PADDING_BYTES, LeafParser, frame, stream_bytes
from app.snapshots.pacer import HEADROOM, PACKETS, SO_MAX_PACING_RATE, TCP_INFO_BYTES, Shares, stuck
from app.snapshots.sources import Source
from tests.unit.snapshots.test_manifest import PAYLOAD, manifest

LEAVES = [PAYLOAD[i : i + 256] for i in range(0, len(PAYLOAD), 256)]


@given(cuts=st.lists(st.integers(1, 400), min_size=1), first=st.integers(0, 4), alive=st.sets(st.integers(0, 4)))
def test_leaves_come_out_whole_however_the_stream_is_cut(cuts: list[int], first: int, alive: set[int]) -> None:
    stream = b"".join((KEEP_ALIVE if n in alive else b"") + frame(n, LEAVES[n]) for n in range(first, 5)) + KEEP_ALIVE
    parser, got, at, i = LeafParser(manifest(), first, framed=True), [], 0, 0
    while at < len(stream):
        size = cuts[i % len(cuts)]
        got += list(parser.feed(stream[at : at + size]))
        at, i = at + size, i + 1
    assert got == [(n, LEAVES[n]) for n in range(first, 5)]


@pytest.mark.parametrize(
    "sent",
    [
        HEADER.pack(1, 256),
        HEADER.pack(0, 255),
        HEADER.pack(0, 0xFFFFFFFF),
        HEADER.pack(0xFFFFFFFF, 1),
        b"".join(frame(n, LEAVES[n]) for n in range(5)) + HEADER.pack(5, 256),
    ],
)
def test_a_wrong_header_is_refused_before_its_body(sent: bytes) -> None:
    with pytest.raises(IntegrityError):
        list(LeafParser(manifest(), 0, framed=True).feed(sent))


@given(
    rate=st.floats(1e3, 1e8),
    pieces=st.lists(st.tuples(st.integers(1, 300_000), st.floats(0, 0.5)), min_size=1, max_size=40),
)
def test_pacing_never_exceeds_rate_plus_burst_plus_one_piece(rate: float, pieces: list[tuple[int, float]]) -> None:
    now = 0.0
    pacer = Pacer(rate, burst_s=0.02, clock=lambda: now)
    sent: list[tuple[float, int]] = []
    for size, pause in pieces:
        now += pause
        sent.append((now + pacer.reserve(size), size))
    largest = max(size for _, size in sent)
    for i, (start, _) in enumerate(sent):
        total = 0
        for moment, size in sent[i:]:
            total += size
            assert total <= rate * (moment - start + 0.02) + largest + size + 1e-6 * total + 1
    assert [moment for moment, _ in sent] == sorted(moment for moment, _ in sent)


def test_a_stream_is_held_to_the_rate_and_no_rate_means_no_wait() -> None:
    pacer = Pacer(1000.0, burst_s=0.0, clock=lambda: 0.0)
    assert [round(pacer.reserve(100), 6) for _ in range(4)] == [0.0, 0.1, 0.2, 0.3]
    assert Pacer(None).reserve(10**12) == 0.0
    with pytest.raises(ValueError, match="more than 0"):
        Pacer(0.0)


@pytest.mark.parametrize(
    ("unacknowledged", "since_ms", "is_stuck"),
    [(0, 60_000, False), (40, 100, False), (40, 2500, True), (1, 2000, True)],
)
def test_a_socket_is_stuck_when_nothing_of_what_it_sent_is_acknowledged(
    unacknowledged: int, since_ms: int, is_stuck: bool
) -> None:
    assert stuck(struct.pack("=24xI28xI", unacknowledged, since_ms)) == is_stuck


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
def test_a_fresh_connection_is_not_stuck() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        sock.sendall(b"x")
        assert not stuck(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))


@pytest.mark.skipif(sys.platform != "linux", reason="pacing by socket is Linux's")
def test_streams_that_begin_after_a_pause_share_the_link_equally() -> None:
    """Nothing has been acknowledged on their connections for long, but that says nothing yet."""
    link = 25e6
    shares = Shares(link)
    with socket.create_server(("127.0.0.1", 0)) as server:
        socks = [socket.create_connection(server.getsockname()) for _ in range(2)]
        try:
            with shares.of(socks[0], origin=True), shares.of(socks[1], origin=False):
                rates = [s.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) for s in socks]
                assert rates == [int(link / PACKETS * HEADROOM / 2), int(link / PACKETS / 2)]
            with shares.of(socks[0], origin=True):
                assert socks[0].getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == int(link / PACKETS * HEADROOM)
        finally:
            for sock in socks:
                sock.close()


PARENT, ABOVE, TAIL = (Source("peer", f"http://{name}", name) for name in ("parent", "above", "tail"))
LEARNER, STORE = Source("learner", "http://l"), Source("store")
SOURCES = [PARENT, ABOVE, LEARNER, TAIL, STORE]


@pytest.mark.parametrize(
    ("tried", "lied", "next_one"),
    [
        ({PARENT}, False, ABOVE),
        ({PARENT}, True, TAIL),
        ({PARENT, ABOVE}, False, LEARNER),
        ({PARENT, TAIL}, True, ABOVE),
        ({PARENT, TAIL, ABOVE}, True, LEARNER),
        ({PARENT, ABOVE, LEARNER}, False, TAIL),
        ({PARENT, ABOVE, LEARNER, TAIL}, False, STORE),
        (set(SOURCES), True, None),
        (set(SOURCES), False, None),
    ],
)
def test_the_dead_are_left_for_their_parent_and_liars_for_an_idle_tail(
    tried: set[Source], lied: bool, next_one: Source | None
) -> None:
    assert following(SOURCES, tried, lied=lied) == next_one


def test_a_leaf_is_mended_by_those_not_yet_tried() -> None:
    assert repairers(SOURCES, PARENT, {ABOVE}) == [LEARNER, TAIL, STORE]
    assert repairers([PARENT], PARENT, set()) == []


def test_who_moved_is_less_patient() -> None:
    assert patience(60.0, 5.0, moved=False) == 60.0
    assert patience(60.0, 5.0, moved=True) == 10.0
    assert patience(1.0, 5.0, moved=True) == 1.0


@given(first=st.integers(0, 5), count=st.integers(0, 6))
def test_the_length_of_a_stream_is_what_its_frames_have(first: int, count: int) -> None:
    end = min(5, first + count)
    frames = sum(len(frame(n, LEAVES[n])) for n in range(first, end))
    assert stream_bytes(manifest(), first, end) == frames + PADDING_BYTES
