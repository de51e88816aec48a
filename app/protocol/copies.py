"""Completions that chance does not make twice. Pure.

Invariant: with honest log-probs a group is taken for copied or replayed with a probability below `UNLIKELY` × its size,
whatever the entropy of the policy: a short confident answer may come back as often as it likes.

Let p(y) be the probability of a completion y. The chance that some completion of probability at most p comes k times
among n is at most Σ_y C(n,k)·p(y)^k ≤ C(n,k)·p^(k−1), for Σ_y p(y) ≤ 1. Of m earlier completions, whatever they are and
whoever wrote them, k come again among n fresh samples; there are C(m,k) ways to choose these k and n!/(n−k)! ways to
place them, so the chance that some k with a product of probabilities of at most π do is at most C(m,k)·n!/(n−k)!·π. Of
k that are all of one of g earlier groups of s, there are g·C(s,k) choices only. It is the fresh samples' own policy
that gives p: one that has learnt an answer by heart gives it again and again.
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
RARE = 3.0
"""Nats. Likelier completions show nothing even if a whole group of them comes again, and are not remembered."""


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


def log_chance_of_replay(logprobs: Sequence[float], n: int, known: int) -> float:
    """Log of the bound on the chance that completions with these log-probs, or the least likely of them, are among `n`
    fresh samples and among `known` earlier ones: the smallest of the bounds for 1, 2, … of them."""
    chances, product = [0.0], 0.0
    for k, logprob in enumerate(sorted(logprobs), start=1):
        product += min(0.0, logprob)
        ways = _log_choose(max(known, len(logprobs)), k) + math.lgamma(n + 1) - math.lgamma(n - k + 1)
        chances.append(ways + product)
    return min(chances)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def copied(group: Sequence[Sample], sampled: int | None = None) -> int:
    """How often the completion occurs that occurs more often than chance allows; 0 if there is none. `sampled`: how
    many there were to choose the group from, if there were more."""
    found: dict[bytes, list[float]] = {}
    for sample in group:
        found.setdefault(sample.tokens, []).append(sample.logprob)
    n = max(len(group), sampled or 0)
    for logprobs in found.values():
        count = len(logprobs)
        if count > 1 and log_chance_of_copies(n, count, max(logprobs)) < math.log(UNLIKELY):
            return count
    return 0


@dataclass(frozen=True, slots=True)
class Prints:
    """What is remembered of a group. `sampled`: how many samples it was made, or chosen, from."""

    prompt_index: int
    sampled: int
    rare: Mapping[str, float]
    """Fingerprints of its completions that are not likely → log-prob."""


def fingerprint(prompt_index: int, tokens: bytes) -> str:
    """What identifies a completion (`packed`) of a prompt: the prompt, then 128 bits; hex digits, always as many."""
    return f"{prompt_index:016x}{blake3(tokens).hexdigest(length=16)}"


def all_of(prompt_index: int) -> tuple[str, str]:
    """The least and the greatest fingerprint that completions of a prompt can have."""
    return f"{prompt_index:016x}{'0' * 32}", f"{prompt_index:016x}{'f' * 32}"


def prints(prompt_index: int, group: Sequence[Sample], sampled: int) -> Prints:
    """Those of a group."""
    likeliest: dict[bytes, float] = {}
    for sample in group:
        likeliest[sample.tokens] = max(sample.logprob, likeliest.get(sample.tokens, -math.inf))
    rare = {fingerprint(prompt_index, tokens): p for tokens, p in likeliest.items() if p <= -RARE}
    return Prints(prompt_index, max(sampled, len(group)), rare)


def replayed(found: Prints, seen: Mapping[str, str], known: int, largest: int) -> bool:
    """Whether chance does not explain that a group has completions that were `seen` before, fingerprint → the group
    that had it, when `known` of the prompt are remembered, of groups of at most `largest`."""
    # One bound for each number of completions that may be looked at, of all groups together and of single ones.
    limit = math.log(UNLIKELY / (2 * found.sampled))
    again: dict[str, list[float]] = {}
    for name, logprob in found.rare.items():
        if name in seen:
            again.setdefault(seen[name], []).append(logprob)
    together = [p for logprobs in again.values() for p in logprobs]
    if log_chance_of_replay(together, found.sampled, known) < limit:
        return True
    groups = math.log(max(1, known))
    return any(groups + log_chance_of_replay(one, found.sampled, largest) < limit for one in again.values())


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


def check(table: pa.Table, sampled: Mapping[str, int]) -> dict[str, Prints]:
    """Work item → what is remembered of it. `sampled`: how many each was made from. Raises Refused: `copied`."""
    found: dict[str, Prints] = {}
    for item, (prompt, group) in groups(table).items():
        if count := copied(group, sampled.get(item)):
            raise Refused(
                "copied",
                f"work item {item} has the same completion {count} times, which its own log-probs make all but "
                "impossible",
            )
        found[item] = prints(prompt, group, sampled.get(item, 0))
    return found
