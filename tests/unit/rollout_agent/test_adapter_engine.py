"""The engine under an adapter: the model's own weights, and versions that replace the adapter in place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from app.learner.lora import adapter_weights, add_adapter
from app.protocol.errors import BadInput, IntegrityError
from app.protocol.learner_spec import LoraSpec
from app.rollout_agent.engines.transformers import TransformersEngine
from app.snapshots.manifest import ADAPTER_ASSET, new_key
from tests.unit.rollout_agent.test_transformers_engine import ENDS, PROMPTS, requests
from tests.unit.rollout_agent.tiny import adapter_asset, make_model, new_store, publish, write_model_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config, tokenizer, weights and the adapter's configuration, as a learner puts them into the store."""
    folder = write_model_files(tmp_path_factory.mktemp("model"), eos=ENDS)
    model = make_model(folder, seed=0)
    model.save_pretrained(folder)
    (folder / ADAPTER_ASSET).write_bytes(add_adapter(model, LoraSpec(rank=3, alpha=6), name="tiny", seed=5))
    return folder


def learners_model(folder: Path, seed: int) -> Any:
    """The same model with an adapter that has learnt something, exact in bf16."""
    model = make_model(folder, seed=0)
    add_adapter(model, LoraSpec(rank=3, alpha=6), name="tiny", seed=5)
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter_weights(model).values():
        tensor.copy_((0.3 * torch.randn(tensor.shape, generator=generator)).to(torch.bfloat16))
    return model


def test_versions_are_adapters_and_samples_have_the_learners_logprobs(folder: Path, tmp_path: Path) -> None:
    engine, key = TransformersEngine(threads=1), new_key()
    engine.load(folder)
    store, seen = new_store(tmp_path, key), []
    for version in (1, 2):
        model = learners_model(folder, version)
        snapshot = publish(store, key, adapter_weights(model), version, [adapter_asset(folder)])
        assert snapshot.manifest.kind == "adapter"
        assert snapshot.manifest.payload_bytes < 0.5 * (folder / "model.safetensors").stat().st_size
        engine.install(snapshot.payload_path, snapshot.manifest, version)
        made = engine.generate(requests())
        seen.append([c.token_ids for c in made])
        for i, completion in enumerate(made):
            prompt = PROMPTS[i // 4]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
            table = torch.log_softmax(logits, -1)[len(prompt) - 1 :]
            want = [float(table[j, token]) for j, token in enumerate(completion.token_ids)]
            assert completion.logprobs == pytest.approx(want, abs=1e-4)
    assert seen[0] != seen[1]


def test_a_whole_model_is_no_version_of_an_adapter(folder: Path, tmp_path: Path) -> None:
    engine, key = TransformersEngine(threads=1), new_key()
    engine.load(folder)
    whole = make_model(folder, seed=0).state_dict()
    for version, (state, assets, says) in enumerate([
        (whole, [adapter_asset(folder)], "does not fit the model"),
        (whole, [], "of the kind full"),
        (adapter_weights(learners_model(folder, 1)), [], "of the kind full"),
    ]):  # fmt: skip
        snapshot = publish(new_store(tmp_path / str(version), key), key, state, version, assets)
        with pytest.raises(IntegrityError, match=says):
            engine.install(snapshot.payload_path, snapshot.manifest, version)
        assert engine.version is None


def test_an_adapter_is_no_version_of_a_whole_model(folder: Path, tmp_path: Path) -> None:
    plain = write_model_files(tmp_path / "plain", eos=ENDS)
    engine, key = TransformersEngine(threads=1), new_key()
    engine.load(plain)
    state = make_model(plain, seed=0).state_dict()
    snapshot = publish(new_store(tmp_path / "adapter", key), key, state, 0, [adapter_asset(folder)])
    with pytest.raises(IntegrityError, match="of the kind adapter"):
        engine.install(snapshot.payload_path, snapshot.manifest, 0)
    assert engine.version is None
    snapshot = publish(new_store(tmp_path / "full", key), key, state, 0)
    engine.install(snapshot.payload_path, snapshot.manifest, 0)
    assert engine.version == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_modules": ["no_such_layer"]}, "no layers named no_such_layer"),
        ({"target_modules": ["self_attn"]}, "only linear layers"),
        ({"r": 0}, "does not describe an adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(folder: Path, tmp_path: Path, change: dict, says: str) -> None:
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    config = json.loads((other / ADAPTER_ASSET).read_bytes())
    (other / ADAPTER_ASSET).write_text(json.dumps({**config, **change}))
    with pytest.raises(BadInput, match=says):
        TransformersEngine(threads=1).load(other)
