"""What runs inside each of vLLM's workers: loading a version in place, with an account of what was filled.

Invariant: the answer names every parameter that did not get all of its elements, so that "loaded" is never concluded
from the absence of an error: vLLM itself only logs a warning for a checkpoint that lacks a layer. Of several copies of
the model (data parallelism) vLLM gives out what the first one's workers answer, and of the others the errors alone: in
those, such an account is an error. Loaded by name inside vLLM (`--worker-extension-cls`); it imports nothing of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
from vllm.model_executor.layers.attention import is_deferred_attention_layer  # type: ignore[import-not-found]
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod  # type: ignore[import-not-found]
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload  # type: ignore[import-not-found]
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # type: ignore[import-not-found]


class Extension:
    """Mixed into vLLM's `Worker`, whose `model_runner`, `model_config` and `vllm_config` it uses."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    @torch.inference_mode()
    def echo2_load(self, path: str) -> dict[str, Any]:
        """Fill the model's parameters from a safetensors file with Hugging Face names, in the file's order.

        Answers {"read": tensors in the file, "missing": parameters that were not named, "short": layers that did not
        get all their elements}; raises if one of the last two is not empty and nobody will see it. Whatever it raises
        leaves the model unusable.
        """
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), safe_open(path, framework="pt", device="cpu") as file:
            initialize_layerwise_reload(model)
            read, twins = 0, bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))

            def tensors() -> Iterator[tuple[str, torch.Tensor]]:
                nonlocal read
                tied = json.loads((file.metadata() or {}).get("tied", "{}"))
                second = {kept: name for name, kept in tied.items()}
                for name in file.offset_keys():
                    read += 1
                    yield name, file.get_tensor(name)
                    if name in second and not twins:
                        yield second[name], file.get_tensor(name)

            named = model.load_weights(tensors())
            short = _short(model, twins)
            finalize_layerwise_reload(model, self.model_config)
            _refresh_twins(model)
        for forget in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            getattr(self.model_runner, forget)()
        wanted = {name for name, _ in model.named_parameters()}
        missing = sorted(wanted - named) if named is not None else []
        return account(read, missing, short, copy=self.vllm_config.parallel_config.data_parallel_index)


def account(read: int, missing: list[str], short: list[str], *, copy: int) -> dict[str, Any]:
    """What a worker of one of the model's copies answers. Raises RuntimeError where what is amiss would not be seen."""
    if copy > 0 and (missing or short):
        raise RuntimeError(f"copy {copy} of the model is not all of this version: {', '.join([*missing, *short][:5])}")
    return {"read": read, "missing": missing[:20], "short": short[:20]}


def _refresh_twins(model: torch.nn.Module) -> None:
    """Have layers that share their matrix with another make anew what they derived from it.

    The reload does so for the one that was filled only. On a CPU the output layer computes with a packed copy, which
    would otherwise stay that of the version before.
    """
    seen: set[int] = set()
    for layer in model.modules():
        ids = {id(parameter) for parameter in layer.parameters(recurse=False)}
        method = getattr(layer, "quant_method", None)
        if ids & seen and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(layer)
        seen |= ids


def _short(model: torch.nn.Module, tied: bool) -> list[str]:
    """Layers that got nothing, or less than they hold; to be asked before the reload is finalised.

    Attention layers hold scales that checkpoints need not have. The rows of embeddings are padded, so that they never
    get all; where input and output are tied, the second of them gets nothing.
    """
    found = []
    for name, layer in model.named_modules():
        info, holds = get_layerwise_info(layer), sum(p.numel() for p in layer.parameters(recurse=False))
        if not info.can_load() or info.load_numel >= holds or is_deferred_attention_layer(layer):
            continue
        if hasattr(layer, "num_embeddings_padded") and (info.load_numel > 0 or tied):
            continue
        found.append(f"{name}: {info.load_numel} of {holds} elements")
    return found
