"""Rows of prompts and answers: what is refused, with its line; how they are split and scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.errors import BadInput, TaskFailed
from app.protocol.task_spec import TaskSpec
from app.tasks.base import is_heldout
from app.tasks.registry import load_task
from app.tasks.sandbox import SandboxTask
from app.tasks.scorers import SCORERS, last_number


def rows(folder: Path, name: str, *lines: Any) -> None:
    (folder / f"{name}.jsonl").write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )


def opened(folder: Path, **params: Any) -> Any:
    return load_task(TaskSpec(name="jsonl", params={"train": "x", **params}), 0, folder)


def pairs(count: int, word: str = "q") -> list[dict[str, Any]]:
    return [{"prompt": f"{word}{i}", "answer": i} for i in range(count)]


def test_without_a_second_file_the_text_decides(tmp_path: Path):
    rows(tmp_path, "train", *pairs(100), *pairs(30), "", {"prompt": "Q1", "answer": 1})
    task = opened(tmp_path)
    texts = {split: [getattr(task, split)(i).text for i in range(size)] for split, size in sizes(task).items()}
    assert all(is_heldout(text) for text in texts["heldout"])
    assert not any(is_heldout(text) for text in texts["train"])
    # Rows that were there before count once; another case is another prompt of the same split.
    assert sorted(texts["train"] + texts["heldout"]) == sorted([*(f"q{i}" for i in range(100)), "Q1"])
    assert texts["train"] == sorted(texts["train"], key=[*(f"q{i}" for i in range(100)), "Q1"].index)


def sizes(task: Any) -> dict[str, int]:
    return {"train": task.train_size, "heldout": task.heldout_size}


def test_fields_template_and_a_file_of_its_own_for_held_out_rows(tmp_path: Path):
    rows(tmp_path, "train", {"question": "1+1", "gold": 2})
    rows(tmp_path, "heldout", {"question": "2+2", "gold": "4"})
    task = opened(tmp_path, heldout="y", prompt_field="question", answer_field="gold", template="Q: {prompt}\nA:")
    assert sizes(task) == {"train": 1, "heldout": 1}
    prompt = task.train(0)
    assert prompt.text == "Q: 1+1\nA:"
    assert [task.reward(prompt, text) for text in ("2", " 2\n", "4")] == [1.0, 1.0, 0.0]
    with pytest.raises(BadInput, match="there is no number 1"):
        task.heldout(1)


def test_white_space_around_a_line_does_not_matter(tmp_path: Path):
    lines = [
        b'{"prompt": "a", "answer": 1}  \r\n',
        b"  \n",
        b' {"prompt": "b", "answer": 2}\n',
        b'{"prompt":"c","answer":3}',
    ]
    (tmp_path / "train.jsonl").write_bytes(b"".join(lines))
    rows(tmp_path, "heldout", *pairs(1))
    task = opened(tmp_path, heldout="y")
    assert [task.train(i).text for i in range(task.train_size)] == ["a", "b", "c"]
    assert [task.reward(task.train(i), str(i + 1)) for i in range(3)] == [1.0] * 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"answer": "1"}', "has no text in the field 'prompt'"),
        ('{"prompt": "", "answer": "1"}', "has no text in the field 'prompt'"),
        ('{"prompt": "a"}', "has no text or number in the field 'answer'"),
        ('{"prompt": "a", "answer": true}', "has no text or number in the field 'answer'"),
        ('{"prompt": "a", "answer": [1]}', "has no text or number in the field 'answer'"),
        ('{"prompt": "\\ud800", "answer": 1}', "holds half a surrogate pair, which is no character"),
        ('{"prompt": "a", "answer": "\\udc00"}', "holds half a surrogate pair, which is no character"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str):
    rows(tmp_path, "train", {"prompt": "a", "answer": 1}, "", line, {"prompt": "b", "answer": 1}, line)
    with pytest.raises(BadInput) as caught:
        opened(tmp_path)
    assert [error.detail for error in caught.value.errors] == [f"line 3 {says}", f"line 5 {says}"]
    assert caught.value.errors[0].pointer == "/task/params/train"


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"sorer": "math"}, "'sorer' is not a parameter"),
        ({"scorer": "maths"}, "known: contains, exact, math, number"),
        ({"template": "Q:"}, "must hold {prompt}"),
        ({"prompt_field": 3}, "prompt_field must be a text"),
        ({"heldout": 3}, "heldout must be a text"),
        ({"train": None}, "train is required"),
    ],
)
def test_a_wrong_parameter_is_named(tmp_path: Path, params: Any, says: str):
    rows(tmp_path, "train", *pairs(3))
    with pytest.raises(BadInput) as caught:
        opened(tmp_path, **params)
    assert says in caught.value.detail


def test_of_many_wrong_lines_the_first_twenty_are_named(tmp_path: Path):
    rows(tmp_path, "train", *pairs(1), *["{"] * 30)
    with pytest.raises(BadInput) as caught:
        opened(tmp_path)
    assert [error.detail for error in caught.value.errors] == [f"line {n} is no JSON" for n in range(2, 22)]
    assert caught.value.detail == "train: line 2 is no JSON; line 3 is no JSON; line 4 is no JSON"


def test_a_task_whose_files_are_not_here_says_so():
    with pytest.raises(BadInput, match="the files of this task are not here"):
        load_task(TaskSpec(name="jsonl", params={"train": "x"}), 0)


def test_a_line_without_end_is_named_with_its_file(tmp_path: Path):
    rows(tmp_path, "train", *pairs(1))
    rows(tmp_path, "heldout", *pairs(1, "h"), {"prompt": "x" * (1 << 20), "answer": 1})
    with pytest.raises(BadInput, match="line 2 is longer than") as caught:
        opened(tmp_path, heldout="y")
    assert caught.value.errors[0].pointer == "/task/params/heldout"


def test_a_held_out_row_that_is_trained_on_is_named(tmp_path: Path):
    rows(tmp_path, "train", *pairs(9))
    rows(tmp_path, "heldout", *pairs(1, "h"), {"prompt": "q7", "answer": 7})
    with pytest.raises(BadInput, match=r"1 held-out prompts are training prompts, too: line 2 \(line 8 of train\)"):
        opened(tmp_path, heldout="y")


@pytest.mark.parametrize(
    ("scorer", "answer", "right", "wrong"),
    [
        ("exact", "ab", ["ab", " ab\n"], ["AB", "ab c", ""]),
        ("contains", "New York", ["It is new\n york.", "New York"], ["York", ""]),
        ("number", "1,000", ["1000", "first 3, then 1e3", "1000.0"], ["1000 and 1", "", "1,00"]),
        ("number", "-2.50", ["x = -2.5"], ["2.5"]),
        ("number", "none", [], ["none", "0"]),
        ("number", "5", ["value5", "it is .5e1, see page e", "Case5.", "1e2 or 5e"], ["5 of Grade6", "e"]),
    ],
)
def test_scorers(scorer: str, answer: str, right: list[str], wrong: list[str]):
    score = SCORERS[scorer]
    assert [score(answer, text) for text in right] == [1.0] * len(right)
    assert [score(answer, text) for text in wrong] == [0.0] * len(wrong)


@given(st.text())
def test_any_text_has_a_last_number_or_none(text: str):
    found = last_number(text)
    assert found is None or found.is_finite()


@given(st.integers(-(10**12), 10**12), st.text(alphabet="abc xyz.,\n"))
def test_a_number_is_read_as_people_write_it(value: int, before: str):
    assert last_number(f"{before} {value:,}") == last_number(f"{value}") == value


def test_formulas_are_compared_in_the_sandbox(tmp_path: Path):
    rows(
        tmp_path, "train",
        {"prompt": "half of 1", "answer": r"\frac{1}{2}"}, {"prompt": "what is it", "answer": " "},
    )  # fmt: skip
    spec = TaskSpec(name="jsonl", params={"train": "x", "scorer": "math"}, limits={"processes": 1})
    task = load_task(spec, 0, tmp_path)
    assert isinstance(task, SandboxTask)
    prompts = [task.train(i) for i in range(task.train_size)] + [task.heldout(i) for i in range(task.heldout_size)]
    half, nothing = sorted(prompts, key=lambda prompt: prompt.text)
    texts = ["0.5", r"It is \boxed{\frac{2}{4}}.", "$1/2$", "2", "no idea"]
    assert [task.reward(half, text) for text in texts] == [1.0, 1.0, 1.0, 0.0, 0.0]
    with pytest.raises(TaskFailed, match="no formula"):
        task.reward(nothing, "1")
    task.close()


def test_a_formula_that_takes_for_ever_is_an_error_and_the_next_one_is_scored(tmp_path: Path):
    rows(tmp_path, "train", *({"prompt": f"p{i}", "answer": "7"} for i in range(9)))
    spec = TaskSpec(name="jsonl", params={"train": "x", "scorer": "math"}, limits={"processes": 1, "timeout_s": 5})
    task = load_task(spec, 0, tmp_path)
    prompt = task.train(0)
    with pytest.raises(TaskFailed, match="longer than 5 s"):
        task.reward(prompt, "$9^{9^{9^{9}}}$")
    assert [task.reward(prompt, text) for text in ("$7$", "$8$")] == [1.0, 0.0]
    task.close()
