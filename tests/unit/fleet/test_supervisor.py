"""How the service starts a learner on its own machine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.run import get_args_parser

from app.fleet.core import Core
from app.fleet.supervisor import Supervisor
from app.settings import Settings


async def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is started for job j."""
    seen: list[str] = []

    async def started(*words: str, **_: Any) -> SimpleNamespace:
        seen.extend(words)
        return SimpleNamespace(pid=1, returncode=None)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    secrets = SimpleNamespace(learner_token=lambda job_id: f"token of {job_id}")
    core = SimpleNamespace(settings=Settings(state_dir=tmp_path), secrets=secrets)
    await Supervisor(cast(Core, core)).start("j")
    return seen


async def test_a_learner_of_one_process_is_started_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await command(tmp_path, monkeypatch) == [sys.executable, "-m", "app.learner", "--job", "j"]


async def test_a_learner_of_several_ranks_is_started_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO2_LEARNER_PROCESSES", "4")
    words = await command(tmp_path, monkeypatch)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    read = get_args_parser().parse_args(words[3:])
    assert (read.nproc_per_node, read.standalone) == ("4", True)
    assert (read.module, read.training_script, read.training_script_args) == (True, "app.learner", ["--job", "j"])
