"""What a model's files say of it, without its weights: tokenizer, end tokens, and which tensors a version must bring.

Invariant: code that comes with a model is never run, and nothing of the model's size is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights

from app.protocol.errors import BadInput
from app.rollout_agent.engines.adapter import AdapterConfig, adapt, read_config
from app.rollout_agent.engines.vllm_command import Split, split_of


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model without weights. `layout`: name → shape of each tensor that snapshots hold, tied ones once."""

    tokenizer: Any
    adapter: AdapterConfig | None
    layout: Mapping[str, tuple[int, ...]]
    eos: tuple[int, ...]
    vocabulary: int
    split: Split
    nameless: str | None = None
    """The architecture, where config.json doesn't name it."""


def read_blueprint(model_dir: Path) -> Blueprint:
    """Read config and tokenizer files. Raises BadInput if they don't make a causal language model."""
    try:
        adapter = read_config(model_dir)
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"the model files do not make a causal language model: {error}"[:500]) from error
    text = config.get_text_config()
    tensors = _tensors(model) if adapter is None else adapt(model, adapter)
    return Blueprint(
        tokenizer=tokenizer,
        adapter=adapter,
        layout={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        eos=tuple(eos_ids(model.generation_config, config, tokenizer)),
        vocabulary=int(text.vocab_size),
        split=split_of(lambda name: getattr(text, name, None)),
        nameless=None if config.architectures else type(model).__name__,
    )


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors in the order of its state dict, tied ones under their first name.

    On the meta device all data lie at address 0: what is tied can be told by the parameters' identity only.
    """
    own = dict(model.named_parameters())
    others = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own.keys()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in others}


def eos_ids(generation_config: Any, config: Any, tokenizer: Any) -> list[int]:
    """All ids that end a completion. Raises BadInput if the model names none."""
    found: set[int] = set()
    for value in (getattr(generation_config, "eos_token_id", None), config.eos_token_id, tokenizer.eos_token_id):
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    if not found:
        raise BadInput("neither config.json nor the tokenizer names an end-of-sequence token")
    return sorted(found)
