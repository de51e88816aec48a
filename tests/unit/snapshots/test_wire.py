"""Frames are cut anywhere by the network, and pacing keeps under the link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.errors import IntegrityError
from app.snapshots import Pacer
from app.snapshots.frames import HEADER, KEEP_ALIVE, LeafParser, frame
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
