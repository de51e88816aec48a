"""The split, the reward and what a user reads when a task is misspelt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app.protocol.errors import BadInput, TaskFailed
from app.protocol.task_spec import TaskSpec
from app.tasks.base import Prompt
from app.tasks.plain import PLAIN
from app.tasks.reasoning_gym import ReasoningGymTask, is_heldout
from app.tasks.registry import TASKS, load_task
from app.tasks.sandbox import SandboxTask

SPELL = {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5}


def spell(seed: int = 0, **extra: object):
    return load_task(TaskSpec(name="reasoning_gym", params={**SPELL, **extra}), seed)


def test_same_index_is_the_same_prompt_whatever_was_asked_before():
    forward, jumping = spell(), spell()
    assert forward.train_size > 10_000
    far = jumping.train(900)
    assert [jumping.train(i).text for i in range(50)] == [forward.train(i).text for i in range(50)]
    assert far.text == forward.train(900).text
    assert [jumping.heldout(i).text for i in range(20)] == [forward.heldout(i).text for i in range(20)]


def test_building_is_lazy():
    task = spell(size=1_000_000)
    assert task.train(0).text.startswith("Spell this word backward")
    assert task._scanned < 100


@pytest.mark.parametrize("other_seed", [1, 12345])
def test_heldout_never_meets_training_even_of_another_seed_or_case(other_seed: int):
    one, two = spell(0), spell(other_seed)
    train = {t.train(i).text.lower() for t in (one, two) for i in range(t.train_size)}
    heldout = {t.heldout(i).text.lower() for t in (one, two) for i in range(t.heldout_size)}
    assert train.isdisjoint(heldout)
    assert 0.1 < one.heldout_size / (one.train_size + one.heldout_size) < 0.15


def test_questions_are_unique():
    task = spell(size=3000)
    texts = [task.train(i).text for i in range(task.train_size)]
    assert len(texts) == len(set(texts)) < 3000


def test_the_split_is_the_documented_one():
    import zlib

    for question in ("a", "Spell this word backward (example: sun -> nus): Ohmic"):
        assert is_heldout(question) == (zlib.crc32(question.lower().encode()) % 8 == 0)


def test_only_a_whole_answer_is_rewarded():
    task = load_task(TaskSpec(name="reasoning_gym", params={"dataset": "gcd"}), 0)
    prompt = task.train(0)
    right = prompt.entry["answer"]
    assert task.reward(prompt, right) == 1.0
    assert task.reward(prompt, f"I think {right}") == 0.0
    assert task.reward(prompt, "") == 0.0


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("reasoning_jim", {}, ["reasoning_jim", *TASKS]),
        ("reasoning_gym", {}, ["dataset is required", "spell_backward"]),
        ("reasoning_gym", {"dataset": "spell_backwards"}, ["spell_backwards", "did you mean spell_backward"]),
        ("reasoning_gym", {"dataset": "spell_backward", "word_len": 3}, ["word_len", "max_word_len", "min_word_len"]),
        ("reasoning_gym", {"dataset": "spell_backward", "seed": 3}, ["seed", "the job's"]),
        ("reasoning_gym", {"dataset": "spell_backward", "min_word_len": 9, "max_word_len": 3}, ["max_word_len must"]),
        ("reasoning_gym", {"dataset": "spell_backward", "min_word_len": "a"}, ['min_word_len is "a"', "a number"]),
        ("reasoning_gym", {"dataset": "spell_backward", "min_word_len": None}, ["min_word_len is null", "a number"]),
        ("reasoning_gym", {"dataset": "gcd", "size": 0}, ["size", "from 1"]),
        ("reasoning_gym", {"dataset": "gcd", "size": True}, ["size", "from 1"]),
    ],
)
def test_a_wrong_spec_says_what_to_change(name: str, params: dict, says: list[str]):
    with pytest.raises(BadInput) as caught:
        load_task(TaskSpec(name=name, params=params), 0)
    assert all(part in caught.value.detail for part in says)
    assert caught.value.errors[0].pointer.startswith("/task/")


def test_parameters_of_which_no_question_can_be_made_are_bad_input():
    """The package takes them, and has no word that is so long."""
    params = {"dataset": "spell_backward", "min_word_len": 60, "max_word_len": 70}
    task = load_task(TaskSpec(name="reasoning_gym", params=params), 0)
    with pytest.raises(BadInput, match="can't make its question 0 with these parameters") as caught:
        task.train(0)
    assert caught.value.errors[0].pointer == "/task/params"


def test_an_index_outside_is_an_error():
    task = load_task(TaskSpec(name="reasoning_gym", params={"dataset": "gcd", "size": 10}), 0)
    for index in (-1, task.train_size):
        with pytest.raises(BadInput, match="there is no number"):
            task.train(index)


def test_tasks_load_without_torch():
    code = (
        "import sys; from app.tasks.registry import load_task; from app.protocol.job import TaskSpec;"
        "load_task(TaskSpec(name='reasoning_gym', params={'dataset': 'gcd'}), 0).train(0);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_datasets_that_are_scored_here_only_compare_texts():
    """Others of the package read an answer as Python."""
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    own = {name for name in PLAIN if DATASETS[name][0].score_answer is not ProceduralDataset.score_answer}
    assert own == {"spell_backward"}
    task = spell()
    assert {task.reward(task.train(0), text) for text in ("__import__('os')", "9**9**9**9", "(", "")} == {0.0}


def test_an_answer_that_is_code_runs_in_the_sandbox_at_most(tmp_path: Path):
    mark = tmp_path / "mark"
    params = {"dataset": "countdown", "size": 20}
    spec = TaskSpec(name="reasoning_gym", params=params, limits={"processes": 1, "timeout_s": 4})
    task = load_task(spec, 0)
    assert isinstance(task, SandboxTask)
    prompt = task.train(0)
    assert task.reward(prompt, f"__import__('os').system('touch {mark}')") == 0.0
    assert mark.exists() is ("files" not in task.cut_off)
    with pytest.raises(TaskFailed, match="longer than 4 s"):
        task.reward(prompt, "9**9**9**9")
    task.close()


def test_what_the_package_can_not_read_is_no_right_answer():
    """Its scorer raises for a text that is no number."""
    task = ReasoningGymTask.from_params({"dataset": "prime_factorization", "size": 20}, 0)
    prompt = task.train(0)
    assert [task.reward(prompt, text) for text in (prompt.entry["answer"], "x", "[", "")] == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(KeyError):
        task.reward(Prompt(0, prompt.text, {"question": prompt.text}), "2")
