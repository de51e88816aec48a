"""The first generation on a machine: does the engine give sound samples, and how fast?

Invariant: a machine whose engine gives a wrong number of samples, tokens that are none, or impossible log-probs, never
gets work. The speed that is found is of a known shape, so that machines can be compared before they have worked.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from app.protocol.errors import EchoError
from app.protocol.job import SamplingSpec
from app.rollout_agent.engines.base import Completion, Engine, GenRequest, Interrupted, StreamEngine
from app.rollout_agent.engines.registry import is_stream
from app.rollout_agent.measure import Rates
from app.rollout_agent.room import Unfit

TEXT = "Count from one to ten in words, then say which of them are even."
PROMPTS = 8
SAMPLES = (8, 64, 256)
"""Of the rounds; the control side reckons with 256 at once. The first one pays for what is set up once."""
TOKENS = 32
"""At most so many of each sample."""
LONG_S = 0.5
"""A machine that takes longer for a round is known well enough by it."""
AT_ONCE = 64
"""Samples that share a machine's speed, for what is usual."""
FULL_TOKENS = 512
"""The control side reckons with rollouts of at most so many tokens."""
ROUNDING = 1e-5
"""A log-prob of 0 may come out so much above it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is generated: `samples` completions of up to `max_tokens` tokens after `prompt`."""

    prompt: Sequence[int]
    samples: int
    max_tokens: int
    vocabulary: int


Sampler = Callable[[Shape], Awaitable[list[Completion]]]


def fault(completions: Sequence[Completion], shape: Shape) -> str:
    """What is wrong with the samples; empty if nothing is. Pure."""
    if len(completions) != shape.samples:
        return f"{len(completions)} samples instead of {shape.samples}"
    for completion in completions:
        count = len(completion.token_ids)
        if not 1 <= count <= shape.max_tokens:
            return f"a sample of {count} tokens, 1 to {shape.max_tokens} were asked for"
        if len(completion.logprobs) != count:
            return f"{len(completion.logprobs)} log-probs for {count} tokens"
        strange = [token for token in completion.token_ids if not 0 <= token < shape.vocabulary]
        if strange:
            return f"token {strange[0]} is not in the vocabulary of {shape.vocabulary}"
        wrong = [value for value in completion.logprobs if not (math.isfinite(value) and value <= ROUNDING)]
        if wrong:
            return f"a log-prob of {wrong[0]:g}"
    return ""


def rates(completions: Sequence[Completion], seconds: float, tokens_each: int) -> Rates:
    """Speed; a rollout counts `tokens_each` tokens, unless samples ended by themselves as short as they were asked."""
    tokens = sum(len(completion.token_ids) for completion in completions)
    per_s = tokens / max(seconds, 1e-9)
    mean = tokens / len(completions)
    return Rates(per_s / (mean if tokens_each <= TOKENS else tokens_each), per_s)


def usual_s(probe: Rates | None, recent_s: float | None, *, max_tokens: int) -> float | None:
    """How long a batch, or one sample among many, takes on this machine at its longest: as the self-test's speed has
    it, or as the last ones did. None while neither is known."""
    longest = AT_ONCE * max_tokens / probe.tokens_per_s if probe is not None and probe.tokens_per_s else None
    known = [seconds for seconds in (longest, recent_s) if seconds is not None]
    return max(known, default=None)


async def examine(sample: Sampler, shape: Shape, *, max_tokens: int, clock: Callable[[], float]) -> Rates:
    """Generate, check, measure. `max_tokens` is the job's. Raises Unfit with what is wrong; Interrupted if the engine
    was told to end meanwhile."""
    found = Rates(0.0, 0.0)
    for samples in SAMPLES:
        asked = replace(shape, samples=samples)
        began = clock()
        try:
            completions = await sample(asked)
        except Interrupted:
            raise
        except (EchoError, RuntimeError) as error:
            if found.tokens_per_s and "out of memory" in str(error):
                # The worker finds out how many fit; that many don't is no fault.
                break
            detail = error.detail if isinstance(error, EchoError) else f"{type(error).__name__}: {error}"
            raise Unfit(f"self-test: {detail}"[:500]) from error
        seconds = clock() - began
        if any(completion.finish_reason == "abort" for completion in completions):
            raise Interrupted("the self-test was cut short")
        wrong = fault(completions, asked)
        if wrong:
            raise Unfit(f"self-test: the engine gave {wrong}")
        found = max(found, rates(completions, seconds, min(max_tokens, FULL_TOKENS)), key=lambda r: r.tokens_per_s)
        if seconds > LONG_S:
            break
    return found


def shape_for(model: Path, tokenizer: Any, max_tokens: int) -> Shape:
    """What to generate with a model: a short text, or without a tokenizer that takes it, the first tokens."""
    prompt = [int(token) for token in tokenizer(TEXT)["input_ids"]] or [0]
    return Shape(prompt, SAMPLES[0], min(TOKENS, max_tokens), vocabulary(model, tokenizer))


def vocabulary(model: Path, tokenizer: Any) -> int:
    """How many tokens a model knows."""
    config = json.loads((model / "config.json").read_text())
    return int(config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or len(tokenizer))


def sampler(engine: Engine | StreamEngine, pool: Executor, sampling: SamplingSpec) -> Sampler:
    """How to sample with this engine, whichever kind it is."""
    return of_streams(engine, sampling) if is_stream(engine) else of_batches(cast(Engine, engine), pool, sampling)


def of_batches(engine: Engine, pool: Executor, sampling: SamplingSpec) -> Sampler:
    """Samples with an engine that takes whole batches, in the thread that owns it."""

    async def sample(shape: Shape) -> list[Completion]:
        spec = sampling.model_copy(update={"max_tokens": shape.max_tokens})
        prompts = max(count for count in range(1, PROMPTS + 1) if shape.samples % count == 0)
        requests = [GenRequest(shape.prompt, shape.samples // prompts, seed, spec) for seed in range(prompts)]
        return await asyncio.get_running_loop().run_in_executor(pool, engine.generate, requests)

    return sample


def of_streams(engine: StreamEngine, sampling: SamplingSpec) -> Sampler:
    """Samples with an engine that takes single completions."""

    async def sample(shape: Shape) -> list[Completion]:
        return await asyncio.gather(
            *(
                engine.sample(shape.prompt, seed=seed, max_tokens=shape.max_tokens, temperature=sampling.temperature)
                for seed in range(shape.samples)
            )
        )

    return sample
