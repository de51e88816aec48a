"""The probe in a manifest: what the published weights say of some tokens, so that an engine can be held to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from app.learner.lora import adapter_weights, add_adapter
from app.learner.model import trained_weights, unique_weights
from app.learner.probe import TOKENS, Prober, tokens_of, wants_probe
from app.learner.sink import RelaySink
from app.protocol.errors import IntegrityError, LearnerError
from app.protocol.job import SnapshotSpec
from app.protocol.learner_spec import LoraSpec
from app.snapshots.codec import decode
from app.snapshots.manifest import Manifest, Probe, new_key, public_hex, verify
from app.snapshots.store import SnapshotStore
from tests.integration.snapshots.helpers import MemoryObjects
from tests.unit.learner.samples import VOCABULARY, random_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def said(model, ids) -> list[float]:
    """Token by token, each after a prefix of its own."""
    with torch.no_grad():
        tables = [
            torch.log_softmax(model(input_ids=torch.tensor([ids[:i]])).logits[0, -1], -1) for i in range(1, len(ids))
        ]
    return [float(table[token]) for table, token in zip(tables, ids[1:], strict=True)]


def published(root: Path, state, probe, version: int = 1, **given) -> tuple[Manifest, Path, bytes]:
    key = new_key()
    store = SnapshotStore(root, job_id="j", public_key=public_hex(key))
    snapshot = store.publish(state, version=version, key=key, probe=probe, **given).snapshot
    return verify(snapshot.document, public_key=public_hex(key), job_id="j"), snapshot.payload_path, snapshot.document


def test_it_is_what_the_rounded_weights_say_and_not_the_trained_ones(tmp_path: Path):
    trained = random_model(1)
    with torch.no_grad():
        for tensor in unique_weights(trained).values():
            tensor.mul_(torch.rand_like(tensor) * 0.02 + 1)  # digits that bfloat16 doesn't have
    manifest, payload, _ = published(tmp_path, unique_weights(trained), Prober(random_model(), IDS))
    assert manifest.probe is not None
    rounded = random_model()
    rounded.load_state_dict(decode(payload), strict=False)
    assert manifest.probe.token_ids == IDS
    assert manifest.probe.logprobs == pytest.approx(said(rounded, IDS), abs=1e-5)
    assert manifest.probe.logprobs != pytest.approx(said(trained, IDS), abs=1e-5)


def test_of_a_quantised_version_it_is_what_the_restored_weights_say(tmp_path: Path):
    model = wide_model()
    manifest, payload, _ = published(tmp_path, unique_weights(model), Prober(wide_model(), IDS), quantise="int8")
    assert manifest.probe is not None
    assert any(t.dtype == "I8" for t in manifest.tensors)
    restored = wide_model()
    restored.load_state_dict(decode(payload), strict=False)
    assert manifest.probe.logprobs == pytest.approx(said(restored, IDS), abs=1e-5)
    assert manifest.probe.logprobs != pytest.approx(said(model, IDS), abs=1e-4)


def wide_model():
    """Large enough that some of its matrices are quantised."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=32, intermediate_size=96, tie_word_embeddings=True, dtype="float32",
        )  # fmt: skip
        return Qwen3ForCausalLM(config).eval()


def test_under_an_adapter_it_is_of_the_model_with_it(tmp_path: Path):
    models = [random_model() for _ in range(2)]
    for model in models:
        add_adapter(model, LoraSpec(rank=2), name="m", seed=7)
    trained, twin = models
    for tensor in adapter_weights(trained).values():
        tensor.copy_((torch.rand_like(tensor) - 0.5).bfloat16())
    manifest, _, _ = published(tmp_path, trained_weights(trained), Prober(twin, IDS))
    assert manifest.probe is not None
    assert manifest.probe.logprobs == pytest.approx(said(trained, IDS), abs=1e-5)
    assert manifest.probe.logprobs != pytest.approx(said(random_model(), IDS), abs=1e-3)


def test_each_version_has_its_own_and_a_layer_that_is_not_loaded_shows(tmp_path: Path):
    prober = Prober(random_model(), IDS)
    one, _, _ = published(tmp_path / "a", unique_weights(random_model(1)), prober)
    two, _, _ = published(tmp_path / "b", unique_weights(random_model(2)), prober)
    again, _, _ = published(tmp_path / "c", unique_weights(random_model(1)), prober)
    assert one.probe == again.probe != two.probe
    assert one.probe is not None
    half = random_model(1)
    half.model.layers[1].mlp.load_state_dict(random_model(2).model.layers[1].mlp.state_dict())
    found = said(half, IDS)
    assert max(abs(a - b) for a, b in zip(one.probe.logprobs, found, strict=True)) > 1e-3


def test_weights_that_are_broken_are_not_published(tmp_path: Path):
    state = {name: t.clone() for name, t in unique_weights(random_model()).items()}
    state["model.norm.weight"][0] = torch.nan
    with pytest.raises(LearnerError, match="not finite"):
        published(tmp_path, state, Prober(random_model(), IDS))
    with pytest.raises(LearnerError, match="lacks"):
        published(tmp_path, {"model.norm.weight": torch.ones(16)}, Prober(random_model(), IDS))
    assert SnapshotStore(tmp_path, job_id="j", public_key=public_hex(new_key())).latest() is None


def test_it_is_signed(tmp_path: Path):
    key = new_key()
    store = SnapshotStore(tmp_path, job_id="j", public_key=public_hex(key))
    prober = Prober(random_model(), IDS)
    document = store.publish(unique_weights(random_model()), version=1, key=key, probe=prober).snapshot.document
    assert b"token_ids" in document
    with pytest.raises(IntegrityError, match="signature"):
        verify(document.replace(b"[3,1,4,", b"[3,1,5,"), public_key=public_hex(key), job_id="j")


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [([1], []), ([1, 2], []), ([1, 2], [-1.0, -1.0]), ([1, 2], [float("nan")]), ([1, 2], [0.5]), ([1, -2], [-1.0])],
)
def test_a_probe_is_whole_and_possible(ids, logprobs):
    with pytest.raises(ValidationError):
        Probe(token_ids=ids, logprobs=logprobs)


def test_the_learner_publishes_it_and_a_restart_serves_the_same(tmp_path: Path):
    calls = []

    def probe(payload: Path) -> Probe:
        calls.append(payload.is_file())
        return Probe(token_ids=[1, 2], logprobs=[-1.0])

    for _ in range(2):
        sink = RelaySink(
            tmp_path, job_id="j", relay_token="t", host="127.0.0.1", uplink_bytes_per_s=None, objects=MemoryObjects(),
            assets=[], snapshots=SnapshotSpec(), probe=probe,
        )  # fmt: skip
        sink.publish(3, {"w": torch.ones(10)})
    assert calls == [True]


def test_the_tokens_are_a_prompt_and_what_the_model_goes_on_with():
    model = random_model()
    for prompt in ([7, 8], list(range(40))):
        ids = tokens_of(model, prompt)
        assert len(ids) == TOKENS
        with torch.no_grad():
            best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        begin = min(len(prompt), 20)
        assert ids[:begin] == prompt[:begin]
        assert ids[begin:] == best[begin - 1 : -1]


def test_there_is_one_for_models_that_are_not_huge_unless_the_job_says_otherwise():
    assert [wants_probe(wanted, size) for wanted in (None, True, False) for size in (10**9, 10**10)] == [
        True, False, True, True, False, False
    ]  # fmt: skip
