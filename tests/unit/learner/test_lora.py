"""Adapters on the learner's side: what they change, and what other tools make of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from app.learner.lora import adapter_weights, add_adapter, merge, save_adapter
from app.learner.model import LoadedModel, trained_weights, unique_weights
from app.learner.prepare import asset_files
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import BadInput
from app.protocol.learner_spec import LearnerSpec, LoraSpec
from app.snapshots.manifest import ADAPTER_ASSET, AssetEntry, kind_of
from tests.unit.learner.samples import batch, job, random_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_v0_is_the_model_that_was_given_and_random_state_stays():
    model, state = random_model(), torch.random.get_rng_state()
    before = logits(model)
    add_adapter(model, LoraSpec(rank=2), name="m", seed=7)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits(model), before)
    again = random_model()
    add_adapter(again, LoraSpec(rank=2), name="m", seed=7)
    assert all(torch.equal(t, adapter_weights(again)[n]) for n, t in adapter_weights(model).items())


def test_a_step_moves_the_adapter_alone_and_its_state_is_the_adapter():
    model = random_model()
    frozen = {n: t.clone() for n, t in unique_weights(model).items()}
    add_adapter(model, LoraSpec(rank=2), name="m", seed=7)
    trainer = GRPOTrainer(model, job())
    first = {n: t.clone() for n, t in trained_weights(model).items()}
    for number in range(2):
        trainer.step(batch(number))
    state = trainer.state()
    assert state.weights.keys() == first.keys() == adapter_weights(model).keys()
    assert all(not torch.equal(state.weights[n], first[n]) for n in first)
    kept = {n.replace(".base_layer", ""): t for n, t in unique_weights(model).items() if "lora_" not in n}
    assert kept.keys() == frozen.keys()
    assert all(torch.equal(kept[n], frozen[n]) for n in frozen)
    other = random_model()
    add_adapter(other, LoraSpec(rank=2), name="m", seed=8)
    heir = GRPOTrainer(other, job())
    heir.restore(state)
    assert heir.step(batch(5)).values == trainer.step(batch(5)).values


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks an old name
def test_peft_opens_the_folder_and_merging_gives_the_same_model(tmp_path: Path):
    model = random_model()
    config = add_adapter(model, LoraSpec(rank=2, alpha=5), name="m", seed=7)
    for tensor in adapter_weights(model).values():
        tensor.normal_(std=0.2)
    save_adapter(tmp_path, config, adapter_weights(model))
    opened = PeftModel.from_pretrained(random_model(), str(tmp_path))
    torch.testing.assert_close(logits(opened), logits(model))
    assert not torch.allclose(logits(model), logits(random_model()), atol=1e-3)
    whole = random_model()
    merge(whole, config, adapter_weights(model))
    torch.testing.assert_close(logits(whole), logits(model), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [None, b'{"r": 2}'])
def test_a_file_of_that_name_in_the_models_folder_makes_no_adapter(tmp_path: Path, config: bytes | None):
    folder, work = tmp_path / "model", tmp_path / "work"
    for path in (folder, work):
        path.mkdir()
    for name in ("config.json", ADAPTER_ASSET, "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    files = asset_files(LoadedModel(None, None, folder, config), work)
    whole = config is None
    wanted = [folder / "config.json", *([] if whole else [folder / "model.safetensors", work / ADAPTER_ASSET])]
    assert files == wanted
    entries = [AssetEntry(path=path.name, size=path.stat().st_size, blake3="0" * 64) for path in files]
    assert kind_of(entries) == ("full" if whole else "adapter")
    assert whole or files[-1].read_bytes() == config


def test_all_linear_is_every_linear_layer_but_the_last():
    model = random_model()
    add_adapter(model, LoraSpec(), name="m", seed=0)
    kinds = {name.split(".")[-3] for name in adapter_weights(model)}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.filterwarnings("ignore:.*tied layer.*:UserWarning")
def test_an_adapter_of_a_tied_head_leaves_the_embeddings_as_they_are_when_it_is_merged(tmp_path: Path):
    model, whole = random_model(), random_model()
    config = add_adapter(model, LoraSpec(rank=2, targets=["lm_head"]), name="m", seed=7)
    for tensor in adapter_weights(model).values():
        tensor.normal_(std=0.2)
    merge(whole, config, adapter_weights(model))
    whole.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    for merged in (whole, opened):
        torch.testing.assert_close(logits(merged), logits(model), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(logits(model), logits(random_model()), atol=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of what is refused here
@pytest.mark.parametrize("targets", ["all-linear", ["c_proj"], ["wte"]])
def test_layers_that_nodes_can_not_adapt_are_refused_before_anything_is_rented(targets):
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=64, bos_token_id=1, eos_token_id=1)
    with pytest.raises(BadInput, match=r"learner\.lora\.targets: transformer\..* is a (Conv1D|Embedding)"):
        add_adapter(GPT2LMHeadModel(config), LoraSpec(targets=targets), name="m", seed=0)


def test_layers_that_are_not_there_are_named():
    with pytest.raises(BadInput, match=r"learner\.lora\.targets"):
        add_adapter(random_model(), LoraSpec(targets=["no_such_layer"]), name="m", seed=0)


@pytest.mark.parametrize("spec", [{"lora": {"targets": []}}, {"lora": {"rank": 0}}, {"final_merged": True}])
def test_a_spec_that_means_nothing_is_refused(spec: dict):
    with pytest.raises(ValueError):
        LearnerSpec.model_validate(spec)
