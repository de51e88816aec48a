from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.protocol.errors import BadInput, IntegrityError, Unavailable
from app.protocol.job import SamplingSpec
from app.rollout_agent.engines.base import Completion, GenRequest, Interrupted
from app.rollout_agent.engines.drawing import draw
from app.rollout_agent.engines.transformers import TransformersEngine
from app.snapshots.manifest import new_key
from tests.unit.rollout_agent.tiny import EOS, VOCABULARY, make_model, new_store, publish, write_model_files

ENDS = range(EOS, 40)
"""Many tokens end a text, so that random completions have many lengths."""
PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 80, 90, 100], [11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("model"), eos=ENDS)


@pytest.fixture(scope="module")
def key() -> Ed25519PrivateKey:
    return new_key()


@pytest.fixture(scope="module")
def engine(folder: Path, key: Ed25519PrivateKey, tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return installed(folder, key, tmp_path_factory.mktemp("snapshots"))


def installed(folder: Path, key: Ed25519PrivateKey, root: Path) -> TransformersEngine:
    engine = TransformersEngine(threads=1)
    engine.load(folder)
    snapshot = publish(new_store(root, key), key, make_model(folder, seed=0).state_dict(), 0)
    engine.install(snapshot.payload_path, snapshot.manifest, 0)
    return engine


def requests(temperature: float = 1.0, max_tokens: int = 12, n: int = 4) -> list[GenRequest]:
    sampling = SamplingSpec(temperature=temperature, max_tokens=max_tokens)
    return [GenRequest(prompt, n, seed, sampling) for seed, prompt in enumerate(PROMPTS)]


@cache
def _teacher(folder: Path) -> Any:
    return make_model(folder, seed=0)


def teacher_forced(folder: Path, prompt: Sequence[int], completion: Completion, temperature: float) -> list[float]:
    """Log-probs of a completion by one forward pass over the unpadded text, without a cache."""
    model = _teacher(folder)
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, dim=-1)
    first = len(prompt) - 1
    return [float(logprobs[first + i, token]) for i, token in enumerate(completion.token_ids)]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_a_teacher_forced_pass(
    engine: TransformersEngine, folder: Path, temperature: float
) -> None:
    completions = engine.generate(requests(temperature))
    assert len(completions) == 12
    assert len({len(c.token_ids) for c in completions}) > 3, "the case needs completions of different lengths"
    for i, completion in enumerate(completions):
        want = teacher_forced(folder, PROMPTS[i // 4], completion, temperature)
        assert completion.logprobs == pytest.approx(want, abs=1e-4)


def test_a_completion_ends_with_eos_or_at_the_limit(engine: TransformersEngine) -> None:
    completions = engine.generate(requests(n=64))
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}, "the case needs both endings"
    for completion in completions:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert not set(completion.token_ids[:-1]) & set(ENDS)
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] in ENDS
        else:
            assert len(completion.token_ids) == 12
            assert completion.token_ids[-1] not in ENDS


def test_a_group_depends_on_its_seed_and_not_on_its_neighbours(engine: TransformersEngine) -> None:
    together = engine.generate(requests())
    alone = [completion for request in requests() for completion in engine.generate([request])]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together]
    reordered = engine.generate(requests()[::-1])
    assert [c.token_ids for c in reordered[8:]] == [c.token_ids for c in together[:4]]
    other = engine.generate([GenRequest(PROMPTS[0], 4, 99, requests()[0].sampling)])
    assert [c.token_ids for c in other] != [c.token_ids for c in together[:4]]
    assert len({tuple(c.token_ids) for c in together[:4]}) > 1, "samples of a group must differ"


def test_requests_may_have_different_limits_and_group_sizes(engine: TransformersEngine) -> None:
    short = GenRequest(PROMPTS[0], 1, 5, SamplingSpec(max_tokens=1))
    long = GenRequest(PROMPTS[1], 3, 6, SamplingSpec(max_tokens=20))
    completions = engine.generate([short, long])
    assert len(completions) == 4
    assert len(completions[0].token_ids) == 1
    assert [c.token_ids for c in completions[1:]] == [c.token_ids for c in engine.generate([long])]


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    rows = 20_000
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = draw(probabilities.log().expand(rows, 4), torch.ones(rows, 1), uniform)
    shares = torch.bincount(tokens, minlength=4) / rows
    assert shares.tolist() == pytest.approx(probabilities.tolist(), abs=0.015)
    assert shares[1] == 0
    assert logprobs[tokens == 2][0].item() == pytest.approx(math.log(0.3), abs=1e-6)


def test_install_puts_the_new_weights_in_force(folder: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    engine = installed(folder, key, tmp_path / "a")
    before = engine.generate(requests())
    snapshot = publish(new_store(tmp_path / "b", key), key, make_model(folder, seed=1).state_dict(), 1)
    engine.install(snapshot.payload_path, snapshot.manifest, 1)
    after = engine.generate(requests())
    assert engine.version == 1
    assert [c.token_ids for c in after] != [c.token_ids for c in before]


def _without_a_layer(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.mlp.up_proj.weight"]


def _with_an_extra(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.2.mlp.up_proj.weight"] = torch.zeros(64, 32)


def _with_a_wrong_shape(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"] = torch.ones(33)


def _untied(state: dict[str, torch.Tensor]) -> None:
    state["lm_head.weight"] = state["lm_head.weight"].clone()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without_a_layer, "up_proj"),
        (_with_an_extra, "layers.2"),
        (_with_a_wrong_shape, "model.norm.weight"),
        (_untied, "lm_head"),
    ],
)
def test_install_refuses_what_does_not_fit_and_keeps_the_old_version(
    damage: object, named: str, folder: Path, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    engine = installed(folder, key, tmp_path / "a")
    before = engine.generate(requests())
    state = dict(make_model(folder, seed=1).state_dict())
    assert callable(damage)
    damage(state)
    snapshot = publish(new_store(tmp_path / "b", key), key, state, 1)
    with pytest.raises(IntegrityError, match=named):
        engine.install(snapshot.payload_path, snapshot.manifest, 1)
    assert engine.version == 0
    assert engine.generate(requests()) == before


def test_install_refuses_a_payload_that_is_not_its_manifests(
    folder: Path, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    engine = installed(folder, key, tmp_path / "a")
    before = engine.generate(requests())
    state = dict(make_model(folder, seed=1).state_dict())
    right = publish(new_store(tmp_path / "b", key), key, state, 1)
    _with_a_wrong_shape(state)
    wrong = publish(new_store(tmp_path / "c", key), key, state, 1)
    for payload in (wrong.payload_path, tmp_path / "absent", folder / "config.json"):
        with pytest.raises(IntegrityError):
            engine.install(payload, right.manifest, 1)
    assert engine.version == 0
    assert engine.generate(requests()) == before


def test_unusable_requests_are_refused(engine: TransformersEngine) -> None:
    sampling = SamplingSpec(max_tokens=4)
    for bad in ([], [GenRequest([], 1, 0, sampling)], [GenRequest([VOCABULARY], 1, 0, sampling)]):
        with pytest.raises(BadInput):
            engine.generate(bad)


def test_nothing_is_generated_before_a_version_is_installed(folder: Path) -> None:
    engine = TransformersEngine(threads=1)
    engine.load(folder)
    with pytest.raises(Unavailable, match="installed"):
        engine.generate(requests())


def test_load_says_what_is_wrong_with_the_model_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="causal language model"):
        TransformersEngine(threads=1).load(tmp_path)


def test_interrupt_ends_generation(folder: Path, key: Ed25519PrivateKey, tmp_path: Path) -> None:
    engine = installed(folder, key, tmp_path)
    engine.interrupt()
    with pytest.raises(Interrupted):
        engine.generate(requests())


class InterruptedAfter(TransformersEngine):
    """Interrupts itself after so many forward passes."""

    passes = 0
    last = 10**9

    def _call(self, *arguments: Any) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.last:
            self.interrupt()
        return super()._call(*arguments)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_batch_cut_short_goes_on_elsewhere_as_if_nothing_had_been(
    engine: TransformersEngine, folder: Path, key: Ed25519PrivateKey, tmp_path: Path, steps: int
) -> None:
    want = engine.generate(requests())
    cut = InterruptedAfter(threads=1)
    cut.load(folder)
    snapshot = publish(new_store(tmp_path, key), key, make_model(folder, seed=0).state_dict(), 0)
    cut.install(snapshot.payload_path, snapshot.manifest, 0)
    cut.last = steps + 1
    begun = cut.generate(requests())
    assert {len(c.token_ids) for c in begun if c.finish_reason == "abort"} == {steps}
    again = []
    for i, (piece, whole) in enumerate(zip(begun, want, strict=True)):
        assert piece.token_ids == whole.token_ids[: len(piece.token_ids)]
        assert piece.logprobs == pytest.approx(whole.logprobs[: len(piece.token_ids)], abs=1e-5)
        if piece.finish_reason != "abort":
            assert piece.token_ids == whole.token_ids
            continue
        request, rest = requests()[i // 4], SamplingSpec(max_tokens=12 - steps)
        prompt = [*request.prompt_ids, *piece.token_ids]
        again.append((whole, GenRequest(prompt, 1, request.seed, rest, first=i % 4, start=steps)))
    assert again, "the case needs completions that are longer than the cut"
    for (whole, _), following in zip(again, engine.generate([request for _, request in again]), strict=True):
        assert following.token_ids == whole.token_ids[steps:]
        assert following.logprobs == pytest.approx(whole.logprobs[steps:], abs=1e-5)
        assert following.finish_reason == whole.finish_reason
