"""A delta gives the new payload bit for bit from its own base, and nothing from anything else."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.protocol.errors import IntegrityError
from app.snapshots import delta

SIZE = 4096
BASE = np.random.default_rng(1).integers(0, 2**16, SIZE // 2, dtype=np.uint16).tobytes()


def changed(base: bytes, edits: dict[int, int]) -> bytes:
    elements = np.frombuffer(base, "<u2").copy()
    for index, value in edits.items():
        elements[index % len(elements)] = value
    return elements.tobytes()


@settings(deadline=None)
@given(
    elements=st.integers(1, 70),
    edits=st.dictionaries(st.integers(0, 10_000), st.integers(0, 2**16 - 1), max_size=20),
)
def test_every_payload_comes_back_bit_for_bit_or_is_sent_whole(elements: int, edits: dict[int, int]) -> None:
    base = BASE[: 2 * elements]
    new = changed(base, edits)
    made = delta.encode(base, new)
    if made is not None:
        assert bytes(delta.apply(base, made)) == new
        assert len(made) < len(new)


@settings(deadline=None)
@given(edits=st.dictionaries(st.integers(0, SIZE // 2 - 1), st.integers(0, 2**16 - 1), max_size=300))
def test_a_sparse_change_is_always_worth_a_delta(edits: dict[int, int]) -> None:
    new = changed(BASE, edits)
    made = delta.encode(BASE, new)
    assert made is not None
    assert len(made) < delta.HEAD.size + 60 + 4 * len(edits)
    assert bytes(delta.apply(BASE, made)) == new


def test_not_a_number_and_minus_zero_are_bits_like_others() -> None:
    special = {0: 0x7FC1, 1: 0x8000, 2: 0xFF80, 3: 0x0001, SIZE // 2 - 1: 0xFFFF}
    new = changed(BASE, special)
    made = delta.encode(BASE, new)
    assert made is not None
    assert bytes(delta.apply(BASE, made)) == new


@pytest.mark.parametrize(
    ("base", "new"),
    [
        (BASE, np.random.default_rng(2).integers(0, 2**16, SIZE // 2, dtype=np.uint16).tobytes()),
        (BASE, BASE[:-2]),
        (BASE[:-1], BASE[:-1]),
        (b"", b""),
    ],
)
def test_what_does_not_pay_or_does_not_fit_is_sent_whole(base: bytes, new: bytes) -> None:
    assert delta.encode(base, new) is None


def test_another_base_is_refused() -> None:
    made = delta.encode(BASE, changed(BASE, {5: 1}))
    assert made is not None
    with pytest.raises(IntegrityError, match="another base"):
        delta.apply(changed(BASE, {100: 7}), made)
    with pytest.raises(IntegrityError, match="bytes; the base has"):
        delta.apply(BASE[:-2], made)


def test_applying_twice_does_no_harm() -> None:
    new = changed(BASE, {5: 1, 900: 3})
    made = delta.encode(BASE, new)
    assert made is not None
    assert delta.apply(delta.apply(BASE, made), made) == new


def test_payloads_of_many_blocks_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK_BYTES", 512)
    new = changed(BASE, {i * 37: 5 for i in range(40)})
    made = delta.encode(BASE, new)
    assert made is not None
    assert delta.read_head(io.BytesIO(made)).block_bytes == 512
    assert delta.apply(BASE, made) == new


def test_encoding_ends_as_soon_as_it_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it says of the size is what it saw of it."""
    monkeypatch.setattr(delta, "BLOCK_BYTES", 512)
    new = np.random.default_rng(3).integers(0, 2**16, SIZE // 2, dtype=np.uint16).tobytes()
    out = io.BytesIO()
    made = delta.write(io.BytesIO(BASE), io.BytesIO(new), out, size=SIZE, base_hash=b"", new_hash=b"")
    assert not made.pays
    assert 0.9 < made.share < 1.5
    assert len(out.getvalue()) < 0.5 * SIZE


NEW = changed(BASE, {i * 11: 1 for i in range(100)})
MADE = delta.encode(BASE, NEW) or b""


@settings(deadline=None)
@given(at=st.integers(0, len(MADE) - 1), flip=st.integers(1, 255))
def test_a_delta_altered_anywhere_never_gives_another_payload(at: int, flip: int) -> None:
    bad = bytearray(MADE)
    bad[at] ^= flip
    try:
        result = delta.apply(BASE, bad)
    except IntegrityError:
        return
    assert result == NEW  # a bit that means nothing


@settings(deadline=None)
@given(cut=st.integers(0, len(MADE) - 1))
def test_a_delta_that_is_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(IntegrityError):
        delta.apply(BASE, MADE[:cut])
