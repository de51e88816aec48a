"""What the pages of a Parquet file unpack to, by their own headers.

A reader unpacks what the pages say, and not what the file's footer says of them: with a footer that lies, and with an
encoding that writes one text many times, a few bytes become more than fits into memory.

Invariant: a file that passes `check_pages` has exactly the values that its footer says, each of them a number, or a
text that is written in the file or stands in one of its dictionaries; nothing is unpacked to find that out.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_HEADERS = {_DATA: (5, 2), _DATA_V2: (8, 4)}
"""Of each kind of data page: the field with its own header, and in that the one with the encoding."""
_ENCODINGS = frozenset({0, 2, 3, 8})
"""PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY."""
_VALUE_BYTES = 8
"""A number of the widest kind; texts are few."""
_LEAST_BYTES = 4
"""In a dictionary, of a number or a text."""
_I32, _BYTES, _STRUCT = 5, 8, 12
_INTEGERS = frozenset({4, 6})
_SIZES = {1: 0, 2: 0, 3: 1, 7: 8}
"""Thrift's kinds of a fixed size: true, false, a byte, a float. Lists, sets and maps are in no page's header."""
_MOST_FIELDS, _LONGEST, _DEEPEST = 100, 1 << 20, 4
_UNREADABLE = "a page's header can't be read"


def check_pages(data: bytes, metadata: pq.FileMetaData, max_values: int) -> None:
    """Walk through all pages. Raises ValueError for a file whose pages hold other than the footer says, or together are
    larger than `max_values` numbers could be."""
    room = _VALUE_BYTES * max_values
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        for j in range(group.num_columns):
            room -= _walk(data, group.column(j))
            if room < 0:
                raise ValueError(f"its pages unpack to more than {_VALUE_BYTES * max_values} bytes")


def spelled_out(table: pa.Table, most: int) -> pa.Table:
    """A table whose texts were read as dictionaries, so that one which is repeated in each row was unpacked once; now
    in each row. Raises ValueError for more than `most` bytes of them."""
    for place, field in enumerate(table.schema):
        if not pa.types.is_dictionary(field.type):
            continue
        column = table.column(place)
        sizes = (pc.sum(pc.take(pc.binary_length(c.dictionary), c.indices)).as_py() or 0 for c in column.chunks)
        if sum(sizes) > most:
            raise ValueError(f"the texts in {field.name} unpack to more than {most} bytes")
        table = table.set_column(place, field.with_type(pa.string()), column.cast(pa.string()))
    return table


def _walk(data: bytes, column: pq.ColumnChunkMetaData) -> int:
    """The bytes that the pages of a column unpack to."""
    first, start = column.dictionary_page_offset, column.data_page_offset
    at = first if column.has_dictionary_page and first and first < start else start
    end, left, unpacked = at + column.total_compressed_size, column.num_values, 0
    while left > 0:
        header, at = _struct(data, at, _DEEPEST)
        size, packed = _number(header, 2), _number(header, 3)
        at += packed
        if at > min(end, len(data)):
            raise ValueError("a page lies beyond its column")
        unpacked += size
        left -= _values(header, size)
    if left < 0:
        raise ValueError("the pages of a column hold more values than it has")
    return unpacked


def _values(header: dict[int, Any], size: int) -> int:
    """How many of a column's values are in a page."""
    kind = _number(header, 1)
    if kind == _DICTIONARY:
        if _number(header.get(7), 1) * _LEAST_BYTES > size:
            raise ValueError("a dictionary has more values than fit into it")
        return 0
    if kind not in _HEADERS:
        raise ValueError(f"a page is of the unknown kind {kind}")
    own, encoding = _HEADERS[kind]
    if _number(header.get(own), encoding) not in _ENCODINGS:
        raise ValueError("a page has an encoding that trajectory files don't have")
    return _number(header.get(own), 1)


def _number(fields: object, number: int) -> int:
    found = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(found, int) or found < 0:
        raise ValueError(f"a page's header lacks field {number}")
    return found


def _struct(data: bytes, at: int, deepest: int) -> tuple[dict[int, Any], int]:
    """Numbers and structs of a struct in Thrift's compact protocol, by their field numbers, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while (head := _byte(data, at)) != 0:
        at, kind = at + 1, head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _zigzag(data, at)
        if not 0 < number <= _MOST_FIELDS:
            raise ValueError(_UNREADABLE)
        if kind == _I32:
            fields[number], at = _zigzag(data, at)
        elif kind == _STRUCT and deepest:
            fields[number], at = _struct(data, at, deepest - 1)
        else:
            at = _past(data, at, kind)
    return fields, at + 1


def _past(data: bytes, at: int, kind: int) -> int:
    """Where something ends that is of no interest here."""
    if kind in _SIZES:
        return at + _SIZES[kind]
    if kind in _INTEGERS:
        return _varint(data, at)[1]
    size, at = _varint(data, at)
    if kind != _BYTES or size > _LONGEST:
        raise ValueError(_UNREADABLE)
    return at + size


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    raw, at = _varint(data, at)
    return (raw >> 1) ^ -(raw & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = _byte(data, at)
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError(_UNREADABLE)


def _byte(data: bytes, at: int) -> int:
    if not 0 <= at < len(data):
        raise ValueError("a page's header lies outside of the file")
    return data[at]
