"""What a machine is measured with: a model folder, and a snapshot of it as a learner would publish it.

Invariant: weights that nobody trained are as fast as others, so `tiny` needs no download and no training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from app.protocol.errors import BadInput
from app.rollout_agent.engines.base import unique_tensors
from app.snapshots.manifest import public_hex
from app.snapshots.store import Snapshot, SnapshotStore

TINY = "tiny"
EOS = 2


@dataclass(frozen=True, slots=True)
class BenchModel:
    """`folder`: config and tokenizer, as a node gets them; the weights come with the snapshot."""

    folder: Path
    snapshot: Snapshot
    parameters: int


def prepare(model: str, work: Path) -> BenchModel:
    """Make a snapshot of `model` (a folder of Hugging Face files, or `tiny`) under `work`. Raises BadInput."""
    folder = write_tiny(work / "model") if model == TINY else Path(model)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} is no model folder: it has no config.json; give one, or `{TINY}`")
    state = _weights(folder, random=model == TINY)
    key = Ed25519PrivateKey.generate()
    store = SnapshotStore(work / "snapshots", job_id="bench", public_key=public_hex(key))
    snapshot = store.publish_full(state, version=0, key=key)
    return BenchModel(folder, snapshot, sum(tensor.numel() for tensor in state.values()))


def _weights(folder: Path, *, random: bool) -> Mapping[str, torch.Tensor]:
    try:
        if random:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(folder), dtype=torch.bfloat16)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder} holds no causal language model with safetensors: {error}"[:500]) from error
    return unique_tensors(model.state_dict())


def write_tiny(folder: Path) -> Path:
    """A Qwen3 of half a million parameters over bytes: `config.json` and tokenizer files."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": EOS}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>"
    )
    wrapped.save_pretrained(folder)
    Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=EOS,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder
