"""The partial file: what a node that must stop had sampled of groups that somebody else will finish.

Invariant: a file that `validate` accepts is a trajectory file in all but three things: samples of a group may be
missing, one that was cut short has `finish_reason` `abort` and fewer tokens than it may have, and rewards are 0, since
whoever finishes a group scores it. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from app.protocol import trajectory
from app.protocol.errors import Refused
from app.protocol.proofs import Proofs
from app.protocol.trajectory import FINISH_REASONS, Expected, Rollout

CUT = "abort"
"""The finish reason of a completion that is to be continued."""
PARTIAL_REASONS = FINISH_REASONS | {CUT}


def encode_partial(rollouts: Sequence[Rollout]) -> bytes:
    """Samples, finished or cut short, as a Parquet file; their rewards are left out. Raises ValueError if there is none
    or if `trajectory.encode` can't take them."""
    if not rollouts:
        raise ValueError("a partial file needs at least one sample")
    return trajectory.encode([dataclasses.replace(rollout, reward=0.0) for rollout in rollouts])


def validate(
    table: pa.Table,
    expected: Mapping[str, Expected],
    *,
    newest_version: int,
    max_tokens: int,
    quantised: str | None = None,
    proofs: Proofs = "none",
) -> None:
    """Hold the table of a partial file (`trajectory.read_table` opens it) against what was leased. Raises Refused.

    Reasons: those of `trajectory.validate`; `incomplete_group` here says that an item has no sample at all, or one that
    a group of its size can't have.
    """
    trajectory.check_quantisation(table, quantised)
    _check_samples(table, expected)
    trajectory.check_rows(table, newest_version=newest_version, max_tokens=max_tokens, finish_reasons=PARTIAL_REASONS)
    trajectory.check_proofs(table, proofs)
    cut = np.asarray(pc.equal(table.column("finish_reason"), CUT))
    lengths = np.asarray(table.column("completion_ids").combine_chunks().value_lengths())
    if (lengths[cut] >= max_tokens).any():
        raise Refused("lengths", f"a completion of {max_tokens} tokens is finished and can't be continued")
    if np.asarray(table.column("reward")).any():
        raise Refused("reward", "the rewards of a partial file must be 0")


def group_of(
    data: bytes,
    item: str,
    expected: Expected,
    *,
    newest_version: int,
    max_tokens: int,
    quantised: str | None = None,
    proofs: Proofs = "none",
) -> list[Rollout]:
    """The samples of one work item from a file that may hold others too. Raises Refused as `read_table` and `validate`
    do, for its own rows."""
    table = trajectory.read_table(data)
    own = table.filter(pc.equal(table.column("work_item"), item))
    validate(
        own, {item: expected},
        newest_version=newest_version, max_tokens=max_tokens, quantised=quantised, proofs=proofs,
    )  # fmt: skip
    return trajectory.rollouts(own)


def _check_samples(table: pa.Table, expected: Mapping[str, Expected]) -> None:
    seen: dict[str, set[int]] = {}
    prompts: dict[str, list[int]] = {}
    columns = ("work_item", "sample_index", "prompt_index", "prompt_ids")
    for item, sample, prompt, ids in zip(*(table.column(name).to_pylist() for name in columns), strict=True):
        if item not in expected:
            raise Refused("foreign_work_item", f"work item {item[:100]} is not leased to this node")
        want = expected[item]
        if prompt != want.prompt_index:
            raise Refused("wrong_prompt", f"work item {item} is for prompt {want.prompt_index}, not {prompt}")
        if prompts.setdefault(item, ids) != ids:
            raise Refused("wrong_prompt", f"the samples of work item {item} have different prompts")
        samples = seen.setdefault(item, set())
        if not 0 <= sample < want.group_size or sample in samples:
            raise Refused(
                "incomplete_group", f"work item {item} has samples 0…{want.group_size - 1}, at most once each"
            )
        samples.add(sample)
    missing = sorted(expected.keys() - seen.keys())
    if missing:
        raise Refused("incomplete_group", f"the file has no sample of work item {missing[0]}")
