"""Several ranks on a task that comes as files: rank 0 alone has it and asks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.learner.tiny import tiny_model
from app.protocol.task_spec import TaskSpec
from app.storage.stores import FolderStore
from app.tasks.files import TaskIntake, fetch_files
from tests.integration.learner.fake_control import JOB, FakeService, serving
from tests.integration.learner.test_learner_process import CACHE, spec
from tests.integration.learner.test_ranks_process import ranks_of, spawn

SOURCE = """
from app.tasks.base import Prompt, Reply


class Talk:
    name = "talk"
    train_size = 400
    heldout_size = 24

    def __init__(self, params, seed):
        self.first = params["first"]

    def train(self, index):
        return Prompt(index, f"Spell this word backward: {self.first + index}", {})

    def heldout(self, index):
        return Prompt(index, f"Spell this word backward: h{self.first + index}", {})

    def respond(self, prompt, turns):
        return Reply(" again") if len(turns) == 1 and prompt.index % 2 else None

    def episode_reward(self, prompt, turns):
        return float(sum(map(len, turns)) % 2)

    def reward(self, prompt, completion_text):
        return self.episode_reward(prompt, [completion_text])
"""


def words(count: int) -> str:
    letters = "abcdefghij"
    rows = ["".join(letters[int(digit)] for digit in f"{number:03}") for number in range(count)]
    return "".join(json.dumps({"prompt": f"Spell this word backward: {w}", "answer": w[::-1]}) + "\n" for w in rows)


def run_job(tmp_path: Path, task: dict[str, Any]) -> tuple[FakeService, dict[int, int]]:
    """A job of two steps on two ranks, from the files that are in `tmp_path`; the processes that each rank has."""
    store = FolderStore(tmp_path / "objects")
    taken = TaskIntake(tmp_path, store)(TaskSpec.model_validate(task), JOB)
    job = spec(task=taken.model_dump(), stop={"steps": 2}, snapshot={"keyframe_every": 1}, sampling={"max_tokens": 24})
    folder = fetch_files(store.get_file, JOB, taken, tmp_path / "fleet")
    service = FakeService(job, store, tiny_model(CACHE), folder)
    with serving(service) as url:
        process = spawn(tmp_path, url, "job.log")
        try:
            service.wait(lambda: len(service.evals) > 0, 120)
            ranks = ranks_of(process)
            sandboxes = {rank: len(learner.children()) for rank, learner in ranks.items()}
            assert process.wait(150) == 0, (tmp_path / "job.log").read_text()[-5000:]
        finally:
            process.kill()
    assert sorted(service.steps) == [1, 2]
    assert service.done is not None
    assert service.done["status"] == "succeeded", service.done["reason"]
    assert [e["step"] for e in service.evals] == [0, 2, 2]
    return service, sandboxes


@pytest.mark.timeout(240)
def test_a_class_from_a_file_is_asked_by_rank_0_alone(tmp_path: Path):
    (tmp_path / "talk.py").write_text(SOURCE)
    service, sandboxes = run_job(tmp_path, {"name": "talk.py:Talk", "params": {"first": 1000}})
    assert sandboxes[0] > 0
    assert sandboxes[1] == 0, "replies and rewards are asked for once"
    assert all(e["prompts"] == 24 and 0 < e["reward"] < 1 for e in service.evals)


@pytest.mark.timeout(240)
def test_prompts_from_a_file(tmp_path: Path):
    (tmp_path / "words.jsonl").write_text(words(300))
    service, _ = run_job(tmp_path, {"name": "jsonl", "params": {"train": "words.jsonl", "scorer": "exact"}})
    assert all(e["prompts"] == 32 for e in service.evals)
