"""Environments of the verifiers package as tasks, without its model clients. Passes with the package and without."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from app.protocol.errors import BadInput
from app.protocol.task_spec import TaskSpec
from app.tasks.base import is_heldout, is_multi_turn
from app.tasks.registry import is_sandboxed
from app.tasks.verifiers import VerifiersTask
from tests.unit.tasks.verifiers_side import standin


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch):
    import sys

    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(Path(standin.__file__).parent))
    standin.install()
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("verifiers", "echo2_")):
            del sys.modules[name]


def opened(**params: Any) -> VerifiersTask:
    return VerifiersTask.from_params(params, 0)


def test_one_turn_is_scored_by_the_task_s_own_rewards():
    task = opened(taskset="echo2-sums")
    # Two rows were there before.
    assert task.train_size + task.heldout_size == 40
    assert all(is_heldout(task.heldout(i).text) for i in range(task.heldout_size))
    assert not any(is_heldout(task.train(i).text) for i in range(task.train_size))
    prompt = task.train(0)
    right = str(int(prompt.text.split()[2].partition("+")[0]) + 1)
    assert [task.reward(prompt, text) for text in (right, "no", "")] == [1.0, 0.0, 0.0]
    assert task.respond(prompt, ["no"]) is None
    assert is_multi_turn(task)
    with pytest.raises(BadInput, match="there is no number 99"):
        task.train(99)


def test_an_environment_with_a_loop_is_replayed_turn_by_turn():
    task = opened(taskset="echo2-guess", config={"top": 20})
    prompt = next(p for p in map(task.train, range(task.train_size)) if p.entry["task"].data.answer == 4)
    assert prompt.text.startswith("Be brief.\n\nGuess my number, game ")
    replies = [task.respond(prompt, turns) for turns in (["0"], ["9"], ["9", "1"], ["9", "1", "4"], ["9"] * 4)]
    assert [reply and reply.text for reply in replies] == ["higher", "lower", "higher", None, None]
    # The task's own reward, at a weight of 0.5, and the environment's.
    episodes = (["4"], ["9", "4"], ["9", "1", "4"], ["9"] * 4, ["9"])
    assert [task.episode_reward(prompt, turns) for turns in episodes] == [1.5, 1.5, 1.0, 0.0, 0.5]


def test_only_as_many_tasks_as_asked_for_are_read():
    task = opened(taskset="echo2-guess", size=5)
    assert task.train_size + task.heldout_size == 5


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, ["taskset is required"]),
        ({"taskset": "echo2-sums", "sise": 3}, ["'sise' is not a parameter"]),
        ({"taskset": "echo2-sums", "size": 0}, ["from 1 to"]),
        ({"taskset": "echo2-none"}, ["ModuleNotFoundError"]),
        ({"taskset": "echo2-sums", "config": {"other": 1}}, ["ValidationError"]),
        ({"taskset": "echo2-sums", "config": {"contained": True}}, ["a container", "setup()", "the reward tidy"]),
        ({"taskset": "echo2-pair"}, ["agents one, two"]),
    ],
)
def test_what_can_not_be_had_is_refused_at_the_start(params: dict[str, Any], says: list[str]):
    with pytest.raises(BadInput) as caught:
        opened(**params)
    assert all(part in caught.value.detail for part in says)


def test_its_code_is_never_run_in_the_process_that_asks():
    assert is_sandboxed(TaskSpec(name="verifiers", params={"taskset": "echo2-sums"}))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(BadInput, match=r"echo2\[verifiers\]"):
        opened(taskset="echo2-sums")
    assert importlib.util.find_spec("app.tasks.verifiers") is not None
