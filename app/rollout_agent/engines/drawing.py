"""Sampling by numbers of one's own: the rows of a batch, the random numbers of a request, the draw. No model here.

Invariant: the log-prob of a drawn token is that of the distribution that it was drawn from; a request's numbers are a
function of its seed, and of where in its group and in its completion it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from app.rollout_agent.engines.base import Completion, GenRequest


@dataclass(slots=True)
class Batch:
    """Rows still in the running batch; `rows[i]` is the output row of batch row i."""

    rows: torch.Tensor
    limits: torch.Tensor
    temperatures: torch.Tensor
    uniforms: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    done: torch.Tensor

    def select(self, keep: torch.Tensor) -> None:
        """Keep the batch rows with these indices."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name)[keep])


def uniforms(request: GenRequest, longest: int) -> torch.Tensor:
    """The request's random numbers in [0, 1), [n, longest], filled up to its own limit; a function of its seed only,
    and of where in its group it goes on."""
    generator = torch.Generator().manual_seed(request.seed % 2**63)
    limit, start = request.sampling.max_tokens, request.start
    numbers = torch.zeros(request.n, longest, dtype=torch.float64)
    # Numbers are drawn sample by sample, so those of earlier samples and tokens have to be drawn as well.
    drawn = torch.rand(request.first + request.n, start + limit, generator=generator, dtype=torch.float64)
    numbers[:, :limit] = drawn[request.first :, start:]
    return numbers


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF draw. Logits [rows, vocabulary], temperatures [rows, 1], uniform [rows] → tokens, log-probs [rows].

    Sums in float64, so that a large vocabulary does not shift the distribution; a token of probability 0 is not drawn.
    """
    logprobs = torch.log_softmax(logits.float() / temperatures, dim=-1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = (uniform * cdf[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def completions(
    tokens: np.ndarray, logprobs: np.ndarray, limits: np.ndarray, eos: np.ndarray, proofs: Sequence[bytes] | None
) -> list[Completion]:
    """Cut every row after its first end-of-sequence token, or at its limit; one that came to neither is unfinished."""
    ends = np.isin(tokens, eos) & (np.arange(tokens.shape[1]) < limits[:, None])
    stopped = np.asarray(ends.any(axis=1))
    lengths = np.where(stopped, ends.argmax(axis=1) + 1, np.minimum(limits, tokens.shape[1]))
    return [
        Completion(
            tokens[i, :n].tolist(),
            logprobs[i, :n].tolist(),
            "stop" if stopped[i] else "length" if n == limits[i] else "abort",
            proofs=None if proofs is None else proofs[i],
        )
        for i, n in enumerate(lengths.tolist())
    ]
