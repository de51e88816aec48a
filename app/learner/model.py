"""From the name in a job to a loaded model.

Invariant: weights come from safetensors only and no code of a model repository is ever run. Trained weights are
float32, on the CPU as on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from app.learner.hub import first_line, network_errors
from app.learner.lora import adapter_weights
from app.learner.tiny import RECIPES, tiny_model
from app.protocol.errors import BadInput, LearnerError

MAX_ASSET_BYTES = 64 * 1024 * 1024
_ASSET_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})
_DOWNLOAD = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in float32 and evaluation mode (no dropout), its tokenizer, and the folder that they came from."""

    model: Any
    tokenizer: Any
    folder: Path
    adapter: bytes | None = None
    """Configuration of the adapter that is trained, as PEFT's file; None if the model itself is trained."""

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(p.numel() for p in self.model.parameters())


def resolve(name: str, cache_dir: Path, *, revision: str | None = None, endpoint: str | None = None) -> Path:
    """The folder with config.json, tokenizer, safetensors of `tiny` or `small`, a local folder, or a Hugging Face id.

    `revision`: the commit of the latter; None: the newest. `endpoint`: of the Hub; default: the one of its library,
    `HF_ENDPOINT`. Raises BadInput when the name is wrong, LearnerError when it can't be had now.
    """
    if name in RECIPES:
        return tiny_model(cache_dir, RECIPES[name])
    local = Path(name).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise BadInput(f"model folder {name} has no config.json")
        return local
    if local.is_absolute() or name.startswith((".", "~")):
        raise BadInput(f"model folder {name} does not exist on the learner's machine")
    return _download(name, cache_dir, revision, endpoint)


def _download(name: str, cache_dir: Path, revision: str | None, endpoint: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=cache_dir / "hub", allow_patterns=_DOWNLOAD, endpoint=endpoint
        )
        return Path(found)
    except HFValidationError as error:
        raise BadInput(
            f"model {name!r} is neither 'tiny' or 'small', nor a folder here, nor an id of the form org/name"
        ) from error
    except GatedRepoError as error:
        raise LearnerError(f"model {name!r} is gated: accept its terms and give the learner HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise BadInput(f"model {name!r} does not exist on Hugging Face (or HF_TOKEN may not read it)") from error
    except network_errors() as error:
        raise LearnerError(f"model {name!r} can't be fetched: {first_line(error)}"[:500]) from error


def load(folder: Path, *, device: torch.device | None = None) -> LoadedModel:
    """Load model and tokenizer. Raises LearnerError saying what the folder lacks."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LearnerError(f"the model in {folder} does not load: {reason}"[:500]) from error
    if tokenizer.eos_token_id is None:
        raise LearnerError(f"the tokenizer in {folder} has no end-of-sequence token, so that no answer could end")
    return LoadedModel(model.eval().to(device or default_device()), tokenizer, folder)


def default_device() -> torch.device:
    """The first GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def unique_weights(model: Any) -> dict[str, torch.Tensor]:
    """The state dict in layer order, tied tensors under their first name only; the tensors are the model's own."""
    kept: dict[str, torch.Tensor] = {}
    seen: set[object] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Shards have no address in common on all ranks; they are tied if they are one object.
        key = id(tensor) if isinstance(tensor, DTensor) else (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor.detach()
    return kept


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """What training changes, and so what is published and in checkpoints: the adapter's tensors under their names in
    PEFT's files if there is an adapter, else `unique_weights`. The tensors are the model's own."""
    return adapter_weights(model) or unique_weights(model)


def check_weights(model: Any, saved: Mapping[str, torch.Tensor]) -> None:
    """Raise LearnerError unless saved weights (as `trained_weights` names them) fit the model."""
    own = trained_weights(model)
    if own.keys() != saved.keys():
        odd = sorted(own.keys() ^ saved.keys())[:3]
        raise LearnerError(f"the checkpoint is of another model: tensors {', '.join(odd)} don't match")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise LearnerError(f"the checkpoint is of another model: {name} is {tuple(saved[name].shape)}")


def assets(folder: Path) -> list[Path]:
    """The small files that a node needs beside the weights: config, tokenizer, chat template."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in _ASSET_SUFFIXES
        and path.stat().st_size <= MAX_ASSET_BYTES
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
    ]


def check_lengths(model: Any, longest_prompt: int, max_tokens: int) -> None:
    """Raise BadInput if prompt and answer don't fit the model's positions."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and longest_prompt + max_tokens > limit:
        raise BadInput(
            f"prompts of {longest_prompt} tokens and sampling.max_tokens {max_tokens} together exceed "
            f"the model's {limit} positions"
        )


def model_type(folder: Path) -> str:
    """`model_type` in config.json, for logs."""
    try:
        return str(json.loads((folder / "config.json").read_text()).get("model_type", "?"))
    except (OSError, ValueError):
        return "?"
