"""The tasks that docs/tasks.md shows, taken from there and run as a job would run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.protocol.errors import BadInput
from app.protocol.task_spec import TaskLimits, TaskSpec
from app.storage.stores import FolderStore
from app.tasks.base import is_multi_turn
from app.tasks.files import TaskIntake, fetch_files
from app.tasks.plain import PLAIN
from app.tasks.registry import load_task
from app.tasks.sandbox import SandboxTask

PAGE = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()


def source_of(name: str) -> str:
    """The block of the page that defines a class."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    [found] = [block for block in blocks if f"\nclass {name}:" in block]
    return found


def as_a_job(tmp_path: Path, name: str, **params: Any) -> Any:
    """Through the control service's folder, the store, and the learner's or node's folder."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / f"{name.lower()}.py").write_text(source_of(name))
    store = FolderStore(tmp_path / "objects")
    spec = TaskSpec(name=f"{name.lower()}.py:{name}", params=params, limits={"processes": 1})
    taken = TaskIntake(tmp_path / "tasks", store)(spec, "job-1")
    task = load_task(taken, 0, fetch_files(store.get_file, "job-1", taken, tmp_path / "there"))
    assert isinstance(task, SandboxTask)
    return task


def test_a_task_of_thirty_lines(tmp_path: Path):
    assert len(source_of("Parity").splitlines()) <= 30
    task = as_a_job(tmp_path, "Parity", first=1000)
    prompts = [*map(task.train, range(task.train_size)), *map(task.heldout, range(task.heldout_size))]
    assert len({prompt.text for prompt in prompts}) == 1000
    assert [prompts[0].text, prompts[-1].text] == [f"Is {n} even? Answer yes or no." for n in (1000, 1999)]
    assert [task.reward(prompts[0], text) for text in (" Yes\n", "no", "")] == [1.0, 0.0, 0.0]
    assert task.reward(prompts[1], "no") == 1.0
    with pytest.raises(BadInput, match="there is no number 800"):
        task.train(800)
    task.close()


def test_a_task_of_several_turns(tmp_path: Path):
    task = as_a_job(tmp_path, "Guess")
    assert is_multi_turn(task)
    train, heldout = map(task.train, range(task.train_size)), map(task.heldout, range(task.heldout_size))
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in heldout}
    prompt = task.train(1)  # 37
    replies = [task.respond(prompt, turns) for turns in (["50"], ["50", "20"], ["50", "x"], ["1"] * 5, ["37"])]
    assert [reply and reply.text for reply in replies] == ["lower", "higher", None, None, None]
    assert [task.episode_reward(prompt, turns) for turns in (["50", "37"], ["1"] * 5, ["50"])] == [1.0, 0.0, 0.0]
    task.close()


def test_the_table_of_limits_is_the_limits():
    table = PAGE.partition("| `task.limits` |")[2].partition("\n\n")[0]
    found = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE))
    defaults = {name: field.default for name, field in TaskLimits.model_fields.items()}
    assert found == {name: "null" if value is None else str(value).lower() for name, value in defaults.items()}


def test_the_page_s_numbers_of_deals():
    task = load_task(TaskSpec(name="poker"), 0)
    assert f"{task.train_size:,} to train on, {task.heldout_size} held out" in PAGE


def test_the_page_s_number_of_datasets_whose_answers_are_only_compared():
    assert f"for {len(PLAIN)} datasets an answer is compared as a text" in PAGE
