"""Statistics of prompts: how long their completions are, and how often they succeed.

Invariant: only accepted groups count, each once; a success is a reward, held to 0…1. What a prompt's groups showed is
forgotten when one of them is withdrawn: how much of it was that one's is not on record.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.dispatch import mean_after
from app.storage.models import Job, PromptStats

JOB_FORGET = 1024.0
"""The job's mean length and failure rate are those of about so many of the newest completions."""
_BLOCK = 500
"""Prompts in one query: databases bound the number of parameters."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one group showed: completions, sum of successes, mean tokens that the policy wrote of one."""

    prompt_index: int
    tries: int
    successes: float
    mean_length: float


def seen(table: pa.Table) -> dict[str, Seen]:
    """What each work item of a checked trajectory table showed."""
    generated = table.column("generated").combine_chunks()
    lengths = np.asarray(generated.value_lengths())
    totals = np.concatenate([[0], np.cumsum(np.asarray(generated.flatten(), dtype=np.int64))])
    ends = np.cumsum(lengths)
    own = (totals[ends] - totals[ends - lengths]).tolist()
    successes = np.clip(table.column("reward").to_numpy(), 0.0, 1.0).tolist()
    rows: dict[str, list[tuple[float, int]]] = {}
    prompts: dict[str, int] = {}
    columns = (table.column(name).to_pylist() for name in ("work_item", "prompt_index"))
    for item, prompt, success, length in zip(*columns, successes, own, strict=True):
        prompts[item] = prompt
        rows.setdefault(item, []).append((success, length))
    return {
        item: Seen(prompts[item], len(found), sum(s for s, _ in found), sum(n for _, n in found) / len(found))
        for item, found in rows.items()
    }


async def stats(session: AsyncSession, job: Job, prompts: Collection[int]) -> dict[int, PromptStats]:
    """What is on record of these prompts."""
    wanted, found = sorted(set(prompts)), {}
    for start in range(0, len(wanted), _BLOCK):
        query = select(PromptStats).where(
            PromptStats.job_id == job.id, PromptStats.prompt_index.in_(wanted[start : start + _BLOCK])
        )
        found.update({row.prompt_index: row for row in await session.scalars(query)})
    return found


async def note(session: AsyncSession, job: Job, groups: Sequence[Seen], now: float) -> None:
    """Take in what accepted groups showed. The caller has not yet counted them in `job.rollouts_accepted`."""
    known: Mapping[int, PromptStats] = await stats(session, job, [g.prompt_index for g in groups])
    rows, before = dict(known), job.rollouts_accepted
    for group in groups:
        row = rows.get(group.prompt_index)
        if row is None:
            row = PromptStats(
                job_id=job.id, prompt_index=group.prompt_index, tries=0, successes=0.0, mean_length=0.0, updated_at=now
            )
            session.add(row)
            rows[group.prompt_index] = row
        row.mean_length = mean_after(row.mean_length, row.tries, group.mean_length, group.tries)
        row.tries, row.successes, row.updated_at = row.tries + group.tries, row.successes + group.successes, now
        failed = 1 - group.successes / group.tries
        job.length_mean = mean_after(job.length_mean, before, group.mean_length, group.tries, forget=JOB_FORGET)
        job.failure_rate = mean_after(job.failure_rate, before, failed, group.tries, forget=JOB_FORGET)
        before += group.tries


async def forget(session: AsyncSession, job: Job, prompts: Collection[int]) -> None:
    """Groups of these prompts were withdrawn. The job's own means forget them by themselves."""
    wanted = sorted(set(prompts))
    for start in range(0, len(wanted), _BLOCK):
        block = PromptStats.prompt_index.in_(wanted[start : start + _BLOCK])
        await session.execute(delete(PromptStats).where(PromptStats.job_id == job.id, block))
