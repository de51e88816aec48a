"""What a row of a trajectory table has to be like in itself: its tokens and its version spans.

Invariant: nothing here looks at what was leased, or at another row.
"""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa

from app.protocol.errors import Refused

MAX_LOGPROB = 1e-4
"""A log-prob is at most 0; this much is granted to rounding."""


def lengths(table: pa.Table, column: str) -> np.ndarray:
    """Length of each row's list."""
    return np.asarray(table.column(column).combine_chunks().value_lengths())


def flat(table: pa.Table, column: str) -> np.ndarray:
    """All lists of a column one after the other."""
    return np.asarray(table.column(column).combine_chunks().flatten())


def check_tokens(table: pa.Table, max_tokens: int) -> None:
    """Lengths, ids, log-probs and marks of each row. Raises Refused: `lengths`, `logprobs`."""
    tokens = lengths(table, "completion_ids")
    if (tokens < 1).any() or (tokens > max_tokens).any():
        raise Refused("lengths", f"completions must have 1…{max_tokens} tokens")
    if (lengths(table, "prompt_ids") < 1).any():
        raise Refused("lengths", "a prompt is empty")
    if (lengths(table, "logprobs") != tokens).any():
        raise Refused("lengths", "there must be one log-prob per completion token")
    if (lengths(table, "generated") != tokens).any():
        raise Refused("lengths", "there must be one mark per completion token that says whether the policy wrote it")
    generated = flat(table, "generated").astype(bool)
    if not np.logical_or.reduceat(generated, np.cumsum(tokens) - tokens).all():
        raise Refused("lengths", "a completion has no token that the policy wrote")
    if (flat(table, "completion_ids") < 0).any() or (flat(table, "prompt_ids") < 0).any():
        raise Refused("lengths", "token ids must not be negative")
    logprobs = flat(table, "logprobs")
    if not np.isfinite(logprobs).all() or (logprobs > MAX_LOGPROB).any():
        raise Refused("logprobs", "log-probs must be finite and at most 0")
    if logprobs[~generated].any():
        raise Refused("logprobs", "the log-prob of a token that the policy did not write must be 0")


def check_versions(table: pa.Table, newest_version: int) -> None:
    """Version spans of each row. Raises Refused: `versions`, `future_version`."""
    counts = lengths(table, "span_versions")
    if (counts < 1).any() or (counts != lengths(table, "span_starts")).any():
        raise Refused("versions", "span_versions and span_starts must be equally long and not empty")
    versions = flat(table, "span_versions")
    if (versions < 0).any():
        raise Refused("versions", "versions must not be negative")
    if (versions > newest_version).any():
        raise Refused("future_version", f"version {versions.max()} is newer than the published {newest_version}")
    tokens = lengths(table, "completion_ids")
    for starts, total in zip(table.column("span_starts").to_pylist(), tokens.tolist(), strict=True):
        if starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)) or starts[-1] >= total:
            raise Refused("versions", "span_starts must begin at 0, grow, and lie inside the completion")
