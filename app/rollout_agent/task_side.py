"""The job's task on a node: its files first, then the task, and how many of its rewards may be computed at once.

Invariant: a node loads the files that the job was created with, by size and hash, or no task at all.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from app.protocol.node import JoinAnswer
from app.protocol.task_spec import TaskSpec
from app.rollout_agent.assets import fetch_assets
from app.rollout_agent.client import NodeClient
from app.tasks.base import Task
from app.tasks.registry import load_task

SCORE_THREADS = 4
"""Rewards side by side, of a task that says nothing about it."""


async def open_task(client: NodeClient, joined: JoinAnswer, folder: Path) -> Task:
    """The task of a job. Raises BadInput, TaskFailed, IntegrityError, and what the client raises."""
    if joined.task_files:
        await fetch_assets(client, joined.task_files, folder)
    return await asyncio.to_thread(load_task, joined.task, joined.seed, folder if joined.task_files else None)


def score_threads(spec: TaskSpec) -> int:
    """Threads that ask for rewards: as many as the task has processes."""
    return spec.limits.processes or min(SCORE_THREADS, os.cpu_count() or 1)
