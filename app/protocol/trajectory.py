"""The trajectory file: Parquet, one row a rollout, whole groups only.

Invariant: a table that `read_table` returns and `validate` accepts has exactly the schema, finite log-probs ≤ 0, one
log-prob and one mark per completion token (at least one of the policy's own), version spans that cover the completion,
and per work item as many rows as are expected, with sample indices within 0 … group_size − 1, each once; proofs of each
token that the policy wrote, if the job asks for them, and else none. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from app.protocol import proofs as toploc
from app.protocol.errors import Refused
from app.protocol.parquet_pages import check_pages, spelled_out
from app.protocol.trajectory_rows import check_tokens, check_versions, flat, lengths

SCHEMA = pa.schema(
    [
        pa.field("work_item", pa.string(), nullable=False),
        pa.field("prompt_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("generated", pa.list_(pa.bool_()), nullable=False),
        pa.field("span_versions", pa.list_(pa.int32()), nullable=False),
        pa.field("span_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ],
    metadata={b"echo2.trajectory": b"2"},
)
PROOFS = pa.field("proofs", pa.list_(pa.uint16()), nullable=False)
"""The column of a file with proofs (`app.protocol.proofs`), after those of SCHEMA."""
PROVEN = SCHEMA.append(PROOFS)
_ATTRIBUTE = {"generated": "written", "proofs": "proof_words"}
QUANTISATION = b"echo2.quantisation"
"""Key of the file's metadata: how the weights were quantised that all of it was sampled from; none: they were not."""
_TEXTS = [field.name for field in SCHEMA if pa.types.is_string(field.type)]
FINISH_REASONS = frozenset({"stop", "length"})
MAX_VALUES = 1 << 26
"""Numbers in one file. A file of few bytes can unpack to more than fits into memory."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion.

    `completion_ids` includes the end-of-sequence token when `finish_reason` is `stop`. `logprobs[i]` is the natural
    log-probability of `completion_ids[i]` under the distribution that it was sampled from. `span_versions[j]` is the
    policy version of the tokens from `span_starts[j]` up to the next start; `span_starts[0]` is 0. `quantisation` says
    that it was sampled from that version's quantised weights, whose log-probs these are; one for a whole file.
    """

    work_item: str
    prompt_index: int
    sample_index: int
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    span_versions: Sequence[int]
    span_starts: Sequence[int]
    reward: float
    finish_reason: str
    quantisation: str | None = None
    generated: Sequence[bool] | None = None
    """Of each completion token, whether the policy wrote it; None: all of them. What the environment of a multi-turn
    task wrote has the log-prob 0 and is never trained on."""
    proofs: bytes | None = None
    """`app.protocol.proofs` of the tokens that the policy wrote; None: the file has none of any rollout."""

    @property
    def proof_words(self) -> np.ndarray:
        """`proofs` as numbers."""
        return np.frombuffer(self.proofs or b"", dtype=toploc.WORD)

    @property
    def written(self) -> Sequence[bool]:
        """`generated`, spelled out."""
        return [True] * len(self.completion_ids) if self.generated is None else self.generated

    @property
    def own_tokens(self) -> int:
        """Completion tokens that the policy wrote."""
        return len(self.completion_ids) if self.generated is None else sum(self.generated)

    @property
    def oldest_version(self) -> int:
        """The version that staleness counts from."""
        return min(self.span_versions)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the control side knows about a work item that a file answers."""

    prompt_index: int
    group_size: int
    rows: int | None = None
    """How many of the group's samples the file has, where it is not all of them (`app.protocol.pruning`)."""


def encode(rollouts: Sequence[Rollout]) -> bytes:
    """Rollouts as a Parquet file. Raises ValueError if some are of quantised weights, or proven, and others are not."""
    proven = {r.proofs is not None for r in rollouts}
    if len(proven) > 1:
        raise ValueError("one file can't hold rollouts with proofs and others without")
    schema = PROVEN if True in proven else SCHEMA
    columns = {name: [getattr(r, _ATTRIBUTE.get(name, name)) for r in rollouts] for name in schema.names}
    table = pa.Table.from_pydict(columns, schema=schema)
    marks = {r.quantisation for r in rollouts}
    if len(marks) > 1:
        raise ValueError(f"one file can't hold rollouts of differently quantised weights: {sorted(map(str, marks))}")
    for mark in marks - {None}:
        table = table.replace_schema_metadata({**(SCHEMA.metadata or {}), QUANTISATION: mark})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=["work_item", "finish_reason"])
    return sink.getvalue()


def read_table(data: bytes, *, max_rows: int = 1_000_000, max_values: int = MAX_VALUES) -> pa.Table:
    """Open a file and check it against SCHEMA, or PROVEN. Raises Refused: `truncated`, `schema`, `too_many_rows`,
    `too_large`."""
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        rows = file.metadata.num_rows
        if rows > max_rows:
            raise Refused("too_many_rows", f"the file has {rows} rows, at most {max_rows} are accepted")
        found = file.schema_arrow
        wanted = PROVEN if found.names == PROVEN.names else SCHEMA
        if found.names != wanted.names or any(found.field(n).type != wanted.field(n).type for n in wanted.names):
            raise Refused("schema", f"columns are {found.names}; expected {SCHEMA.names} with the documented types")
        if _values(file.metadata) > max_values:
            raise Refused("too_large", f"the file has more than {max_values} values")
        check_pages(data, file.metadata, max_values)
        table = pq.ParquetFile(io.BytesIO(data), read_dictionary=_TEXTS).read()
        # Offsets inside their buffers, text that is UTF-8: what follows may rely on it.
        table.validate(full=True)
        table = spelled_out(table, max_values)
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise Refused("truncated", f"not a readable Parquet file: {error}"[:300]) from error
    if table.num_rows == 0:
        raise Refused("schema", "the file has no rows")
    if any(table.column(n).null_count or _inner_nulls(table, n) for n in wanted.names):
        raise Refused("schema", "the file has nulls")
    return table


def _values(metadata: pq.FileMetaData) -> int:
    """Values that the file unpacks to, whatever it is compressed to."""
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return sum(group.column(j).num_values for group in groups for j in range(group.num_columns))


def _inner_nulls(table: pa.Table, column: str) -> bool:
    """Whether a list holds nulls where there should be numbers."""
    return pa.types.is_list(PROVEN.field(column).type) and bool(
        table.column(column).combine_chunks().flatten().null_count
    )


def quantisation(table: pa.Table) -> str | None:
    """How the weights were quantised that a file was sampled from, by its own word; None: they were not."""
    mark = (table.schema.metadata or {}).get(QUANTISATION)
    return None if mark is None else mark.decode("utf-8", "replace")[:50]


def validate(
    table: pa.Table,
    expected: Mapping[str, Expected],
    *,
    newest_version: int,
    max_tokens: int,
    quantised: str | None = None,
    proofs: toploc.Proofs = "none",
) -> None:
    """Hold a table against what was leased, its mark against the job's `snapshot.quantise`, and its proofs against
    `trust.proofs`. Raises Refused.

    Reasons: `foreign_work_item`, `incomplete_group`, `wrong_prompt`, `lengths`, `logprobs`, `future_version`,
    `versions`, `finish_reason`, `reward`, `quantisation`, `proofs`.
    """
    check_quantisation(table, quantised)
    _check_groups(table, expected)
    check_rows(table, newest_version=newest_version, max_tokens=max_tokens, finish_reasons=FINISH_REASONS)
    check_proofs(table, proofs)


def check_quantisation(table: pa.Table, quantised: str | None) -> None:
    """Hold a file's mark against the job's `snapshot.quantise`. Raises Refused: `quantisation`."""
    found = quantisation(table)
    if found != quantised:
        raise Refused(
            "quantisation",
            f"the file says that it was sampled from weights quantised as {found or 'none'}; this job's are as "
            f"{quantised or 'none'}: use an agent that knows snapshot.quantise",
        )


def check_proofs(table: pa.Table, proofs: toploc.Proofs) -> None:
    """Hold the proofs of a table, whose rows are checked, against the job's `trust.proofs`; whether they are true is
    not looked at. Raises Refused: `proofs`."""
    proven = PROOFS.name in table.column_names
    if proven != (proofs != "none"):
        raise Refused(
            "proofs",
            f"the file has {'' if proven else 'no '}proofs; this job asks for {proofs}: use an agent that knows "
            "trust.proofs, with ECHO2_ENGINE=transformers",
        )
    if proven:
        for row in rollouts(table):
            toploc.check(row.proofs or b"", row.written, row.span_starts)


def check_rows(table: pa.Table, *, newest_version: int, max_tokens: int, finish_reasons: Set[str]) -> None:
    """Each row by itself. Raises Refused as `validate` does."""
    check_tokens(table, max_tokens)
    check_versions(table, newest_version)
    if not set(table.column("finish_reason").unique().to_pylist()) <= finish_reasons:
        raise Refused("finish_reason", f"finish_reason must be one of {sorted(finish_reasons)}")
    if not np.isfinite(table.column("reward").to_numpy()).all():
        raise Refused("reward", "a reward is not finite")


def _check_groups(table: pa.Table, expected: Mapping[str, Expected]) -> None:
    seen: dict[str, list[int]] = {}
    rows = zip(
        table.column("work_item").to_pylist(),
        table.column("sample_index").to_pylist(),
        table.column("prompt_index").to_pylist(),
        strict=True,
    )
    for item, sample, prompt in rows:
        if item not in expected:
            raise Refused("foreign_work_item", f"work item {item[:100]} is not leased to this node")
        if prompt != expected[item].prompt_index:
            raise Refused("wrong_prompt", f"work item {item} is for prompt {expected[item].prompt_index}, not {prompt}")
        seen.setdefault(item, []).append(sample)
    for item, want in expected.items():
        samples = seen.get(item, [])
        wanted = want.group_size if want.rows is None else want.rows
        whole = len(samples) == len(set(samples)) == wanted
        if not whole or min(samples) < 0 or max(samples) >= want.group_size:
            needed = "" if wanted == want.group_size else f"{wanted} of the "
            raise Refused(
                "incomplete_group", f"work item {item} needs {needed}samples 0…{want.group_size - 1} once each"
            )


def oldest_versions(table: pa.Table) -> dict[str, int]:
    """Work item → oldest version of any of its tokens."""
    oldest: dict[str, int] = {}
    for item, spans in zip(
        table.column("work_item").to_pylist(), table.column("span_versions").to_pylist(), strict=True
    ):
        oldest[item] = min(min(spans), oldest.get(item, spans[0]))
    return oldest


def rollouts(table: pa.Table) -> list[Rollout]:
    """All rows as Rollout, in file order."""
    mark = quantisation(table)
    drop = [name for name in ("generated", PROOFS.name) if name in table.column_names]
    rows = zip(table.drop_columns(drop).to_pylist(), _marks(table), _proofs(table), strict=True)
    return [Rollout(**row, quantisation=mark, generated=own, proofs=proofs) for row, own, proofs in rows]


def _proofs(table: pa.Table) -> list[bytes | None]:
    """`proofs` of each row; None where the table has no such column."""
    if PROOFS.name not in table.column_names:
        return [None] * table.num_rows
    words = flat(table, PROOFS.name).astype(toploc.WORD)
    ends = np.concatenate([[0], np.cumsum(lengths(table, PROOFS.name), dtype=np.int64)]).tolist()
    return [words[a:b].tobytes() for a, b in itertools.pairwise(ends)]


def _marks(table: pa.Table) -> list[list[bool] | None]:
    """`generated` of each row, None where it is all true; few rows need a list of it."""
    own = flat(table, "generated").astype(bool)
    ends = np.concatenate([[0], np.cumsum(lengths(table, "generated"), dtype=np.int64)])
    foreign = np.concatenate([[0], np.cumsum(~own)])[ends]
    pairs = zip(itertools.pairwise(ends.tolist()), np.diff(foreign).tolist(), strict=True)
    return [own[a:b].tolist() if others else None for (a, b), others in pairs]
