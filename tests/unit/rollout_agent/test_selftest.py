"""What an engine has to show before it gets work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.protocol.job import SamplingSpec
from app.rollout_agent.engines.base import Completion, GenRequest, Interrupted
from app.rollout_agent.measure import Rates
from app.rollout_agent.room import Unfit
from app.rollout_agent.selftest import SAMPLES, Shape, examine, fault, of_streams, rates, sampler, shape_for, usual_s

SHAPE = Shape([1, 2, 3], 2, 4, 260)


def sample(tokens: list[int] | None = None, logprobs: list[float] | None = None) -> Completion:
    tokens = [5, 6] if tokens is None else tokens
    return Completion(tokens, [-0.5] * len(tokens) if logprobs is None else logprobs, "length")


@pytest.mark.parametrize(
    ("completions", "said"),
    [
        ([sample(), sample()], ""),
        ([sample([259]), sample([0, 1, 2, 3])], ""),
        ([sample(logprobs=[0.0, 1e-7]), sample()], ""),
        ([sample()], "1 samples instead of 2"),
        ([sample(), sample(), sample()], "3 samples instead of 2"),
        ([sample(), sample([])], "a sample of 0 tokens"),
        ([sample(), sample([1] * 5)], "a sample of 5 tokens"),
        ([sample(), sample(logprobs=[-1.0])], "1 log-probs for 2 tokens"),
        ([sample([260]), sample()], "token 260"),
        ([sample([-1]), sample()], "token -1"),
        ([sample(logprobs=[-1.0, math.nan]), sample()], "a log-prob of nan"),
        ([sample(logprobs=[-1.0, -math.inf]), sample()], "a log-prob of -inf"),
        ([sample(logprobs=[0.1, -1.0]), sample()], "a log-prob of 0.1"),
    ],
)
def test_a_sample_is_sound_or_the_fault_is_named(completions: list[Completion], said: str) -> None:
    assert fault(completions, SHAPE).startswith(said)
    assert (fault(completions, SHAPE) == "") is (said == "")


def test_rollouts_are_reckoned_at_the_job_s_length() -> None:
    short = rates([sample(), sample()], 2.0, 4)
    assert (short.tokens_per_s, short.rollouts_per_s) == (2.0, 1.0)
    long = rates([sample([1] * 32)] * 10, 2.0, 320)
    assert (long.tokens_per_s, long.rollouts_per_s) == (160.0, 0.5)
    ended = rates([sample()] * 10, 2.0, 32)
    assert (ended.tokens_per_s, ended.rollouts_per_s) == (10.0, 5.0), "as short as the job's: the answers' own length"


class Clock:
    """Each look takes a second."""

    def __init__(self, step: float = 1.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def answering(answer: Callable[[Shape], list[Completion]], asked: list[int] | None = None) -> Any:
    async def ask(shape: Shape) -> list[Completion]:
        if asked is not None:
            asked.append(shape.samples)
        return answer(shape)

    return ask


async def test_a_fast_machine_is_asked_for_more_and_its_best_round_counts() -> None:
    asked: list[int] = []
    found = await examine(
        answering(lambda s: [sample()] * min(s.samples, 64) + [sample([1])] * (s.samples - 64), asked),
        SHAPE,
        max_tokens=4,
        clock=Clock(0.25),
    )
    assert asked == list(SAMPLES) == [8, 64, 256]
    assert found.tokens_per_s == (2 * 64 + 192) / 0.25
    assert found.rollouts_per_s == 256 / 0.25


async def test_a_slow_machine_is_not_asked_for_more() -> None:
    asked: list[int] = []
    await examine(answering(lambda s: [sample()] * s.samples, asked), SHAPE, max_tokens=4, clock=Clock(10.0))
    assert asked == [SAMPLES[0]]


async def test_more_than_fits_is_no_fault_but_nothing_that_fits_is() -> None:
    def small(shape: Shape, most: int) -> list[Completion]:
        if shape.samples > most:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return [sample()] * shape.samples

    found = await examine(answering(lambda s: small(s, 64)), SHAPE, max_tokens=4, clock=Clock(0.25))
    assert found.tokens_per_s == 2 * 64 / 0.25
    with pytest.raises(Unfit, match="out of memory"):
        await examine(answering(lambda s: small(s, 4)), SHAPE, max_tokens=4, clock=Clock(0.25))


async def test_an_engine_that_fails_makes_the_machine_unfit() -> None:
    def broken(shape: Shape) -> list[Completion]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(Unfit, match=r"self-test: RuntimeError: CUDA error"):
        await examine(answering(broken), SHAPE, max_tokens=4, clock=Clock())
    with pytest.raises(Unfit, match="self-test: the engine gave 0 samples"):
        await examine(answering(lambda _: []), SHAPE, max_tokens=4, clock=Clock())


async def test_a_node_that_is_told_to_end_is_not_unfit() -> None:
    def interrupted(shape: Shape) -> list[Completion]:
        raise Interrupted("ending")

    cut = Completion([], [], "abort")
    with pytest.raises(Interrupted):
        await examine(answering(interrupted), SHAPE, max_tokens=4, clock=Clock())
    with pytest.raises(Interrupted):
        await examine(answering(lambda s: [cut] * s.samples), SHAPE, max_tokens=4, clock=Clock())


@pytest.mark.parametrize(
    ("config", "size"), [({"vocab_size": 300}, 300), ({"text_config": {"vocab_size": 301}}, 301), ({}, 7)]
)
def test_the_vocabulary_is_the_model_s_own(tmp_path: Path, config: dict[str, Any], size: int) -> None:
    class Tokenizer:
        knows = True

        def __len__(self) -> int:
            return 7

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [len(text) % 7, 5] if text and self.knows else []}

    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_for(tmp_path, Tokenizer(), 3)
    assert (shape.vocabulary, shape.max_tokens) == (size, 3)
    assert shape_for(tmp_path, Tokenizer(), 9999).max_tokens == 32
    assert list(shape.prompt)[1:] == [5]
    Tokenizer.knows = False
    assert shape_for(tmp_path, Tokenizer(), 3).prompt == [0], "a prompt is never empty"


class Streams:
    """Single completions, side by side."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def load(self, model_dir: Path) -> None:
        """It lives in the event loop."""

    async def sample(self, prompt_ids: Any, *, seed: int, max_tokens: int, temperature: float) -> Completion:
        self.seeds.append(seed)
        assert temperature == 0.7
        return sample([seed % 260])


@pytest.mark.parametrize(
    ("probe", "recent", "usual"),
    [(None, None, None), (None, 3.0, 3.0), (Rates(1.0, 640.0), None, 10.0), (Rates(1.0, 640.0), 30.0, 30.0)],
)
def test_what_is_usual_is_the_longest_that_is_known(
    probe: Rates | None, recent: float | None, usual: float | None
) -> None:
    assert usual_s(probe, recent, max_tokens=100) == usual


async def test_an_engine_of_single_completions_is_asked_for_them_side_by_side() -> None:
    engine: Any = Streams()
    sampling = SamplingSpec(max_tokens=4, temperature=0.7)
    with ThreadPoolExecutor(1) as pool:
        ask = sampler(engine, pool, sampling)
        assert len(await ask(SHAPE)) == 2
    assert sorted(engine.seeds) == [0, 1]
    assert len(await of_streams(engine, sampling)(SHAPE)) == 2


class Batches:
    """Whole batches of requests, in one thread."""

    def __init__(self) -> None:
        self.asked: list[GenRequest] = []

    def load(self, model_dir: Path) -> None:
        """It lives in a thread."""

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        self.asked = list(requests)
        return [sample()] * sum(request.n for request in requests)


@pytest.mark.parametrize(("samples", "prompts", "each"), [(8, 8, 1), (256, 8, 32), (12, 6, 2), (2, 2, 1), (1, 1, 1)])
async def test_an_engine_of_batches_is_asked_for_all_at_once_in_at_most_eight_groups(
    samples: int, prompts: int, each: int
) -> None:
    engine: Any = Batches()
    with ThreadPoolExecutor(1) as pool:
        found = await sampler(engine, pool, SamplingSpec(max_tokens=99, temperature=0.7))(
            replace(SHAPE, samples=samples)
        )
    assert len(found) == samples
    assert [(r.n, r.seed) for r in engine.asked] == [(each, seed) for seed in range(prompts)]
    assert {(tuple(r.prompt_ids), r.sampling.max_tokens, r.sampling.temperature) for r in engine.asked} == {
        ((1, 2, 3), 4, 0.7)
    }
