"""A task of an installed package, by its entry point: found by name, loaded in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parents[3]
SOURCE = """
from app.protocol.errors import BadInput, FieldError
from app.tasks.base import Prompt
from parity_tasks.words import answer

class Parity:
    name = "parity"
    heldout_size = 2

    def __init__(self, params, seed):
        if params["most"] < 1:
            raise BadInput("most is 1 or more", errors=[FieldError("/task/params/most", "1 or more")])
        self.train_size, self.seed = params["most"], seed

    def train(self, index):
        return Prompt(index, f"is {index + self.seed} odd?", {"number": index + self.seed})

    heldout = train

    def reward(self, prompt, text):
        return float(text == answer(prompt.entry["number"]))
"""
ENTRY_POINTS = """[echo2.tasks]
parity = parity_tasks.parity:Parity
lost = parity_tasks.lost:Parity
number = parity_tasks.parity:SOURCE
"""
PROGRAM = """
import json, sys
from app.protocol.errors import BadInput
from app.protocol.task_spec import TaskSpec
from app.tasks.registry import check_task, is_sandboxed, load_task

def refused(name, **params):
    try:
        load_task(TaskSpec(name=name, params=params), 7)
    except BadInput as error:
        return [error.detail, [e.pointer for e in error.errors]]

spec = TaskSpec(name="parity", params={"most": 5}, limits={"processes": 1})
check_task(spec)
task = load_task(spec, 7)
try:
    prompt = task.train(3)
    found = {
        "sandboxed": is_sandboxed(spec), "about": [task.name, task.train_size, task.heldout_size],
        "prompt": [prompt.index, prompt.text],
        "rewards": [task.reward(prompt, text) for text in ("no", "yes", "?")],
    }
finally:
    task.close()
found |= {
    "unknown": refused("pariti"), "lost": refused("lost"), "number": refused("number"),
    "params": refused("parity", most=0), "missing": refused("parity"),
    "imported": sorted(name for name in sys.modules if name.startswith("parity_tasks")),
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a service says that runs where such a package is installed."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # What the service itself needs is where it is for these tests.
    (site / "service.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    package, described = site / "parity_tasks", site / "parity_tasks-1.0.dist-info"
    package.mkdir()
    described.mkdir()
    (package / "__init__.py").touch()
    (package / "words.py").write_text('def answer(number):\n    return "yes" if number % 2 else "no"\n')
    (package / "parity.py").write_text(SOURCE + "\nSOURCE = 3\n")
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: parity-tasks\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(ENTRY_POINTS)
    environment = {**os.environ, "PYTHONPATH": str(TOP), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-c", PROGRAM],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_it_works_like_any_other_task(found: dict[str, Any]) -> None:
    assert found["about"] == ["parity", 5, 2]
    assert found["prompt"] == [3, "is 10 odd?"]
    assert found["rewards"] == [1.0, 0.0, 0.0]


def test_none_of_its_code_is_loaded_by_who_asks(found: dict[str, Any]) -> None:
    assert found["sandboxed"] is True
    assert found["imported"] == []


def test_its_name_is_among_those_that_are_known(found: dict[str, Any]) -> None:
    detail, pointers = found["unknown"]
    assert "did you mean parity?" in detail
    assert "jsonl, lost, number, parity, poker, reasoning_gym, verifiers" in detail
    assert pointers == ["/task/name"]


@pytest.mark.parametrize(
    ("kind", "says", "where"),
    [
        ("lost", "the plug-in lost (parity_tasks.lost:Parity) can't be imported: ModuleNotFoundError", "/task/name"),
        ("number", "number is not a class or function that takes (params, seed)", "/task/name"),
        ("params", "most is 1 or more", "/task/params/most"),
        ("missing", "parity refuses its parameters: KeyError", "/task/params"),
    ],
)
def test_what_is_wrong_with_it_is_said(found: dict[str, Any], kind: str, says: str, where: str) -> None:
    detail, pointers = found[kind]
    assert says in detail
    assert pointers == [where]
