"""A tiny model, its versions, and what each of them says of a sequence."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from app.rollout_agent.engines.base import Completion
from app.rollout_agent.engines.vllm_command import VllmOptions
from app.snapshots.manifest import Probe, new_key
from app.snapshots.store import Snapshot, SnapshotStore
from tests.unit.rollout_agent.tiny import make_model, new_store, write_model_files

PROBE_IDS = [5, 17, 99, 203, 4, 31, 77, 150]
PYTHON = os.environ.get("ECHO2_VLLM_PYTHON", sys.executable)


class World:
    """Versions are models of different seeds. vLLM's attention on a CPU needs heads of at least 32."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = write_model_files(root / "model")
        config = Qwen3Config.from_pretrained(self.folder)
        config.hidden_size, config.head_dim = 64, 32
        config.save_pretrained(self.folder)
        self.key = new_key()
        self._published = 0
        self._models: dict[int, Any] = {}

    def options(self, **changes: Any) -> VllmOptions:
        """A small engine on the CPU."""
        plain = VllmOptions(
            python=PYTHON, device="cpu", work_dir=self.root / "vllm", max_sequences=16, threads=1, start_timeout_s=400
        )
        return VllmOptions(**{**{name: getattr(plain, name) for name in VllmOptions.__slots__}, **changes})

    def model(self, version: int) -> Any:
        """The model of a version; there are only five different ones."""
        seed = version % 5
        if seed not in self._models:
            self._models[seed] = make_model(self.folder, seed)
        return self._models[seed]

    def new_store(self, name: str) -> SnapshotStore:
        """An empty store."""
        return new_store(self.root / name, self.key)

    def publish(self, version: int, *, probe_of: int | None = None, quantise: Any = None) -> Snapshot:
        """A snapshot of a version whose probe is that of `probe_of` (default: its own); −1: without a probe."""
        logprobs = self.logprobs(PROBE_IDS, version if probe_of is None else probe_of)
        probe = Probe(token_ids=PROBE_IDS, logprobs=logprobs)
        # A store takes rising versions only, and here they go back.
        self._published += 1
        store = self.new_store(f"snapshots-{self._published}")
        published = store.publish(
            self.model(version).state_dict(),
            version=version,
            key=self.key,
            deltas=False,
            quantise=quantise,
            probe=None if probe_of == -1 else lambda _: probe,
        )
        return published.snapshot

    def logprobs(self, ids: Sequence[int], version: int, temperature: float = 1.0) -> list[float]:
        """Of each token but the first, by one forward pass of transformers."""
        with torch.inference_mode():
            logits = self.model(version)(input_ids=torch.tensor([list(ids)])).logits[0] / temperature
        table = torch.log_softmax(logits, -1)
        return [float(table[i, token]) for i, token in enumerate(ids[1:])]

    def off(self, prompt: Sequence[int], completion: Completion, temperature: float = 1.0) -> float:
        """Largest difference between the completion's log-probs and those of the versions that its spans name, where
        the policy wrote it."""
        ids, worst = [*prompt, *completion.token_ids], 0.0
        marks = completion.generated if completion.generated is not None else [True] * len(completion.token_ids)
        ends = [span.start for span in completion.spans[1:]] + [len(completion.token_ids)]
        for span, end in zip(completion.spans, ends, strict=True):
            wanted = self.logprobs(ids, span.version, temperature)[len(prompt) - 1 :]
            part = slice(span.start, end)
            pairs = zip(completion.logprobs[part], wanted[part], marks[part], strict=True)
            worst = max([worst, *(abs(a - b) for a, b, written in pairs if written)])
        return worst
