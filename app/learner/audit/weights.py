"""A copy of the model that holds the weights of one published version at a time.

Invariant: what it computes with is what nodes were sent, bit for bit: the payload's bfloat16 weights, or the restored
ones of a quantised version; the trained model is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from app.learner.audit.scoring import Scored, score
from app.learner.lora import add_adapter
from app.learner.model import default_device, load, trained_weights
from app.learner.parallel.ranks import Ranks
from app.protocol.errors import BadInput, LearnerError
from app.protocol.job import JobSpec, period
from app.protocol.trajectory import Rollout

Fetch = Callable[[int], Mapping[str, torch.Tensor] | None]
"""A published version's weights as nodes decode them; None if it is not at hand."""
MOST = 16


class Versions:
    """Made by the process's main thread, before anything else computes: loading a model changes global state."""

    def __init__(self, folder: Path, spec: JobSpec, device: torch.device, fetch: Fetch) -> None:
        self._spec = spec
        self._fetch = fetch
        self._model: Any = _model(folder, spec, device)
        self._weights = trained_weights(self._model)
        self._version: int | None = None
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def score(self, version: int, rollouts: Sequence[Rollout]) -> list[Scored] | None:
        """All completion tokens under v_version; None if that is not at hand. Raises LearnerError."""
        # Beside the training's kernels, not between them.
        with torch.cuda.stream(self._stream):
            if version != self._version and not self._load(version):
                return None
            limit = self._spec.learner.micro_batch_tokens
            return score(self._model, rollouts, self._spec.sampling.temperature, limit)

    def _load(self, version: int) -> bool:
        state = self._fetch(version)
        if state is None:
            return False
        missing = sorted(self._weights.keys() ^ (state.keys() & self._weights.keys()))
        if missing:
            raise LearnerError(f"the payload of v{version} lacks {missing[0]}, which the model has")
        self._version = None
        with torch.no_grad():
            for name, tensor in self._weights.items():
                tensor.copy_(state[name])
        self._version = version
        return True


def _model(folder: Path, spec: JobSpec, device: torch.device) -> Any:
    loaded = load(folder, device=torch.device("cpu"))
    if spec.learner.lora is not None:
        add_adapter(loaded.model, spec.learner.lora, name=spec.model, seed=spec.seed)
    exact = device.type == "cpu" or spec.learner.precision == "float32"
    return loaded.model.to(device, torch.float32 if exact else torch.bfloat16).requires_grad_(False)


def audit_device(wanted: str, ranks: Ranks) -> torch.device:
    """Where the copy is held. Raises BadInput for a GPU that this machine doesn't have."""
    if not wanted:
        return torch.device("cpu") if ranks.size > 1 else default_device()
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"ECHO2_LEARNER_AUDIT_DEVICE: {wanted} is not on this machine")
    return device


def kept(spec: JobSpec) -> int:
    """How many of the newest published versions an auditor can need: those that admissible rollouts may be of at the
    shortest publish period that there may be, and one for those that come late; at most MOST, for each is a copy of the
    model on the learner's disk."""
    if spec.trust.off:
        return 2
    budgets = range(1, spec.staleness_budget + 1) if spec.adaptive else [spec.staleness_budget]
    return min(MOST, max(s // period(s, spec.publish_period or 1) for s in budgets) + 2)
