"""Figures of one audit: a group's recorded log-probs against those computed again. Pure.

Δ_t = recorded − computed again says whether a node's log-probs are those of the weights that it names.

Whether its tokens were *drawn* from that distribution is another question: a node may sample at a lower temperature, or
keep the likely answers of many, and still hand in true log-probs. With H_t the entropy of the distribution at position
t, X_t = −log p(token_t) − H_t has mean 0 given all tokens before it, whoever wrote those, and variance Var_t = Σ p·(log
p)² − H_t². So ΣX_t is a martingale. Where an answer ends is decided by what was drawn before (an end-of-sequence token,
or the limit), which makes the end a bounded stopping time: by optional stopping the sum up to it still has mean 0 and
the variance E ΣVar_t. Neither short answers nor cut ones bias it. Sums of groups add up.

Invariant: only tokens that the policy wrote count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
TOP = 5.0
"""Nats above its mean that one token adds to `excess` at most."""
_KL_MOST = 20.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """One element a token that the policy wrote: natural log-probs as recorded and as computed again, and entropy and
    variance of −log p of the distribution computed again."""

    recorded: Array
    again: Array
    entropy: Array
    variance: Array


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one group; `app/protocol/audits.py` says what each is."""

    tokens: int
    rms: float
    median: float
    """Of |Δ|: no few tokens can raise it."""
    bias: float
    kl: float
    surprise: float
    variance: float
    spread: float
    jump: float
    excess: float


NOTHING = Figures(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Of a group of which nothing could be compared."""


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Several answers as one; at least one."""
    return Tokens(
        np.concatenate([p.recorded for p in parts]),
        np.concatenate([p.again for p in parts]),
        np.concatenate([p.entropy for p in parts]),
        np.concatenate([p.variance for p in parts]),
    )


def figures(tokens: Tokens) -> Figures:
    """The figures of a group."""
    count = len(tokens.recorded)
    if count == 0:
        return NOTHING
    delta = tokens.recorded - tokens.again
    # A log-prob of −∞ computed again is a token that the policy can't write: as far off as anything can be.
    bounded = np.clip(delta, -_KL_MOST, _KL_MOST)
    surprise = -np.maximum(tokens.again, -1e4) - tokens.entropy
    variance = np.maximum(tokens.variance, 0.0)
    return Figures(
        tokens=count,
        rms=math.sqrt(float(np.mean(np.square(bounded)))),
        median=float(np.median(np.abs(bounded))),
        bias=float(np.mean(bounded)),
        kl=max(0.0, float(np.mean(np.exp(-bounded) - 1 + bounded))),
        surprise=float(np.sum(surprise)),
        variance=float(np.sum(variance)),
        spread=float(np.sum(np.sqrt(variance))),
        jump=float(np.max(tokens.entropy)),
        excess=float(np.sum(np.minimum(surprise, TOP))),
    )
