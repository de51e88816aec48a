"""Groups and samples that chance does not make twice. Pure.

Invariant: with honest log-probs a group is taken for copied or replayed with a probability below `UNLIKELY` × its size,
whatever the entropy of the policy: a short confident answer may come back as often as it likes.

Let p(y) be the probability of a completion y. The chance that some completion of probability at most p comes k times
among n is at most Σ_y C(n,k)·p(y)^k ≤ C(n,k)·p^(k−1), for Σ_y p(y) ≤ 1. The chance that n fresh samples are, in any
order, the n of an earlier group is at most n!·Π p(y_i).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from blake3 import blake3

from app.protocol.errors import Refused

UNLIKELY = 1e-9
"""What has a smaller chance than this is not taken for chance."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion: its token ids as bytes (`packed`), and the sum of their log-probs by who sampled it."""

    tokens: bytes
    logprob: float


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids, four bytes each, little-endian."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def log_chance_of_copies(n: int, k: int, logprob: float) -> float:
    """Log of the bound on the chance that among `n` samples some of log-prob at most `logprob` come `k` times."""
    return math.log(math.comb(n, k)) + (k - 1) * min(0.0, logprob)


def log_chance_of_replay(logprobs: Sequence[float]) -> float:
    """Log of the bound on the chance that a fresh group has the samples of one with these log-probs."""
    return math.lgamma(len(logprobs) + 1) + sum(min(0.0, p) for p in logprobs)


def copied(group: Sequence[Sample]) -> int:
    """How often the completion occurs that occurs more often than chance allows; 0 if there is none."""
    found: dict[bytes, list[float]] = {}
    for sample in group:
        found.setdefault(sample.tokens, []).append(sample.logprob)
    for logprobs in found.values():
        count = len(logprobs)
        if count > 1 and log_chance_of_copies(len(group), count, max(logprobs)) < math.log(UNLIKELY):
            return count
    return 0


def fingerprint(prompt_index: int, group: Sequence[Sample]) -> str | None:
    """What identifies a group whatever the order of its samples; None if chance may well make it again."""
    if log_chance_of_replay([s.logprob for s in group]) >= math.log(UNLIKELY):
        return None
    digest = blake3(prompt_index.to_bytes(8, "little", signed=True))
    for tokens in sorted(s.tokens for s in group):
        digest.update(len(tokens).to_bytes(8, "little") + tokens)
    return digest.hexdigest()


def groups(table: pa.Table) -> dict[str, tuple[int, list[Sample]]]:
    """Work item → (prompt index, samples) of a trajectory table."""
    found: dict[str, tuple[int, list[Sample]]] = {}
    tokens, ends = _flat(table, "completion_ids", "<i4")
    logprobs, _ = _flat(table, "logprobs", "<f8")
    sums = np.concatenate([[0.0], np.cumsum(logprobs)])
    columns = (table.column(name).to_pylist() for name in ("work_item", "prompt_index"))
    begin = 0
    for item, prompt, end in zip(*columns, ends, strict=True):
        sample = Sample(tokens[begin:end].tobytes(), float(sums[end] - sums[begin]))
        found.setdefault(item, (prompt, []))[1].append(sample)
        begin = end
    return found


def _flat(table: pa.Table, column: str, dtype: str) -> tuple[npt.NDArray[Any], list[int]]:
    """The values of a column of lists one after the other, and where the list of each row ends."""
    lists = table.column(column).combine_chunks()
    return np.asarray(lists.flatten()).astype(dtype), [int(end) for end in np.cumsum(np.asarray(lists.value_lengths()))]


def check(table: pa.Table) -> Mapping[str, str]:
    """Work item → fingerprint, of those that have one. Raises Refused: `copied`."""
    prints: dict[str, str] = {}
    for item, (prompt, group) in groups(table).items():
        if count := copied(group):
            raise Refused(
                "copied",
                f"work item {item} has the same completion {count} times, which its own log-probs make all but "
                "impossible",
            )
        found = fingerprint(prompt, group)
        if found is not None:
            if found in prints.values():
                raise Refused("replayed", f"work item {item} has the completions of another one in the same file")
            prints[item] = found
    return prints
