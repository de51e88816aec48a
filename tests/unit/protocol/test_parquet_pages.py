"""Files of a few kilobytes that would unpack to more than fits into memory, whatever their footers say."""

from __future__ import annotations

import io
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.protocol.errors import Refused
from app.protocol.parquet_pages import check_pages
from app.protocol.trajectory import SCHEMA, encode, read_table, rollouts
from tests.unit.protocol.test_trajectory import good

MANY = 1_000_001


def written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"compression": "zstd", **options})
    return sink.getvalue()


def many_tokens() -> bytes:
    """One answer of MANY equal tokens."""
    tokens = pa.ListArray.from_arrays(pa.array([0, MANY], pa.int32()), pa.array(np.full(MANY, 5, np.int32)))
    at = SCHEMA.names.index("completion_ids")
    return written(read_table(encode(good()[:1])).set_column(at, SCHEMA.field(at), tokens))


def varint(value: int, size: int = 0) -> bytes:
    """A number as Thrift writes it, with as many bytes as are wanted."""
    groups = [(value >> shift) & 127 for shift in range(0, 70, 7)]
    used = max(size, 1, *(i + 1 for i, group in enumerate(groups) if group))
    return bytes(group | (128 if i < used - 1 else 0) for i, group in enumerate(groups[:used]))


def with_lying_footer(data: bytes, says: int) -> bytes:
    """The file with another number of values in its footer than its pages have."""
    (size,) = struct.unpack("<I", data[-8:-4])
    begin, true = len(data) - 8 - size, varint(2 * MANY)
    footer = data[begin:-8]
    assert footer.count(true) > 0
    return data[:begin] + footer.replace(true, varint(2 * says, len(true))) + data[-8:]


def refused(data: bytes, **limits: int) -> Refused:
    with pytest.raises(Refused) as caught:
        read_table(data, **limits)
    return caught.value


def test_a_footer_that_says_less_than_the_pages_hold_is_refused() -> None:
    data = many_tokens()
    assert len(data) < 10_000
    assert read_table(data).num_rows == 1
    for says in (10, MANY - 1, MANY + 1):
        assert refused(with_lying_footer(data, says)).reason == "truncated", says
    assert "more values" in refused(with_lying_footer(data, 10)).detail


def repeated(text: str, rows: int) -> bytes:
    """A file in which the same work item is named in each row, and written once."""
    table = read_table(encode(good()[:1] * rows))
    return written(table.set_column(0, SCHEMA.field(0), pa.array([text] * rows)))


def test_a_long_text_that_is_repeated_in_each_row_is_unpacked_once_and_refused() -> None:
    data = repeated("x" * 100_000, 200)
    assert len(data) < 10_000
    assert "texts in work_item" in refused(data, max_values=1_000_000).detail
    assert read_table(repeated("x" * 100, 200)).column("work_item").to_pylist() == ["x" * 100] * 200


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none"},
        {"compression": "snappy", "data_page_version": "2.0"},
        {"use_dictionary": False},
        {"use_dictionary": True, "data_page_size": 64, "write_batch_size": 2},
        {"row_group_size": 3, "write_page_checksum": True, "write_page_index": True},
        {"write_statistics": False, "dictionary_pagesize_limit": 1},
    ],
)
def test_whoever_wrote_it_and_however_an_honest_file_is_read(options: dict[str, Any]) -> None:
    rows = good() * 25
    assert rollouts(read_table(written(read_table(encode(rows)), **options))) == rollouts(read_table(encode(rows)))


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("work_item", "DELTA_BYTE_ARRAY"),
        ("work_item", "DELTA_LENGTH_BYTE_ARRAY"),
        ("prompt_index", "DELTA_BINARY_PACKED"),
    ],
)
def test_encodings_that_make_much_of_little_are_refused(name: str, encoding: str) -> None:
    data = written(read_table(encode(good())), use_dictionary=False, column_encoding={name: encoding})
    assert "encoding" in refused(data).detail


def field(step: int, kind: int, payload: bytes = b"") -> bytes:
    return bytes([step << 4 | kind]) + payload


def i32(step: int, value: int) -> bytes:
    return field(step, 5, varint(2 * value if value >= 0 else -2 * value - 1))


def page(own: bytes, *, kind: int = 0, step: int = 2, unpacked: int = 8, packed: int = 0) -> bytes:
    """The header of a page; `own`: the fields of its kind's header, which is `step` fields further than the third."""
    return i32(1, kind) + i32(1, unpacked) + i32(1, packed) + field(step, 12, own + b"\0") + b"\0" + b"." * packed


def data_page(values: int, *more: bytes) -> bytes:
    return page(i32(1, values) + i32(1, 0) + b"".join(more))


def walk(data: bytes, values: int = 8, most: int = 1000, **column: Any) -> str:
    """What is wrong with a file of one column; nothing if it passes."""
    told = {"dictionary_page_offset": None, "has_dictionary_page": False, "data_page_offset": 0, "num_values": values}
    only = SimpleNamespace(**{**told, "total_compressed_size": len(data), **column})
    group = SimpleNamespace(num_columns=1, column=lambda _: only)
    try:
        check_pages(data, SimpleNamespace(num_row_groups=1, row_group=lambda _: group), most)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return ""


DICTIONARY = page(i32(1, 2) + i32(1, 0), kind=2, step=4)
V2 = page(i32(1, 8) + i32(1, 0) + i32(1, 8) + i32(1, 8) + field(3, 1), kind=3, step=5, packed=3)


@pytest.mark.parametrize(
    "data",
    [
        data_page(8),
        data_page(3) + data_page(5),
        DICTIONARY + data_page(8),
        V2,
        data_page(
            8, i32(1, 3), i32(1, 3), field(1, 12, field(1, 8, varint(3) + b"abc") + field(2, 6, varint(1)) + b"\0")
        ),
        data_page(0) + data_page(8, field(9, 2), field(1, 3, b"x"), field(1, 7, b"." * 8), field(1, 4, varint(7))),
    ],
)
def test_pages_that_hold_what_they_should_pass(data: bytes) -> None:
    assert walk(data) == ""
    assert walk(b"...." + data, data_page_offset=4) == ""


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (data_page(9), "more values than it has"),
        (data_page(7), "outside of the file"),
        (data_page(-8) + data_page(16), "lacks field 1"),
        (page(i32(1, 2) + i32(1, 5)), "an encoding"),
        (page(i32(1, 8) + i32(1, 0), kind=1), "unknown kind 1"),
        (page(i32(1, 3) + i32(1, 0), kind=2, step=4) + data_page(8), "a dictionary has more values"),
        (page(i32(1, 8) + i32(1, 0), unpacked=8001), "unpack to more than 8000 bytes"),
        (page(i32(1, 8) + i32(1, 0), packed=5)[:-1], "beyond its column"),
        # A reader takes the first, as a number of another kind is none to it.
        (page(i32(1, 9) + field(15, 6, varint(2)) + i32(1, 0)), ""),
        (page(i32(1, 9) + field(0, 6, varint(2) + varint(2 * 8)) + field(0, 5, varint(4) + varint(0))), "more values"),
        # The 65537th field is the first one to whoever counts in 16 bits.
        (data_page(8, field(0, 5, varint(2 * 65537) + varint(2 * 99))), "can't be read"),
        (data_page(8, field(1, 9, b"\x15\x02")), "can't be read"),
        (data_page(8, field(1, 8, varint(1 << 30) + b"abc")), "can't be read"),
        (data_page(8, field(1, 6, b"\xff" * 11)), "can't be read"),
        (field(1, 12) * 50, "can't be read"),
        (b"", "outside of the file"),
    ],
)
def test_pages_that_hold_anything_else_do_not(data: bytes, wrong: str) -> None:
    found = walk(data)
    assert found
    assert wrong in found


@pytest.mark.parametrize("column", [{"data_page_offset": -1}, {"data_page_offset": 99}, {"total_compressed_size": 3}])
def test_a_column_that_lies_elsewhere_does_not(column: dict[str, int]) -> None:
    assert walk(data_page(8), **column)


def test_the_dictionary_is_where_a_reader_begins() -> None:
    data = page(i32(1, 2) + i32(1, 0), kind=2, step=4, unpacked=4) + data_page(8)
    at = len(data) - len(data_page(8))
    begun = {"data_page_offset": at, "total_compressed_size": len(data)}
    assert walk(data, **begun) == ""
    assert walk(data, **begun, has_dictionary_page=True, dictionary_page_offset=0) == ""
    led = b"." + data
    told = {"data_page_offset": at + 1, "total_compressed_size": len(data), "dictionary_page_offset": 1}
    assert "a dictionary has more values" in walk(led, **told, has_dictionary_page=True)
    assert walk(led, **told, has_dictionary_page=False) == ""
