"""Trajectory files come from strangers: what is wrong is refused with its reason, what is right comes back."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.protocol.errors import Refused
from app.protocol.trajectory import (
    SCHEMA,
    Expected,
    Rollout,
    encode,
    oldest_versions,
    read_table,
    rollouts,
    validate,
)

EXPECTED = {"j-0": Expected(7, 2), "j-1": Expected(3, 2)}


def rollout(item: str, prompt: int, sample: int) -> Rollout:
    return Rollout(item, prompt, sample, [1, 2, 3], [4, 5, 6], [-0.5, -0.25, 0.0], [4, 5], [0, 2], 1.0, "stop")


def good() -> list[Rollout]:
    return [rollout("j-0", 7, 0), rollout("j-0", 7, 1), rollout("j-1", 3, 1), rollout("j-1", 3, 0)]


def check(rows: list[Rollout], *, newest: int = 5, max_tokens: int = 8) -> None:
    validate(read_table(encode(rows)), EXPECTED, newest_version=newest, max_tokens=max_tokens)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.detail
    assert len(caught.value.detail) < 400, "a stranger's text does not fill our logs"
    return caught.value.reason


def test_a_good_file_is_accepted() -> None:
    check(good())
    assert oldest_versions(read_table(encode(good()))) == {"j-0": 4, "j-1": 4}


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("wrong_prompt", {"prompt_index": 8}),
        ("foreign_work_item", {"work_item": "j-2"}),
        ("foreign_work_item", {"work_item": "x" * 100_000}),
        ("incomplete_group", {"sample_index": 0}),
        ("incomplete_group", {"sample_index": 2}),
        ("incomplete_group", {"sample_index": -1}),
        ("lengths", {"completion_ids": [], "logprobs": []}),
        ("lengths", {"completion_ids": [1] * 9, "logprobs": [-1.0] * 9}),
        ("lengths", {"logprobs": [-0.5, -0.25]}),
        ("lengths", {"logprobs": [-0.5] * 4}),
        ("lengths", {"prompt_ids": []}),
        ("lengths", {"prompt_ids": [1, -2]}),
        ("lengths", {"completion_ids": [1, -1, 2]}),
        ("lengths", {"generated": [True, True]}),
        ("lengths", {"generated": [True] * 4}),
        ("lengths", {"generated": [False] * 3, "logprobs": [0.0] * 3}),
        ("logprobs", {"generated": [True, False, True]}),  # of a token that an environment wrote
        ("logprobs", {"logprobs": [-0.5, float("nan"), -0.5]}),
        ("logprobs", {"logprobs": [-0.5, float("-inf"), -0.5]}),
        ("logprobs", {"logprobs": [-0.5, 0.01, -0.5]}),
        ("future_version", {"span_versions": [4, 6]}),
        ("versions", {"span_versions": [-1, 4]}),
        ("versions", {"span_versions": [], "span_starts": []}),
        ("versions", {"span_versions": [4]}),
        ("versions", {"span_starts": [0]}),
        ("versions", {"span_starts": [1, 2]}),
        ("versions", {"span_starts": [0, 0]}),
        ("versions", {"span_starts": [0, 3]}),
        ("versions", {"span_starts": [0, -1]}),
        ("versions", {"span_versions": [4, 4, 5], "span_starts": [0, 2, 1]}),
        ("finish_reason", {"finish_reason": "abort"}),
        ("finish_reason", {"finish_reason": ""}),
        ("reward", {"reward": float("nan")}),
        ("reward", {"reward": float("inf")}),
    ],
)
def test_each_fault_has_its_reason(reason: str, change: dict[str, Any]) -> None:
    rows = good()
    rows[1] = replace(rows[1], **change)
    assert refused(lambda: check(rows)) == reason


@pytest.mark.parametrize(
    "rows",
    [good()[:3], good()[:2], [*good(), rollout("j-0", 7, 2)], [*good(), rollout("j-0", 7, 1)]],
    ids=["one sample less", "a whole group less", "one sample more", "the same sample twice"],
)
def test_groups_are_whole(rows: list[Rollout]) -> None:
    assert refused(lambda: check(rows)) == "incomplete_group"


@pytest.mark.parametrize(
    "change",
    [{"logprobs": [0.0, 1e-5, 0.0]}, {"span_versions": [5], "span_starts": [0]}, {"finish_reason": "length"},
     {"span_versions": [5, 4]}, {"completion_ids": [1] * 8, "logprobs": [-1.0] * 8}, {"reward": -3.5},
     {"generated": [False, True, False], "logprobs": [0.0, -0.5, 0.0]}, {"completion_ids": [0, 0, 0]},
     {"prompt_ids": [0]}, {"span_versions": [0], "span_starts": [0]}],
)  # fmt: skip
def test_what_is_unusual_but_right_is_accepted(change: dict[str, Any]) -> None:
    rows = good()
    rows[0] = replace(rows[0], **change)
    check(rows)


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def with_column(name: str, values: list[Any], kind: pa.DataType) -> bytes:
    table = read_table(encode(good()))
    at = SCHEMA.names.index(name)
    return parquet(table.set_column(at, pa.field(name, kind), pa.array(values, kind)))


def test_not_parquet_is_truncated() -> None:
    data = encode(good())
    for bad in (b"", b"PAR1", data[:-1], data[: len(data) // 2], data[1:], b"x" * 100, pickle.dumps([1, 2])):
        assert refused(functools.partial(read_table, bad)) == "truncated"


def test_the_schema_is_exact() -> None:
    table = read_table(encode(good()))
    renamed = table.rename_columns(["item", *SCHEMA.names[1:]])
    swapped = table.select([*SCHEMA.names[1:], SCHEMA.names[0]])
    for bad in (
        parquet(table.drop_columns(["reward"])),
        parquet(table.append_column("extra", pa.array([1] * 4))),
        parquet(renamed),
        parquet(swapped),
        with_column("reward", [1.0] * 4, pa.float64()),
        with_column("prompt_index", ["7"] * 4, pa.string()),
        with_column("logprobs", [[-1.0] * 3] * 4, pa.list_(pa.float64())),
        encode([]),
    ):
        assert refused(functools.partial(read_table, bad)) == "schema"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("reward", [1.0, None, 1.0, 1.0]),
        ("work_item", ["j-0", None, "j-1", "j-1"]),
        ("completion_ids", [[4, 5, 6], None, [4, 5, 6], [4, 5, 6]]),
        ("completion_ids", [[4, 5, 6], [4, None, 6], [4, 5, 6], [4, 5, 6]]),
        ("prompt_ids", [[1], [None], [1], [1]]),
        ("logprobs", [[-1.0, -1.0, None]] * 4),
        ("span_versions", [[4, None]] * 4),
        ("span_starts", [[0, None]] * 4),
    ],
)
def test_nulls_are_refused_inside_lists_too(name: str, values: list[Any]) -> None:
    data = with_column(name, values, SCHEMA.field(name).type)
    assert refused(lambda: read_table(data)) == "schema"


def test_too_many_rows() -> None:
    data = encode(good())
    assert read_table(data, max_rows=4).num_rows == 4
    assert refused(lambda: read_table(data, max_rows=3)) == "too_many_rows"


def test_few_bytes_that_unpack_to_gigabytes_are_refused() -> None:
    """A run-length encoded list of equal tokens: the file is small, its contents are not."""
    many = 1_000_001
    tokens = pa.ListArray.from_arrays(pa.array([0, many], pa.int32()), pa.repeat(pa.scalar(5, pa.int32()), many))
    row = read_table(encode(good()[:1]))
    at = SCHEMA.names.index("completion_ids")
    bomb = row.set_column(at, SCHEMA.field("completion_ids"), tokens)
    sink = io.BytesIO()
    pq.write_table(bomb, sink, compression="zstd", use_dictionary=["completion_ids"])
    assert len(sink.getvalue()) < 10_000
    assert read_table(sink.getvalue(), max_values=2 * many).num_rows == 1
    assert refused(lambda: read_table(sink.getvalue(), max_values=1_000_000)) == "too_large"


def test_text_that_is_no_text_is_refused() -> None:
    table = read_table(encode(good()))
    broken = pa.Array.from_buffers(
        pa.string(), 4, [None, pa.py_buffer(b"".join(i.to_bytes(4, "little") for i in (0, 1, 2, 3, 4))),
                         pa.py_buffer(b"\xff\xfe\xff\xfe")],
    )  # fmt: skip
    data = parquet(table.set_column(0, SCHEMA.field("work_item"), broken))
    assert refused(lambda: read_table(data)) == "truncated"


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_file_is_refused_or_read_but_nothing_else_is_raised(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encode(good()))
    for _ in range(rng.randint(1, 6)):
        match rng.randrange(3):
            case 0:
                data[rng.randrange(len(data))] = rng.randrange(256)
            case 1:
                at = rng.randrange(len(data) - 50)
                del data[at : at + rng.randint(1, 40)]
            case _:
                at = rng.randrange(len(data))
                data[at:at] = rng.randbytes(rng.randint(1, 8))
    with contextlib.suppress(Refused):
        validate(read_table(bytes(data), max_rows=100), EXPECTED, newest_version=5, max_tokens=8)


TOKEN = st.integers(0, 2**31 - 1)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Rollout], dict[str, Expected]]:
    rows: list[Rollout] = []
    expected: dict[str, Expected] = {}
    group_size = draw(st.integers(2, 4))
    for item in draw(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4, unique=True)):
        expected[item] = Expected(draw(st.integers(0, 2**40)), group_size)
        for sample in range(group_size):
            tokens = draw(st.lists(TOKEN, min_size=1, max_size=12))
            starts = sorted({0, *draw(st.lists(st.integers(0, len(tokens) - 1), max_size=3))})
            rows.append(
                Rollout(
                    item,
                    expected[item].prompt_index,
                    sample,
                    draw(st.lists(TOKEN, min_size=1, max_size=8)),
                    tokens,
                    draw(st.lists(st.floats(-(2.0**100), 0, width=32), min_size=len(tokens), max_size=len(tokens))),
                    draw(st.lists(st.integers(0, 50), min_size=len(starts), max_size=len(starts))),
                    starts,
                    draw(st.floats(-(2.0**100), 2.0**100, width=32)),
                    draw(st.sampled_from(["stop", "length"])),
                )
            )
    return draw(st.permutations(rows)), expected


@settings(max_examples=100, deadline=None)
@given(groups())
def test_every_valid_set_of_rollouts_comes_back_as_it_was(made: tuple[list[Rollout], dict[str, Expected]]) -> None:
    rows, expected = made
    table = read_table(encode(rows), max_rows=len(rows))
    validate(table, expected, newest_version=50, max_tokens=12)
    assert rollouts(table) == rows
    oldest = oldest_versions(table)
    assert oldest == {item: min(r.oldest_version for r in rows if r.work_item == item) for item in expected}, (
        "staleness counts from the oldest token of the group"
    )


def test_who_wrote_which_token_comes_back_with_its_row() -> None:
    marks = ([True, False, True], None, [False, True, True], None)
    rows = [
        row if mark is None else replace(row, generated=mark, logprobs=[-0.5 * own for own in mark])
        for row, mark in zip(good(), marks, strict=True)
    ]
    check(rows)
    back = rollouts(read_table(encode(rows)))
    assert [row.generated for row in back] == list(marks)
    assert [row.own_tokens for row in back] == [2, 3, 2, 3]
    assert back[1].written == [True] * 3


@pytest.mark.parametrize(("mark", "wanted"), [(None, None), ("int8", "int8"), ("int8", None), (None, "int8")])
def test_a_file_says_how_its_weights_were_quantised_and_is_held_to_the_jobs_setting(
    mark: str | None, wanted: str | None
) -> None:
    table = read_table(encode([replace(row, quantisation=mark) for row in good()]))
    assert {row.quantisation for row in rollouts(table)} == {mark}

    def held() -> None:
        validate(table, EXPECTED, newest_version=5, max_tokens=8, quantised=wanted)

    if mark == wanted:
        held()
    else:
        assert refused(held) == "quantisation"


def test_one_file_is_of_one_kind_of_weights() -> None:
    first, *rest = good()
    with pytest.raises(ValueError, match="int8"):
        encode([replace(first, quantisation="int8"), *rest])
