"""Environments written and installed as a user would, with the real package: what our stand-in can't tell."""

from __future__ import annotations

from typing import Any

import pytest

from app.protocol.errors import BadInput, TaskFailed
from app.protocol.task_spec import TaskSpec
from app.storage.stores import FolderStore
from app.tasks.base import is_heldout
from app.tasks.files import TaskIntake
from app.tasks.registry import load_task
from app.tasks.sandbox import MultiTurnSandboxTask
from app.tasks.verifiers import VerifiersTask


def opened(taskset: str, env: str | None = None, **config: Any) -> VerifiersTask:
    return VerifiersTask.from_params({"taskset": taskset, "env": env, "config": config}, 0)


def first(task: VerifiersTask, text: str) -> Any:
    return next(p for p in map(task.train, range(task.train_size)) if text in p.text)


def test_one_turn_and_rewards_of_all_kinds():
    task = opened("echo2-rows")
    assert task.train_size + task.heldout_size == 40
    assert all(is_heldout(task.heldout(i).text) for i in range(task.heldout_size))
    prompt = task.train(3)
    assert prompt.text.startswith("Only the number.\n\nWhat is ")
    right = str(3 * int(prompt.text.split()[5]))
    assert task.reward(prompt, right) == 1.0 + 0.25 + 0.25 + 0.125
    assert task.reward(prompt, "I don't know") == 0.125
    assert task.reward(prompt, "") == 0.25 + 0.125, "the state of one answer is not that of the next"
    assert task.respond(prompt, [right]) is None


def test_a_reward_that_raises_is_an_error_with_its_words():
    task = opened("echo2-rows")
    with pytest.raises(TaskFailed, match="ValueError: no such answer"):
        task.reward(task.train(0), "boom")
    assert task.reward(task.train(0), "x") > 0


def test_several_turns_with_a_limit_a_stop_and_a_finalizer():
    task = opened("echo2-rounds")
    prompt = task.train(0)
    assert prompt.text == "A word of 4 letters."
    word = prompt.entry["task"].data.word
    wrong = "zz" + word[2:]
    replies = [task.respond(prompt, turns) for turns in ([wrong], [wrong, word], [wrong] * 3, [wrong] * 4)]
    assert [reply and reply.text for reply in replies] == ["2 letters are right.", None, "2 letters are right.", None]
    assert task.respond(prompt, ["I give up"]) is None
    # Found or not, an eighth a turn, 1 for the limit, 2 for the stop.
    episodes = [[word], [wrong, word], [wrong] * 4, ["I give up"], [wrong]]
    assert [task.episode_reward(prompt, turns) for turns in episodes] == [0.875, 0.75, -1.5, -2.125, -0.125]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("tools", "tool servers"),
        ("setup", r"a runtime for setup\(\)"),
        ("runtime", "a runtime for the reward ran"),
        ("stop", r"the model's calls for cut\(\)"),
        ("intercept", r"the model's calls for change\(\)"),
        ("image", r"a container \(image\)"),
        ("picture", "is told pictures"),
        ("shots", "a message of the role assistant"),
        ("none", "every other turn needs a message"),
    ],
)
def test_tasks_that_want_what_is_not_to_be_had_are_refused(kind: str, says: str):
    with pytest.raises(BadInput, match=says):
        opened("echo2-odd", kind=kind)


def test_a_prompt_in_parts_is_one_text():
    assert opened("echo2-odd", kind="parts").train(0).text == "Be brief.\n\nAnd 3+3?"


def test_a_task_without_a_reward_is_an_error():
    task = opened("echo2-odd", kind="silent")
    with pytest.raises(TaskFailed, match="gave no reward"):
        task.reward(task.train(0), "x")


@pytest.mark.parametrize(
    ("taskset", "env", "config", "says"),
    [
        ("echo2-rows", "best-of-n", {}, "runs its agent 4 times"),
        ("echo2-rows", "user-sim", {}, "agents assistant, user"),
        ("echo2-shell", None, {}, r"its start\(\).*the harness bash, max_output_tokens"),
        ("echo2-bundled", None, {}, "the harness echo2-bundled"),
        ("echo2-old", None, {}, "__all__"),
        ("echo2-rows", None, {"rows": "many"}, "ValidationError"),
        ("echo2-rows", None, {"task": {"judges": [{"id": "reference"}]}}, "a judge model"),
        ("echo2-odd-env", None, {"habit": "twice"}, "runs its agent 2 times"),
        ("echo2-odd-env", None, {"habit": "twice-at-once"}, "runs its agent 2 times"),
        ("echo2-odd-env", None, {"habit": "silent"}, "never asks its agent"),
    ],
)
def test_environments_that_want_what_is_not_to_be_had_are_refused(taskset: str, env: Any, config: Any, says: str):
    with pytest.raises(BadInput, match=says):
        opened(taskset, env, **config)


@pytest.mark.parametrize(("habit", "says"), [("rude", "bare turn"), ("borrows", "no attribute 'provision'")])
def test_environments_that_break_the_rules_of_their_agent_do_not_load(habit: str, says: str):
    with pytest.raises(BadInput, match=says):
        opened("echo2-odd-env", habit=habit)


def test_an_environment_that_swallows_what_stops_it_asks_all_the_same():
    task = opened("echo2-odd-env", habit="swallows")
    assert task.train(0).text.startswith("Number ")
    assert task.respond(task.train(0), ["four"]) is None
    assert task.reward(task.train(0), "four") == 4.0


def test_an_environment_that_ends_its_agent_by_itself_sees_its_rewards():
    task = opened("echo2-odd-env", habit="closes")
    assert task.reward(task.train(0), "four") == 44.0


def test_an_environment_that_breaks_is_an_error():
    task = opened("echo2-odd-env", habit="breaks")
    with pytest.raises(TaskFailed, match="RuntimeError: after the answer"):
        task.reward(task.train(0), "x")


@pytest.mark.timeout(400)
def test_through_the_sandbox_as_a_job_would(tmp_path: Any):
    spec = TaskSpec(name="verifiers", params={"taskset": "echo2-rounds"}, limits={"processes": 1})
    taken = TaskIntake(None, FolderStore(tmp_path / "objects"))(spec, "job-1")
    task = load_task(taken, 0)
    assert isinstance(task, MultiTurnSandboxTask)
    prompt = task.train(0)
    reply = task.respond(prompt, ["zzzz"])
    assert reply is not None
    assert reply.text.endswith("letters are right.")
    assert task.episode_reward(prompt, ["zzzz"]) == -0.125
    task.close()
