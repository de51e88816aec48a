"""Frames are cut anywhere by the network, and pacing keeps under the link."""

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.errors import IntegrityError
from app.snapshots import Pacer
from app.snapshots.choice import following, patience, repairers
from app.snapshots.frames import HEADER, KEEP_ALIVE, PADDING_BYTES, LeafParser, frame, stream_bytes
from app.snapshots.pacer import SO_MAX_PACING_RATE, TCP_INFO_BYTES, Shares, stuck
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


def test_a_burst_fits_now_at_the_beginning_and_after_every_pause_but_never_more() -> None:
    now = 100.0
    pacer = Pacer(1000.0, burst_s=0.02, clock=lambda: now)
    for pause in (0.0, 60.0):
        now += pause
        assert [round(pacer.reserve(10), 6) for _ in range(5)] == [0.0, 0.0, 0.0, 0.01, 0.02]


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


LINK = 25e6
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="pacing by socket is Linux's")


@pytest.fixture
def socks() -> Iterator[list[socket.socket]]:
    """Two connections of a relay to its children."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as opened:
        yield [opened.enter_context(socket.create_connection(server.getsockname())) for _ in range(2)]


def paced(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)


@ON_LINUX
def test_streams_that_begin_after_a_pause_share_the_link_equally(socks: list[socket.socket]) -> None:
    """Nothing has been acknowledged on their connections for long, but that says nothing yet."""
    shares = Shares(LINK)
    payload = LINK * 1448 / 1500
    with shares.of(socks[0], origin=True), shares.of(socks[1], origin=False):
        assert [paced(s) for s in socks] == [int(payload * 0.985 / 2), int(payload / 2)]
    with shares.of(socks[0], origin=True):
        assert paced(socks[0]) == int(payload * 0.985)


@ON_LINUX
def test_the_share_of_a_stream_that_ends_goes_to_those_that_go_on(socks: list[socket.socket]) -> None:
    shares = Shares(LINK)
    with shares.of(socks[0], origin=False):
        with shares.of(socks[1], origin=False):
            pass
        assert paced(socks[0]) == int(LINK * 1448 / 1500)


@ON_LINUX
def test_a_child_whose_connection_is_gone_has_no_share_once_it_isnt_new(socks: list[socket.socket]) -> None:
    now = 100.0
    shares = Shares(LINK, clock=lambda: now)
    with shares.of(socks[0], origin=False):
        socks[0].close()
        now += 1.9
        with shares.of(socks[1], origin=False):
            assert paced(socks[1]) == int(LINK * 1448 / 1500 / 2)
        now += 0.2
        with shares.of(socks[1], origin=False):
            assert paced(socks[1]) == int(LINK * 1448 / 1500)


@ON_LINUX
def test_a_link_faster_than_the_kernel_can_name_is_no_error(socks: list[socket.socket]) -> None:
    with Shares(1e12).of(socks[0], origin=True) as held:
        assert held
        assert paced(socks[0]) == 2**31 - 1


@ON_LINUX
def test_a_relay_is_told_whether_something_else_has_to_hold_the_stream(socks: list[socket.socket]) -> None:
    with Shares(None).of(socks[0], origin=True) as held, Shares(None).of(None, origin=True) as held_too:
        assert held
        assert held_too, "there is no rate to be held to"
    with Shares(LINK).of(socks[0], origin=True) as held, Shares(LINK).of(None, origin=True) as unknown:
        assert held
        assert not unknown, "the server behind which the socket is hidden tells nothing of it"


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
