"""Adapters: small trained matrices beside the frozen weights of a model (LoRA, arXiv 2106.09685), made by PEFT.

Invariant: the model's own weights never change, and the adapter starts as nothing: v0 is the model that was given.
Adapter tensors have the names of PEFT's adapter_model.safetensors, so that what is published, in a checkpoint and in
the final folder is what any tool that knows PEFT can read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from app.protocol.errors import BadInput, LearnerError
from app.protocol.learner_spec import LoraSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_ADAPTER = "default"
_PREFIX = "base_model.model."


def add_adapter(model: Any, spec: LoraSpec, *, name: str, seed: int) -> bytes:
    """Put an adapter into a model, in place, and freeze the rest; returns the adapter's configuration as PEFT's file.

    `name` is what the configuration calls the model. The first matrices are drawn from `seed`; no random state changes.
    Raises BadInput if there is nothing to adapt, LearnerError if PEFT is not there.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise LearnerError("learner.lora needs PEFT on the learner's machine: pip install 'echo2[lora]'") from error
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=spec.targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=name,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, _ADAPTER)
        except ValueError as error:
            raise BadInput(f"learner.lora.targets: {str(error).splitlines()[0]}"[:500]) from error
    _check_layers(model)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(_kind(parameter_name) is not None)
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k != "runtime_config"}
    written = {**fields, "target_modules": sorted(_targets(model)), "inference_mode": True}
    return json.dumps(written, default=_plain, indent=2, sort_keys=True).encode()


def adapter_weights(model: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors by PEFT's names, the model's own; nothing if there is no adapter."""
    found: dict[str, torch.Tensor] = {}
    # Not by `named_parameters`: after a forward pass without a backward one those of one rank are bfloat16 copies.
    for name, parameter in model.state_dict(keep_vars=True).items():
        kind = _kind(name)
        if kind is not None:
            found[f"{_PREFIX}{name.partition(f'.{kind}.')[0]}.{kind}.weight"] = parameter.detach()
    return found


def save_adapter(folder: Path, config: bytes, weights: Mapping[str, torch.Tensor]) -> None:
    """A folder that `PeftModel.from_pretrained` opens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_bytes(config)
    save_file({name: t.contiguous() for name, t in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def merge(base: Any, config: bytes, weights: Mapping[str, torch.Tensor]) -> None:
    """Work an adapter into the weights of the model that it is for, in place."""
    fields = json.loads(config)
    scale = fields["lora_alpha"] / fields["r"]
    for name, a in weights.items():
        layer, is_first, _ = name.partition(".lora_A.")
        if is_first:
            b = weights[f"{layer}.lora_B.weight"]
            module = base.get_submodule(layer.removeprefix(_PREFIX))
            if module is base.get_output_embeddings():
                # Its weight may be that of the input embeddings, too, which have no adapter.
                base.config.tie_word_embeddings = False
            module.weight = torch.nn.Parameter(module.weight + scale * (b @ a))


def _check_layers(model: Any) -> None:
    """Nodes adapt linear layers alone; PEFT knows others, among them GPT-2's, which are linear but for their name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(layer := module.get_base_layer(), torch.nn.Linear):
            raise BadInput(f"learner.lora.targets: {name} is a {type(layer).__name__}, and no torch.nn.Linear")


def _kind(name: str) -> str | None:
    return next((kind for kind in ("lora_A", "lora_B") if f".{kind}.{_ADAPTER}." in name), None)


def _targets(model: Any) -> set[str]:
    names = (n.partition(".lora_A.")[0] for n, _ in model.named_parameters() if _kind(n) == "lora_A")
    return {name.rpartition(".")[2] for name in names}


def _plain(value: object) -> object:
    """Sets and enumerations of PEFT's configuration, as JSON has them."""
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))
