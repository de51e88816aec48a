"""What vLLM's answers mean. Pure.

Invariant: a completion that is given out has a log-prob for every token and spans that cover it from its first token
on; an answer of any other form is an error, never a guess.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from app.protocol.errors import BadInput, Unavailable
from app.rollout_agent.engines.base import Completion, Load, Span, Tainted

GREEDY = 1e-3
"""Up to this temperature the likeliest token is certain, for logits that are not within rounding of each other."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises what is below to this."""
PROBE_TOLERANCE = 0.05
"""Mean absolute difference in nats, bfloat16 on either side included. A model that lacks a layer is off by more."""
_FINISH: Mapping[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}
_FIGURES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions",
    "generation_tokens",
)
_METRIC = re.compile(rf"^vllm:({'|'.join(_FIGURES)})(?:_total)?(?:\{{[^}}]*\}})?\s+(\S+)", re.MULTILINE)
"""Of hundreds of lines, most of them buckets, which are looked at all the time."""


def sampling_params(*, seed: int, max_tokens: int, temperature: float, eos: Sequence[int]) -> dict[str, Any]:
    """The whole distribution, with our end tokens instead of the model's own; up to GREEDY, as 0: the likeliest token.

    Raises BadInput, also for what lies between: vLLM would take another temperature in its place.
    """
    if max_tokens < 1:
        raise BadInput(f"max_tokens must be at least 1, not {max_tokens}")
    if GREEDY < temperature < LOWEST_TEMPERATURE:
        raise BadInput(f"vLLM can't sample at a temperature of {temperature}, at least {LOWEST_TEMPERATURE} is needed")
    return {
        "temperature": 0.0 if temperature <= GREEDY else temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": max_tokens,
        "seed": seed % 2**63,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": list(eos),
        "detokenize": False,
    }


def scoring_params() -> dict[str, Any]:
    """Log-probs of the prompt itself, at temperature 1; vLLM can't help generating one token."""
    return {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}


def check_prompt(prompt_ids: Sequence[int], vocabulary: int) -> None:
    """Raises BadInput for a prompt that no model can take."""
    if not prompt_ids:
        raise BadInput("a request needs a prompt of at least one token")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
        raise BadInput(f"a prompt has a token outside the model's vocabulary of {vocabulary}")


def completion_of(answer: Mapping[str, Any], spans: Sequence[Span] | None = None) -> Completion:
    """The one completion of an answer. `spans`: what is known anyway, under an adapter. Raises Unavailable."""
    try:
        choice = answer["choices"][0]
        tokens = [int(token) for token in choice["token_ids"]]
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in content]
        named = [int(entry["token_id"]) for entry in content]
        finish = _FINISH[choice["finish_reason"]]
        found = spans
        if found is None:
            found = [Span(int(span["version"]), int(span["start"])) for span in choice["weight_versions"] or []]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Unavailable(f"the engine's answer is no completion: {error!r}"[:300]) from error
    if named != tokens or not all(math.isfinite(value) and value <= 1e-4 for value in logprobs):
        raise Unavailable(f"the engine gave {len(tokens)} tokens and log-probs that are not theirs")
    starts = [span.start for span in found]
    if tokens and (not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= len(tokens)):
        raise Unavailable(f"the engine's spans of versions begin at {starts[:5]} in {len(tokens)} tokens")
    return Completion(tokens, [min(0.0, value) for value in logprobs], finish, tuple(found) if tokens else ())


def certain(completion: Completion) -> Completion:
    """A greedy completion with the log-probs of the distribution that it was drawn from, which has one token."""
    return replace(completion, logprobs=[0.0] * len(completion.token_ids))


def cut(completion: Completion, bad: int) -> Completion:
    """What of a completion was not sampled under version `bad`, which turned out to be no version: the part before."""
    start = next((span.start for span in completion.spans if span.version == bad), None)
    if start is None:
        return completion
    spans = tuple(span for span in completion.spans if span.start < start)
    return Completion(completion.token_ids[:start], completion.logprobs[:start], "abort", spans)


def prompt_logprobs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Log-prob of each token but the first, given those before it. Raises Unavailable."""
    try:
        entries = answer["prompt_logprobs"][1:]
        found = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, token_ids[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"the engine's answer has no log-probs of its prompt: {error!r}"[:300]) from error
    return found


def load_of(text: str) -> Load:
    """Figures out of Prometheus text, summed over copies of the model; of their caches, the fullest.

    Raises Unavailable if one is not there.
    """
    sums: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        join = max if name == "kv_cache_usage_perc" else operator.add
        try:
            sums[name] = join(sums.get(name, 0.0), float(value))
        except ValueError as error:
            raise Unavailable(f"the engine's figure {name} is {value[:20]!r}") from error
    try:
        return Load(
            running=int(sums["num_requests_running"]),
            waiting=int(sums["num_requests_waiting"]),
            cache_used=min(1.0, max(0.0, sums["kv_cache_usage_perc"])),
            preemptions=int(sums["num_preemptions"]),
        )
    except KeyError as error:
        raise Unavailable(f"the engine tells no {error.args[0]}") from error


def tokens_made(text: str) -> float:
    """Tokens generated so far, by the copy of the model that has made the fewest; 0 if the engine doesn't say."""
    return min((float(value) for name, value in _METRIC.findall(text) if name == "generation_tokens"), default=0.0)


def check_report(reports: Sequence[Mapping[str, Any]], tensors: int) -> None:
    """Hold the workers' accounts of a load against what was to be loaded. Raises Tainted that says what is amiss."""
    if not reports:
        raise Tainted("no worker of the engine says that it loaded anything")
    for report in reports:
        lacking = [*report.get("missing", ["?"]), *report.get("short", ["?"])]
        if lacking:
            raise Tainted(f"the engine's weights are not all of this version: {', '.join(map(str, lacking[:5]))}")
        if report.get("read") != tensors:
            raise Tainted(f"the engine read {report.get('read')} tensors of {tensors}")


def check_probe(found: Sequence[float], wanted: Sequence[float], tolerance: float = PROBE_TOLERANCE) -> None:
    """Hold the engine's log-probs of the probe against the learner's. Raises Tainted."""
    if len(found) != len(wanted):
        raise Tainted(f"the probe has {len(wanted)} log-probs, the engine gives {len(found)}")
    off = sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / max(1, len(wanted))
    if not off <= tolerance:
        raise Tainted(f"the engine's log-probs are {off:.3f} nats off the learner's, at most {tolerance} may be")
