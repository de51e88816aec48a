"""What the agent asks of an inference engine.

Invariant: an engine samples whole batches under exactly one policy version; `install` puts a new version in force,
leaves everything as it was, or says that none is in force. All calls but `interrupt` come from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from app.protocol.errors import IntegrityError, Unavailable
from app.protocol.job import SamplingSpec
from app.protocol.node import Weights
from app.snapshots.manifest import Manifest

STORED_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.int8}


class Interrupted(Unavailable):
    """`interrupt` was called before a batch had a single token."""

    code = "interrupted"
    title = "Interrupted"


class EngineDied(Unavailable):
    """The engine's process ended while it sampled; `tokens` of this completion went with it, 0 if that is not known."""

    code = "engine_died"
    title = "Engine died"

    def __init__(self, detail: str, *, tokens: int = 0) -> None:
        super().__init__(detail)
        self.tokens = tokens


class Tainted(IntegrityError):
    """The weights in the engine are those of no version; it has to be loaded again before it may sample."""

    code = "tainted"
    title = "Tainted"


@dataclass(frozen=True, slots=True)
class GenRequest:
    """One prompt to be sampled `n` times. `seed` makes the group reproducible.

    To go on with a sample that was cut short: `n` is 1, `first` its index in its group, `start` the number of tokens
    that it has, which are the end of `prompt_ids`, and `sampling.max_tokens` what is left. The tokens drawn are then
    those that would have come in one go.
    """

    prompt_ids: Sequence[int]
    n: int
    seed: int
    sampling: SamplingSpec
    first: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """From token `start` on (of the completion, until the next span) version `version` sampled."""

    version: int
    start: int


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is at, by its own figures."""

    running: int
    """Requests that are being decoded."""
    waiting: int
    """Requests in its queue."""
    cache_used: float
    """Share of the key/value cache in use, 0 to 1."""
    preemptions: int
    """Requests that it has put back so far because the cache was full."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample.

    `token_ids` includes the end-of-sequence token when `finish_reason` is `stop`; `logprobs[i]` is the natural
    log-probability of `token_ids[i]` under the distribution that it was drawn from (temperature applied).
    `spans` are the policy versions it was sampled under, each with the index of its first token; empty: all of it under
    the version that was in force when it was asked for. `abort`: cut short by `abort` or `interrupt`; what is there is
    sound and may be continued, here or elsewhere, by asking for the rest of prompt + `token_ids`.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    spans: Sequence[Span] = ()
    generated: Sequence[bool] | None = None
    """Of each token, whether the policy wrote it; None: all of them. An engine never sets it: the environment of a
    multi-turn task may have written some."""
    proofs: bytes | None = None
    """`app.protocol.proofs` of the tokens that the policy wrote, from an engine that was told to `prove`."""


class Engine(Protocol):
    """Samples completions of token ids. Not thread-safe, `interrupt` excepted."""

    @property
    def version(self) -> int | None:
        """Installed policy version; None before the first `install`."""
        ...

    @property
    def quantisation(self) -> str | None:
        """How the weights in force were quantised before they were sent; None: they were not."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (Hugging Face interface), once `load` has run."""
        ...

    def load(self, model_dir: Path) -> None:
        """Prepare model and tokenizer from config and tokenizer files, without weights. Raises BadInput."""
        ...

    def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        """Put the weights of a verified snapshot in force, and check that they are what the learner signed.

        Raises IntegrityError, and then nothing has changed; or Tainted, and then no version is in force until `load`
        and `install` have run again.
        """
        ...

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Sample; the answer holds the first request's `n` completions, then the second's, and so on.

        Cut short by `interrupt`, it returns what there is: unfinished completions as `abort`, perhaps without a token.
        Raises BadInput (unusable request), Unavailable (no version installed), Interrupted (nothing was sampled).
        """
        ...

    def interrupt(self) -> None:
        """End a running `generate` soon, and every later one at once. May be called from any thread; final."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class StreamEngine(Protocol):
    """Samples single completions side by side and takes new ones at any time; lives in the agent's event loop.

    It may be asked for any number of completions at once; what it can't run yet waits in its queue. `install` while
    some are running does what `on_swap` says: "continue" goes on with them under the new version (their `spans` tell),
    "resubmit" cuts them, and they come back as `abort`.
    """

    @property
    def version(self) -> int | None:
        """Installed policy version; None before the first `install`, and while the engine is tainted."""
        ...

    @property
    def quantisation(self) -> str | None:
        """How the weights in force were quantised before they were sent; None: they were not."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (Hugging Face interface), once `load` has run."""
        ...

    @property
    def weights(self) -> Weights | None:
        """What the engine says of the weights in force; None where it does not, or was not asked with this version."""
        ...

    @property
    def patience_s(self) -> float:
        """No `load` and no `install` takes longer, by the engine's own timeouts: one that does hangs."""
        ...

    async def load(self, model_dir: Path) -> None:
        """Prepare from config and tokenizer files (under an adapter also the base model's weights): start the engine's
        process, wait until it answers a probe. Raises BadInput, Unavailable."""
        ...

    async def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        """Put the weights of a verified snapshot in force, as `Engine.install` does. Raises IntegrityError: nothing has
        changed; Tainted: no version is in force until `load` and `install` have run again."""
        ...

    async def sample(self, prompt_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float) -> Completion:
        """One completion. Cancelling the call gives it up. Raises BadInput, Unavailable (no version, or, as EngineDied,
        the engine's process has died: then `version` is None)."""
        ...

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float) -> list[float]:
        """Log-prob of each completion token under the version in force, as `sample` would give it."""
        ...

    async def abort(self) -> None:
        """Cut everything that runs or waits: each comes back with what it has, as `abort`. New ones are taken after."""
        ...

    async def load_figures(self) -> Load:
        """The engine's figures now. Raises Unavailable."""
        ...

    async def healthy(self, timeout_s: float) -> bool:
        """Whether one token comes out of it in time. An open port is no proof."""
        ...

    async def close(self) -> None:
        """End the engine's process and free what it holds."""
        ...


def unique_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict with tied tensors kept once, under the name that comes first (how snapshots store them)."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    unique: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        unique[name] = tensor
    return unique


def check_kind(manifest: Manifest, *, adapted: bool) -> None:
    """Hold a version's kind against how the engine was loaded: under an adapter or not. Raises IntegrityError."""
    due = "adapter" if adapted else "full"
    if manifest.kind != due:
        raise IntegrityError(
            f"snapshot v{manifest.version} is of the kind {manifest.kind}, and the engine, by the model files, is one "
            f"for the kind {due}"
        )


def check_layout(manifest: Manifest, expected: Mapping[str, Sequence[int]]) -> None:
    """Hold a manifest's tensors against the model's names and shapes. Raises IntegrityError that names what differs.

    Scales of quantised tensors are no tensors of the model; that they fit, the manifest has seen to.
    """
    found = {entry.name: entry for entry in manifest.weights}
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    if missing or extra:
        raise IntegrityError(
            f"snapshot v{manifest.version} does not fit the model: missing {missing[:3]}, unexpected {extra[:3]}"
        )
    for name, shape in expected.items():
        entry = found[name]
        if list(entry.shape) != list(shape):
            raise IntegrityError(
                f"snapshot v{manifest.version}: {name} has shape {list(entry.shape)}, the model needs {list(shape)}"
            )
        if entry.dtype not in STORED_DTYPES:
            known = ", ".join(STORED_DTYPES)
            raise IntegrityError(f"snapshot v{manifest.version}: {name} has dtype {entry.dtype}, not one of {known}")
