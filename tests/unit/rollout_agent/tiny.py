"""A tiny random Qwen3 with a byte-level tokenizer, and snapshots of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from app.snapshots.manifest import ADAPTER_ASSET, AssetEntry, public_hex
from app.snapshots.store import Snapshot, SnapshotStore

torch.set_num_threads(1)
EOS = 2
VOCABULARY = 259
JOB = "job-1"


def write_model_files(folder: Path, *, layers: int = 2, eos: Sequence[int] = (EOS,)) -> Path:
    """config.json and tokenizer files, as a learner would put them into the store."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": EOS}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>"
    ).save_pretrained(folder)
    Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=list(eos) if len(eos) > 1 else eos[0],
    ).save_pretrained(folder)
    return folder


def make_model(folder: Path, seed: int) -> Any:
    """A float32 model whose weights are exact in bf16, and uneven enough that its choices matter."""
    config = Qwen3Config.from_pretrained(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            parameter.copy_(parameter.to(torch.bfloat16).to(torch.float32))
    return model


def new_store(root: Path, key: Ed25519PrivateKey) -> SnapshotStore:
    """An empty snapshot store of the test's job."""
    return SnapshotStore(root, job_id=JOB, public_key=public_hex(key))


def publish(
    store: SnapshotStore,
    key: Ed25519PrivateKey,
    state: Mapping[str, torch.Tensor],
    version: int,
    assets: Sequence[AssetEntry] = (),
) -> Snapshot:
    """Publish a state dict as a version."""
    return store.publish_full(state, version=version, key=key, assets=assets)


def adapter_asset(folder: Path) -> AssetEntry:
    """What says that a version is an adapter, from a folder of model files."""
    data = (folder / ADAPTER_ASSET).read_bytes()
    return AssetEntry(path=ADAPTER_ASSET, size=len(data), blake3=blake3(data).hexdigest())
