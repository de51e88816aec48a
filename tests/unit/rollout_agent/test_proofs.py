"""An engine that is told to prove gives proofs that a forward pass over the finished text confirms."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.learner.audit.proofs import Match, matches
from app.protocol.errors import BadInput
from app.protocol.job import SamplingSpec
from app.protocol.proofs import before_head, check, parse
from app.rollout_agent.engines.base import Completion, GenRequest
from app.rollout_agent.engines.paced import PacedEngine, cut
from app.rollout_agent.engines.transformers import TransformersEngine
from app.rollout_agent.episodes import answered
from app.rollout_agent.joining import join, spanned
from app.rollout_agent.proofs import provable, start_proving
from app.snapshots.manifest import new_key
from app.tasks.base import Prompt, Reply
from tests.unit.rollout_agent.fake_stream import FakeStream
from tests.unit.rollout_agent.fakes import ScriptedEngine
from tests.unit.rollout_agent.tiny import EOS, make_model, new_store, publish, write_model_files

PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 80, 90, 100], [11]]
TOKENS = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("model"), eos=range(EOS, 12))


@pytest.fixture(scope="module")
def key() -> Ed25519PrivateKey:
    return new_key()


@pytest.fixture(scope="module")
def engine(folder: Path, key: Ed25519PrivateKey, tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    engine = TransformersEngine(threads=1)
    engine.load(folder)
    store = new_store(tmp_path_factory.mktemp("snapshots"), key)
    snapshot = publish(store, key, make_model(folder, seed=0).state_dict(), 0)
    engine.install(snapshot.payload_path, snapshot.manifest, 0)
    engine.prove()
    return engine


def requests(n: int = 4, max_tokens: int = TOKENS) -> list[GenRequest]:
    sampling = SamplingSpec(max_tokens=max_tokens)
    return [GenRequest(prompt, n, seed, sampling) for seed, prompt in enumerate(PROMPTS)]


@cache
def teacher(folder: Path, seed: int) -> Any:
    return make_model(folder, seed)


def held(folder: Path, prompt: Sequence[int], sample: Completion, seed: int = 0) -> tuple[Match, ...]:
    """The proofs of a sample against one pass over its text, unpadded and without a cache."""
    model = teacher(folder, seed)
    ids = torch.tensor([[*prompt, *sample.token_ids]])
    with torch.inference_mode(), before_head(model) as seen:
        model(input_ids=ids)
    own = [True] * len(sample.token_ids) if sample.generated is None else sample.generated
    places = [len(prompt) - 1 + i for i, written in enumerate(own) if written]
    assert sample.proofs is not None
    return matches(sample.proofs, seen[0][0, places])


def test_each_token_is_in_a_proof_that_a_pass_over_the_text_confirms(engine: TransformersEngine, folder: Path) -> None:
    samples = engine.generate(requests())
    lengths = [len(s.token_ids) for s in samples]
    assert min(lengths) < 10 < 33 < max(lengths), "the case needs short ones and some of several proofs"
    for i, sample in enumerate(samples):
        found = held(folder, PROMPTS[i // 4], sample)
        assert sum(m.misses for m in found) == 0
        assert [p.tokens for p in parse(sample.proofs or b"")] == runs(len(sample.token_ids))
        assert sum(m.points for m in found) >= 2 * len(sample.token_ids), "half of one value in eight, of 32 a token"
        wrong = held(folder, PROMPTS[i // 4], sample, seed=1)
        assert sum(m.misses for m in wrong) > 0.8 * sum(m.points for m in wrong)


def runs(tokens: int) -> list[int]:
    return [32] * (tokens // 32) + [tokens % 32] * (tokens % 32 > 0)


def test_proofs_of_a_sample_do_not_depend_on_what_shares_its_batch(engine: TransformersEngine, folder: Path) -> None:
    together = engine.generate(requests())
    alone = [sample for request in requests() for sample in engine.generate([request])]
    assert [s.token_ids for s in alone] == [s.token_ids for s in together]
    for i, sample in enumerate(alone):
        assert sum(m.misses for m in held(folder, PROMPTS[i // 4], sample)) == 0


def test_an_engine_that_was_not_told_to_gives_none(folder: Path, engine: TransformersEngine) -> None:
    assert engine._model.get_output_embeddings()._forward_pre_hooks == {}
    silent = TransformersEngine(threads=1)
    silent.load(folder)
    silent._weights, silent._model, silent._version = engine._weights, engine._model, 0
    assert {s.proofs for s in silent.generate(requests(n=1, max_tokens=4))} == {None}


def test_a_sample_that_goes_on_elsewhere_has_the_proofs_of_both(engine: TransformersEngine, folder: Path) -> None:
    [first] = engine.generate([GenRequest(PROMPTS[0], 1, 0, SamplingSpec(max_tokens=9))])
    assert first.finish_reason == "length", "the case needs one that goes on"
    begun = dataclasses.replace(spanned(first, 0), finish_reason="abort")
    left = SamplingSpec(max_tokens=TOKENS - 9)
    [rest] = engine.generate([GenRequest([*PROMPTS[0], *first.token_ids], 1, 0, left, start=9)])
    whole = join(begun, spanned(rest, 1))
    found = held(folder, PROMPTS[0], whole)
    assert sum(m.misses for m in found) == 0
    assert len(found) == 1 + len(runs(len(rest.token_ids)))
    check(whole.proofs or b"", [True] * len(whole.token_ids), [s.start for s in whole.spans])


def test_what_an_environment_says_in_between_is_in_no_proof(engine: TransformersEngine, folder: Path) -> None:
    [first] = engine.generate([GenRequest(PROMPTS[0], 1, 0, SamplingSpec(max_tokens=9))])

    class Parrot:
        def respond(self, prompt: Prompt, turns: object) -> Reply:
            return Reply("ab")

    said = dataclasses.replace(spanned(first, 0), finish_reason="stop")
    tokenizer = engine.tokenizer
    episode = answered(Parrot(), tokenizer, Prompt(0, "?", {}), said, TOKENS)  # type: ignore[arg-type]
    assert episode.generated is not None
    assert not all(episode.generated)
    left = SamplingSpec(max_tokens=TOKENS - len(episode.token_ids))
    [rest] = engine.generate([GenRequest([*PROMPTS[0], *episode.token_ids], 1, 0, left)])
    whole = join(episode, spanned(rest, 0))
    assert sum(m.misses for m in held(folder, PROMPTS[0], whole)) == 0
    check(whole.proofs or b"", whole.generated or [], [s.start for s in whole.spans])


def test_a_batch_that_is_interrupted_has_proofs_of_what_there_is(engine: TransformersEngine, folder: Path) -> None:
    stopping = TransformersEngine(threads=1)
    stopping.load(folder)
    stopping._weights, stopping._model, stopping._version = engine._weights, engine._model, 0
    stopping.prove()
    passes = iter(range(1000))
    handle = stopping._model.register_forward_hook(lambda *_: stopping.interrupt() if next(passes) == 40 else None)
    samples = stopping.generate(requests(n=8))
    handle.remove()
    assert {len(s.token_ids) for s in samples if s.finish_reason == "abort"} == {40}
    for i, sample in enumerate(samples):
        assert sum(m.misses for m in held(folder, PROMPTS[i // 8], sample)) == 0
        check(sample.proofs or b"", [True] * len(sample.token_ids), [0])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_slow_machine_that_is_cut_short_cuts_between_proofs(engine: TransformersEngine, share: float) -> None:
    whole = engine.generate(requests())
    for before, after in zip(whole, cut(whole, share), strict=True):
        check(after.proofs or b"", [True] * len(after.token_ids), [0])
        assert len(after.logprobs) == len(after.token_ids) <= share * len(before.token_ids)
        assert len(after.token_ids) > share * len(before.token_ids) - 32
        assert after.token_ids == before.token_ids[: len(after.token_ids)]


def test_a_slow_machine_proves_if_its_engine_can(engine: TransformersEngine, folder: Path) -> None:
    inner = TransformersEngine(threads=1)
    inner.load(folder)
    inner._weights, inner._model, inner._version = engine._weights, engine._model, 0
    slow = PacedEngine(inner, 1e9)
    start_proving(slow, "toploc")
    assert all(sample.proofs for sample in slow.generate(requests(n=1, max_tokens=2)))
    with pytest.raises(BadInput, match="ECHO2_ENGINE=transformers"):
        start_proving(PacedEngine(ScriptedEngine(), 1e9), "toploc")


def test_engines_that_can_not_prove_say_what_to_change(folder: Path) -> None:
    slow = PacedEngine(TransformersEngine(threads=1), 1e9, wait=threading.Event().wait)
    assert [provable(e) for e in (TransformersEngine(threads=1), slow, FakeStream())] == ["toploc", "toploc", "none"]
    start_proving(FakeStream(), "none")
    with pytest.raises(BadInput, match="ECHO2_ENGINE=transformers"):
        start_proving(FakeStream(), "toploc")
