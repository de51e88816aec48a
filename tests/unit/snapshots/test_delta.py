"""A delta gives the new payload bit for bit from its own base, and nothing from anything else."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
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
    assert delta.encode(BASE, new[:512] + BASE[512:]) is not None, "what only begins so is worth a delta"


def test_a_payload_larger_than_all_units_of_the_work_comes_back_and_the_changes_are_counted() -> None:
    """Of two blocks, the second not whole; compared in several runs, with elements left over behind the last word."""
    base = np.random.default_rng(4).integers(0, 2**16, (9 << 19) + 3, dtype=np.uint16).tobytes()
    places = [0, (1 << 19) - 1, 1 << 19, (5 << 18) + 1, (1 << 22) + 7, (9 << 19) + 1, (9 << 19) + 2]
    new = changed(base, dict.fromkeys(places, 7))
    out, size = io.BytesIO(), len(base)
    made = delta.write(
        io.BytesIO(base), io.BytesIO(new), out,
        size=size, base_hash=blake3(base).digest(), new_hash=blake3(new).digest(),
    )  # fmt: skip
    assert (made.pays, made.changed) == (True, len(places))
    assert made.share == len(out.getvalue()) / size
    assert delta.apply(base, out.getvalue()) == new


@pytest.mark.parametrize("size", [0, 3])
def test_what_is_not_of_whole_elements_is_not_encoded(size: int) -> None:
    same = io.BytesIO(BASE)
    made = delta.write(same, same, io.BytesIO(), size=size, base_hash=bytes(32), new_hash=bytes(32))
    assert made == delta.Encoded(pays=False, share=1.0, changed=0)


def test_where_nothing_changed_nothing_is_counted() -> None:
    made = delta.write(
        io.BytesIO(BASE), io.BytesIO(BASE), io.BytesIO(), size=SIZE, base_hash=bytes(32), new_hash=bytes(32)
    )
    assert (made.pays, made.changed) == (True, 0)


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


def packed(numbers: list[int], width: int) -> bytes:
    """A stream as the form of a delta has it: zstd of the numbers' planes."""
    planes = np.array(numbers, f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()
    made: bytes = pa.Codec("zstd").compress(planes, asbytes=True)
    return made


def block(count: int, gaps: list[int], steps: list[int]) -> bytes:
    where, what = packed(gaps, 4), packed(steps, 2)
    return delta.BLOCK_HEAD.pack(count, len(where), len(what)) + where + what


def head(magic: bytes = b"E2DELTA2", size: int = SIZE, block_bytes: int = SIZE) -> bytes:
    return delta.HEAD.pack(magic, size, block_bytes, blake3(BASE).digest(), bytes(32))


ONE = block(1, [5], [1])
END = SIZE // 2


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (head(b"E2DELTA1") + ONE, "not a delta of a known form"),
        (head()[:-1], "has no header"),
        (head(size=SIZE + 1) + ONE, "can't be"),
        (head(block_bytes=0) + ONE, "can't be"),
        (head(block_bytes=513) + ONE, "can't be"),
        (head(block_bytes=2**26 + 2) + ONE, "can't be"),
        (head() + block(END + 1, [0] * (END + 1), [1] * (END + 1)), f"changes {END + 1} of {END} elements"),
        (head() + block(1, [END], [1]), "elements that the payload doesn't have"),
        (head() + delta.BLOCK_HEAD.pack(0, 1, 0) + b"x", "data for a block that it doesn't change"),
        (head() + delta.BLOCK_HEAD.pack(0, 0, 1) + b"x", "data for a block that it doesn't change"),
        (head() + delta.BLOCK_HEAD.pack(1, 2**31, 1), "longer than it can be"),
        (head() + ONE[:-1], "cut off"),
        (head() + block(1, [5, 6], [1]), "damaged"),
        (head() + block(2, [5], [1, 1]), "damaged"),
        (head() + delta.BLOCK_HEAD.pack(1, 4, 4) + b"no zstd!", "damaged"),
        (head() + ONE + b"x", "after the delta's last block"),
        (head() + ONE, "doesn't have the delta's hash"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_delta_is_said_and_nothing_else_is_raised(made: bytes, says: str) -> None:
    with pytest.raises(IntegrityError, match=says):
        delta.apply(BASE, made)


def test_a_block_of_which_every_element_changes_comes_back() -> None:
    new = (np.frombuffer(BASE, "<u2") + np.uint16(1)).tobytes()
    made = delta.encode(BASE, new)
    assert made is not None
    assert delta.apply(BASE, made) == new


@pytest.mark.parametrize("short", ["base", "new"])
def test_a_file_that_is_shorter_than_it_was_said_to_be_is_an_error(short: str) -> None:
    files: dict[str, Any] = {"base": io.BytesIO(BASE), "new": io.BytesIO(NEW)} | {short: io.BytesIO(BASE[:-2])}
    with pytest.raises(IntegrityError, match="shorter"):
        delta.write(files["base"], files["new"], io.BytesIO(), size=SIZE, base_hash=bytes(32), new_hash=bytes(32))
