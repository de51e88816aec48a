"""One group, computed again.

Invariant: each token is held against the version that its span claims; what can't be computed is said, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from app.learner.audit.decide import Look
from app.learner.audit.proofs import Match, of_version, together
from app.learner.audit.scoring import Scored
from app.learner.audit.statistics import NOTHING, Figures, Tokens, figures, joined
from app.learner.buffer import Group
from app.protocol.audits import Audit, Fault, Verdict
from app.protocol.copies import Sample, copied, packed
from app.protocol.trajectory import Rollout


class Scorer(Protocol):
    """Log-probs under published versions."""

    def score(self, version: int, rollouts: Sequence[Rollout]) -> list[Scored] | None: ...


def token_versions(rollout: Rollout) -> list[int]:
    """The version that each completion token claims."""
    ends = [*rollout.span_starts[1:], len(rollout.completion_ids)]
    spans = zip(rollout.span_versions, rollout.span_starts, ends, strict=True)
    return [version for version, start, end in spans for _ in range(start, end)]


def look(
    group: Group,
    scorer: Scorer,
    never: Callable[[int], bool],
    *,
    reward_off: float | None,
    foreign: bool,
    chosen: bool,
) -> Look:
    """What is found out about a group. `never`: whether a version was certainly never published; `chosen`: the job has
    nodes send only some answers of a group, so that what they are like, and how often, says nothing."""
    versions = sorted({v for r in group.rollouts for v in r.span_versions})
    nothing = Look(NOTHING, reward_off, 0, None, foreign=foreign)
    unpublished = [v for v in versions if never(v)]
    if unpublished:
        return replace(nothing, never=unpublished[0])
    parts: list[Tokens | None] = [None] * len(group.rollouts)
    matched: list[Match] = []
    for version in versions:
        scored = scorer.score(version, group.rollouts)
        if scored is None:
            return replace(nothing, missing=version)
        for i, (rollout, one) in enumerate(zip(group.rollouts, scored, strict=True)):
            parts[i] = _put(parts[i], rollout, version, one)
            matched += of_version(one.proofs, rollout, token_versions(rollout), version)
    tokens = [_written(part, rollout) for part, rollout in zip(parts, group.rollouts, strict=True) if part is not None]
    found = figures(joined(tokens))
    if not np.isfinite([found.rms, found.surprise, found.variance]).all():
        return replace(nothing, missing=versions[0])
    if chosen:
        return Look(
            replace(found, surprise=0.0, variance=0.0, spread=0.0, excess=0.0), reward_off, 0, None, None, foreign,
            tuple(matched),
        )  # fmt: skip
    samples = [
        Sample(packed(r.completion_ids), float(t.again.sum())) for r, t in zip(group.rollouts, tokens, strict=True)
    ]
    return Look(found, reward_off, copied(samples), None, None, foreign, tuple(matched))


def _put(part: Tokens | None, rollout: Rollout, version: int, scored: Scored) -> Tokens:
    """The tokens of one version written over what is there."""
    again, entropy, variance = (np.asarray(t, dtype=np.float64) for t in _arrays(scored))
    if part is None:
        return Tokens(np.asarray(rollout.logprobs, dtype=np.float64), again, entropy, variance)
    mine = np.asarray(token_versions(rollout)) == version
    return Tokens(
        part.recorded,
        np.where(mine, again, part.again),
        np.where(mine, entropy, part.entropy),
        np.where(mine, variance, part.variance),
    )


def _arrays(scored: Scored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return scored.logprob, scored.entropy, scored.variance


def _written(part: Tokens, rollout: Rollout) -> Tokens:
    own = np.asarray(rollout.written, dtype=bool)
    return Tokens(part.recorded[own], part.again[own], part.entropy[own], part.variance[own])


def audit_of(group: Group, version: int, found: Look, said: tuple[Verdict, Fault, str]) -> Audit:
    """What is told to the control service."""
    f: Figures = found.figures
    verdict, fault, detail = said
    off = found.reward_off
    return Audit(
        node_id=group.node,
        work_item=group.work_item,
        version=version,
        verdict=verdict,
        fault=fault,
        tokens=f.tokens,
        rms=f.rms,
        bias=f.bias,
        kl=f.kl,
        # What other nodes began says nothing of how this one draws.
        surprise=0.0 if found.foreign else f.surprise,
        variance=0.0 if found.foreign else f.variance,
        spread=0.0 if found.foreign else f.spread,
        jump=f.jump,
        excess=0.0 if found.foreign else f.excess,
        reward_ok=None if off is None else fault != "reward",
        proof_points=together(found.proofs).points,
        proof_misses=together(found.proofs).misses,
        detail=detail[:500],
    )
