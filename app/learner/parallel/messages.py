"""What rank 0 announces: JSON, and groups as Parquet.

Invariant: what was packed is the same for every rank that unpacks it, bit for bit.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace

from app.learner.buffer import Group
from app.protocol import trajectory
from app.protocol.base import Strict
from app.protocol.job import JobSpec


class Loading(Strict):
    """The job, and the commit of its model on the Hugging Face Hub that rank 0 has loaded."""

    spec: JobSpec
    revision: str | None


class Rehearsal(Strict):
    """`GRPOTrainer.rehearse` with these arguments."""

    rollouts: int
    prompts: list[list[int]]
    completion_tokens: int


class Sampling(Strict):
    """Answers to these prompts (token ids) that all ranks sample together, of at most so many tokens."""

    prompts: list[list[int]]
    max_tokens: int


class Progress(Strict):
    """What comes with the tensors of a restored state: the number of steps, and which optimizer tensors there are."""

    steps: int
    optimizer: list[str]
    skipped: bool = False
    """Whether the last of them changed nothing."""


def packed(groups: Sequence[Group]) -> bytes:
    """Whole groups in their order, without proofs: training has no use for them, and borrowed groups have none."""
    return trajectory.encode([replace(r, proofs=None) for g in groups for r in g.rollouts])


def unpacked(data: bytes) -> list[Group]:
    """The groups of `packed`, with log-probs and rewards in float32."""
    # No stranger's file, but what rank 0 holds: a step of many long answers is larger than a file may be.
    rows = trajectory.rollouts(trajectory.read_table(data, max_rows=sys.maxsize, max_values=sys.maxsize))
    return [Group(item, tuple(made)) for item, made in itertools.groupby(rows, key=lambda r: r.work_item)]
