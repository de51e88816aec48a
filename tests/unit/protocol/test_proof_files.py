"""Files with proofs: only where the job asks for them, and then of every token that the policy wrote."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.protocol import partial
from app.protocol.errors import Refused
from app.protocol.proofs import Proofs, pack, prove
from app.protocol.trajectory import SCHEMA, Expected, Rollout, encode, read_table, rollouts, validate
from app.protocol.trust_spec import TrustSpec
from tests.unit.protocol.test_trajectory import refused

EXPECTED = {"j-0": Expected(7, 2)}


def proofs(*tokens: int) -> bytes:
    return pack(p for n in tokens for p in prove(n, np.asarray([[1, 2, 9]]), np.asarray([[n, 5, 60000]])))


def rows(*words: bytes | None, **changes: Any) -> list[Rollout]:
    made = Rollout("j-0", 7, 0, [1, 2, 3], [4, 5, 6], [-0.5, -0.25, 0.0], [4, 5], [0, 2], 1.0, "stop")
    return [replace(made, sample_index=i, proofs=w, **changes) for i, w in enumerate(words)]


def checked(made: list[Rollout], wanted: Proofs) -> Callable[[], None]:
    return lambda: validate(read_table(encode(made)), EXPECTED, newest_version=5, max_tokens=8, proofs=wanted)


def test_proofs_come_back_as_they_were_sent() -> None:
    made = rows(proofs(2, 1), proofs(1, 1, 1))
    checked(made, "toploc")()
    assert [r.proofs for r in rollouts(read_table(encode(made)))] == [proofs(2, 1), proofs(1, 1, 1)]
    assert rollouts(read_table(encode(made))) == made


def test_a_file_without_proofs_is_what_it_was() -> None:
    data = encode(rows(None, None))
    assert read_table(data).schema.names == SCHEMA.names
    assert {r.proofs for r in rollouts(read_table(data))} == {None}
    checked(rows(None, None), "none")()


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (rows(None, None), "toploc"),
        (rows(proofs(2, 1), proofs(2, 1)), "none"),
        (rows(proofs(2, 1), b""), "toploc"),
        (rows(proofs(2, 1), proofs(2)), "toploc"),
        (rows(proofs(2, 1), proofs(3)), "toploc"),
        (rows(proofs(2, 1), proofs(2, 1, 1)), "toploc"),
        (rows(proofs(2, 1), proofs(2, 1)[:-2]), "toploc"),
        (rows(*[proofs(2, 1)] * 2, generated=[True, False, True], logprobs=[-0.5, 0.0, -0.1]), "toploc"),
    ],
)
def test_proofs_that_are_missing_not_asked_for_or_torn_are_refused(made: list[Rollout], wanted: Proofs) -> None:
    assert refused(checked(made, wanted)) == "proofs"


def test_what_the_environment_wrote_needs_no_proof() -> None:
    checked(rows(*[proofs(1, 1)] * 2, generated=[True, False, True], logprobs=[-0.5, 0.0, -0.1]), "toploc")()


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        (pa.list_(pa.int32()), [[], []]),
        (pa.binary(), [b"", b""]),
        (pa.list_(pa.list_(pa.uint16())), [[], []]),
        (pa.list_(pa.uint16()), [[1, None], [1]]),
        (pa.list_(pa.uint16()), [[1], None]),
    ],
)
def test_a_column_of_another_kind_is_refused(kind: pa.DataType, cells: list[Any]) -> None:
    table = read_table(encode(rows(None, None))).append_column(pa.field("proofs", kind), pa.array(cells, kind))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    assert refused(lambda: read_table(sink.getvalue())) == "schema"


def test_all_of_a_file_has_proofs_or_none() -> None:
    with pytest.raises(ValueError, match="proofs"):
        encode(rows(proofs(2, 1), None))


def test_beginnings_carry_their_proofs_too() -> None:
    made = rows(proofs(2, 1), finish_reason="abort")
    data = partial.encode_partial(made)
    how: dict[str, Any] = {"newest_version": 5, "max_tokens": 8}
    [back] = partial.group_of(data, "j-0", EXPECTED["j-0"], proofs="toploc", **how)
    assert back.proofs == proofs(2, 1)
    assert refused(lambda: partial.group_of(data, "j-0", EXPECTED["j-0"], **how)) == "proofs"
    bare = partial.encode_partial(rows(None, finish_reason="abort"))
    with pytest.raises(Refused, match="no proofs"):
        partial.group_of(bare, "j-0", EXPECTED["j-0"], proofs="toploc", **how)


def test_proofs_that_nobody_looks_at_are_not_asked_for() -> None:
    with pytest.raises(ValueError, match="audits"):
        TrustSpec(proofs="toploc", audit_share=0, probation=0, each_version=False)
    assert TrustSpec(proofs="toploc", audit_share=0.1, probation=0, each_version=False).proofs == "toploc"
