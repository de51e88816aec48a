"""Several turns in one completion: who wrote what, under which version, and that a cut episode goes on as it was."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from app.protocol import trajectory
from app.protocol.errors import TaskFailed
from app.protocol.job import SamplingSpec
from app.protocol.task_spec import TaskSpec
from app.protocol.work import UploadSlot, WorkItem
from app.rollout_agent.batch import sample
from app.rollout_agent.engines.base import Completion, GenRequest, Interrupted, Span
from app.rollout_agent.engines.transformers import TransformersEngine
from app.rollout_agent.episodes import Seat, answered, play, play_rounds
from app.rollout_agent.files import rows_of
from app.rollout_agent.groups import Batch
from app.rollout_agent.text_side import TextSide, score
from app.snapshots.manifest import new_key
from app.tasks.base import Prompt, Reply
from app.tasks.registry import load_task
from tests.unit.rollout_agent.tiny import make_model, new_store, publish, write_model_files

PROMPT = Prompt(0, "q", {})
END = 0


class Letters:
    """Ids are code points; 0 ends a turn and is not seen."""

    chat_template = None
    all_special_ids = (END,)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(i) for i in ids if i != END)


class Count:
    """Answers each turn with its number and its text, until there were `turns` of them."""

    name, train_size, heldout_size = "count", 9, 9

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def train(self, index: int) -> Prompt:
        return Prompt(index, f"q{index}", {})

    heldout = train

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
        return None if len(turns) >= self.turns else Reply(f"<{len(turns)}{turns[-1]}>")

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        return self.episode_reward(prompt, [completion_text])

    def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        return float(len(turns))


class Single:
    """A task with one turn."""

    name, train_size, heldout_size = "single", 9, 9
    train = heldout = Count.train

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        return 1.0


def said(text: str, version: int = 3, reason: Any = "stop") -> Completion:
    ids = [ord(letter) for letter in text] + ([END] if reason == "stop" else [])
    return Completion(ids, [-0.5] * len(ids), reason, (Span(version, 0),) if ids else ())


class Script:
    """A sampler that says these pieces one after the other, and keeps what it was asked."""

    def __init__(self, *pieces: Completion) -> None:
        self.pieces = list(pieces)
        self.asked: list[tuple[str, int, int]] = []

    async def __call__(self, ids: Sequence[int], start: int, max_tokens: int) -> Completion:
        self.asked.append(("".join(map(chr, ids)), start, max_tokens))
        return self.pieces.pop(0)


POOL = ThreadPoolExecutor(1, "environment")


def answer_of(task: Any, max_tokens: int = 100) -> Any:
    return lambda episode: answered(task, Letters(), PROMPT, episode, max_tokens)


async def test_an_episode_is_one_completion_with_marks():
    script = Script(said("ab", 3), said("c", 4), said("d", 4))
    episode = await play(script, answer_of(Count(3)), POOL, [ord("q")], 100)
    assert Letters().decode(episode.token_ids) == "ab<1ab>c<2c>d"
    assert episode.finish_reason == "stop"
    assert "".join("x" if mark else "." for mark in episode.generated or ()) == "xxx.....xx....xx"
    assert [p for p, mark in zip(episode.logprobs, episode.generated or (), strict=True) if not mark] == [0.0] * 9
    assert list(episode.spans) == [Span(3, 0), Span(4, 8)]
    assert script.asked == [("q", 0, 100), ("qab\0<1ab>", 8, 92), ("qab\0<1ab>c\0<2c>", 14, 86)]


async def test_the_environment_is_asked_in_threads_of_its_own():
    threads: list[str] = []

    def answer(episode: Completion) -> Completion:
        threads.append(threading.current_thread().name)
        return episode

    await play(Script(said("ab")), answer, POOL, [1], 100)
    assert [name.partition("_")[0] for name in threads] == ["environment"]


async def test_a_task_with_one_turn_comes_through_as_it_is():
    one = said("ab")
    assert await play(Script(one), answer_of(Single()), POOL, [1], 100) == one
    assert one.generated is None


@pytest.mark.parametrize(("room", "ends"), [(9, "stop"), (8, "length"), (4, "length")])
async def test_a_reply_that_leaves_no_room_ends_the_episode(room: int, ends: str):
    """ab, its end and <1ab> are 8 tokens: one more has to fit."""
    script = Script(said("ab"), said("", reason="stop"))
    episode = await play(script, answer_of(Count(2), room), POOL, [1], room)
    assert episode.finish_reason == ends
    assert len(episode.token_ids) == (9 if ends == "stop" else 3)
    assert len(script.asked) == (2 if ends == "stop" else 1)


async def test_a_policy_that_does_not_end_its_turn_ends_the_episode():
    episode = await play(Script(said("ab", reason="length")), answer_of(Count(2)), POOL, [1], 2)
    assert (episode.finish_reason, episode.token_ids) == ("length", [97, 98])


async def test_a_cut_episode_goes_on_elsewhere_as_if_it_had_not_been_cut():
    whole = await play(Script(said("ab"), said("cde"), said("f")), answer_of(Count(3)), POOL, [1], 100)
    cut = await play(Script(said("ab"), said("c", reason="abort")), answer_of(Count(3)), POOL, [1], 100)
    assert cut.finish_reason == "abort"
    rest = Script(said("de"), said("f"))
    assert await play(rest, answer_of(Count(3)), POOL, [1], 100, cut) == whole
    assert rest.asked[0][1] == len(cut.token_ids)


async def test_one_that_was_cut_before_the_first_token_of_a_turn_goes_on_too():
    cut = await play(Script(said("ab"), said("", reason="abort")), answer_of(Count(2)), POOL, [1], 100)
    assert cut.generated is not None
    assert not cut.generated[-1]
    whole = await play(Script(said("c")), answer_of(Count(2)), POOL, [1], 100, cut)
    assert whole == await play(Script(said("ab"), said("c")), answer_of(Count(2)), POOL, [1], 100)


def seat(task: Any, episode: Completion, index: int = 0, max_tokens: int = 40) -> Seat:
    return Seat([ord("q")], 7, index, SamplingSpec(max_tokens=max_tokens), answer_of(task, max_tokens), episode)


def test_rounds_ask_only_for_what_goes_on():
    asked: list[list[GenRequest]] = []
    pieces = iter([[said("c"), said("d", reason="length")], [said("e")]])

    def generate(requests: Sequence[GenRequest]) -> list[Completion]:
        asked.append(list(requests))
        return next(pieces)

    task = Count(3)
    seats = [seat(task, said("a"), 0), seat(task, said("b", reason="length"), 1), seat(task, said("b"), 2)]
    done = play_rounds(generate, seats)
    assert [Letters().decode(e.token_ids) for e in done] == ["a<1a>c<2c>e", "b", "b<1b>d"]
    assert [e.finish_reason for e in done] == ["stop", "length", "length"]
    first = [(r.first, r.start, r.n, r.seed, r.sampling.max_tokens, len(r.prompt_ids)) for r in asked[0]]
    assert first == [(0, 6, 1, 7, 34, 7), (2, 6, 1, 7, 34, 7)]
    assert [r.first for r in asked[1]] == [0]


def test_rounds_that_are_interrupted_leave_episodes_that_can_go_on():
    def generate(requests: Sequence[GenRequest]) -> list[Completion]:
        raise Interrupted("ends")

    [episode] = play_rounds(generate, [seat(Count(2), said("a"))])
    assert episode.finish_reason == "abort"
    assert Letters().decode(episode.token_ids) == "a<1a>"


def test_an_environment_that_fails_is_told_once_the_others_were_asked_and_what_they_have_is_kept():
    def fails(_: Completion) -> Completion:
        raise TaskFailed("it broke")

    first, second = seat(Count(2), said("a"), 0), seat(Count(2), said("b"), 1)
    known: list[Completion | None] = [None, None]
    with pytest.raises(TaskFailed, match="it broke"):
        play_rounds(lambda _: [], [dataclasses.replace(first, answer=fails), second], known)
    assert known[0] is None
    assert known[1] is not None
    assert Letters().decode(known[1].token_ids) == "b<1b>"


def test_what_an_environment_says_takes_no_proof_off_an_episode():
    proven = dataclasses.replace(said("a"), proofs=b"of two tokens")
    assert answered(Count(2), Letters(), PROMPT, proven, 40).proofs == b"of two tokens"


ENDS = range(2, 130)
"""Half of all tokens end a turn, so that a random model has many."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    folder, key = write_model_files(tmp_path_factory.mktemp("model"), eos=ENDS), new_key()
    made = TransformersEngine(threads=1)
    made.load(folder)
    snapshot = publish(new_store(tmp_path_factory.mktemp("s"), key), key, make_model(folder, seed=0).state_dict(), 5)
    made.install(snapshot.payload_path, snapshot.manifest, 5)
    return made


def a_batch(group_size: int = 8) -> Batch:
    item = WorkItem(id="w1", prompt_index=3, group_size=group_size, seed=11, deadline_s=60)
    return Batch([item], UploadSlot(key="k", url="u"), {"w1": 60.0})


async def one_group(engine: TransformersEngine, task: Any, max_tokens: int) -> list[trajectory.Rollout]:
    """A group through the whole of the batch engine's way, as the file has it, held against its rules."""
    text = TextSide(task, engine.tokenizer)
    sampled = sample(engine, text, a_batch(), SamplingSpec(max_tokens=max_tokens))
    with ThreadPoolExecutor(2) as pool:
        rewards, failed = await score(text, sampled.whole, pool)
    assert failed == {}
    data = trajectory.encode(rows_of(sampled.groups[0], rewards["w1"]))
    table = trajectory.read_table(data)
    trajectory.validate(table, {"w1": trajectory.Expected(3, 8)}, newest_version=5, max_tokens=max_tokens)
    rows = trajectory.rollouts(table)
    assert sampled.tokens == sum(row.own_tokens for row in rows)
    return rows


async def test_a_group_of_several_turns_becomes_a_valid_file(engine: TransformersEngine):
    rows = await one_group(engine, Count(3), 60)
    again = await one_group(engine, Count(3), 60)
    assert rows == again
    assert {row.reward for row in rows if row.finish_reason == "stop"} == {3.0}
    several = [row for row in rows if row.generated is not None]
    assert len(several) >= 6
    for row in several:
        text = engine.tokenizer.decode([i for i, own in zip(row.completion_ids, row.written, strict=True) if not own])
        assert text.startswith("<1")


async def test_a_file_that_is_cut_off_by_its_length_is_valid_too(engine: TransformersEngine):
    rows = await one_group(engine, Count(9), 16)
    assert any(row.finish_reason == "length" and row.generated is not None for row in rows)


async def test_poker_goes_the_same_way(engine: TransformersEngine):
    rows = await one_group(engine, load_task(TaskSpec(name="poker", params={"rules": False}), 0), 60)
    assert all(-1.0 <= row.reward <= 1.0 and row.reward != 0.0 for row in rows)


async def test_continuing_has_the_log_probs_of_the_whole_text(engine: TransformersEngine):
    """What stands in the file is what one pass over prompt and episode gives."""
    rows = [row for row in await one_group(engine, Count(3), 60) if row.generated is not None]
    row = rows[0]
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(engine._model(input_ids=ids).logits[0].float(), dim=-1)
    at = range(len(row.prompt_ids) - 1, ids.shape[1] - 1)
    expected = [float(logprobs[i, ids[0, i + 1]]) for i in at]
    for want, got, own in zip(expected, row.logprobs, row.written, strict=True):
        assert got == (pytest.approx(want, abs=1e-4) if own else 0.0)


async def test_a_job_that_scores_elsewhere_has_zeros_and_never_asks_the_task(engine: TransformersEngine):
    class Asked(Count):
        def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
            raise AssertionError("asked")

    text = TextSide(Asked(1), engine.tokenizer, scores=False)
    with ThreadPoolExecutor(1) as pool:
        rewards, failed = await score(text, sample(engine, text, a_batch(), SamplingSpec(max_tokens=8)).whole, pool)
    assert (rewards, failed) == ({"w1": [0.0] * 8}, {})


async def test_a_group_s_rewards_are_computed_side_by_side(engine: TransformersEngine):
    """All eight wait for each other: one after the other they would wait for ever."""
    together = threading.Barrier(8, timeout=20)

    class Waiting(Count):
        def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
            together.wait()
            return 1.0

    text = TextSide(Waiting(1), engine.tokenizer, at_once=8)
    with ThreadPoolExecutor(8) as pool:
        rewards, failed = await score(text, sample(engine, text, a_batch(), SamplingSpec(max_tokens=8)).whole, pool)
    assert (rewards, failed) == ({"w1": [1.0] * 8}, {})
