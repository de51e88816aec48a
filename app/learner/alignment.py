"""Gradient alignment control (GAC, arXiv 2603.01501): experimental.

With stale rollouts consecutive policy gradients keep pointing the same way, as they do not on-policy, so that what was
learnt already is learnt again. GAC watches the cosine c of a gradient with the one before: while it is small nothing
happens, above a first threshold the part along the previous gradient is shrunk, above a second one the step is skipped.
That there are these three regimes and that the projection goes one way is read from public notes; both thresholds and
the amount of shrinking here are inferred.

Invariant: what is left of a gradient never points against the previous one because of this, and is never longer. Where
the previous gradient decides anything, by GAC or by an adaptive S, `kept` and `skipped` are all that a later process
needs to decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from app.learner.parallel.ranks import Ranks
from app.learner.parallel.shards import local
from app.protocol.job import JobSpec

GRADIENT = "gradient"
"""`gradient/NAME` in a state is the previous gradient of the parameter NAME."""


def removed(cosine: float, low: float) -> float:
    """Share of the part along the previous gradient that is to go: 0 up to `low`, then what brings c·‖g‖ along it down
    to low·‖g‖."""
    return 0.0 if cosine <= low else 1.0 - low / cosine


def skipped(cosine: float, high: float, again: bool) -> bool:
    """Whether the step changes nothing. Never twice in a row (`again`): at unchanged weights large batches have nearly
    the same gradient, and the learner would stand still for ever."""
    return cosine > high and not again


class Alignment:
    """The gradient of the step before, this rank's part, and what the next one is held against."""

    def __init__(self, spec: JobSpec, named: Mapping[str, torch.nn.Parameter], ranks: Ranks) -> None:
        self._spec = spec.learner
        self._named = named
        self._ranks = ranks
        self._decides = spec.learner.gac or spec.adaptive
        self._watches = self._decides or spec.learner.grad_cosine
        self._previous: dict[str, torch.Tensor] | None = None
        self.skipped = False
        """Whether the step before changed nothing."""

    def look(self) -> dict[str, float]:
        """Compare the gradient with the one before and keep it for the next; with `gac` bend it, or skip the step.

        Collective."""
        spec, before, found = self._spec, self._previous, self._cosine()
        raw = {n: p.grad for n, p in self._named.items() if p.grad is not None}
        # The optimizer's zero_grad lets go of these tensors, so that they need no copy.
        self._previous = raw if self._watches else None
        if found is None or before is None:
            self.skipped = False
            return {}
        cosine, along = found
        if not spec.gac:
            return {"grad_cosine": cosine}
        self.skipped = skipped(cosine, spec.gac_high, again=self.skipped)
        share = removed(cosine, spec.gac_low)
        for name, gradient in raw.items() if share else ():
            # Not in place: the next step is compared with the gradient as it was.
            self._named[name].grad = gradient - share * along * before[name]
        return {"grad_cosine": cosine, "gac_removed": share, "gac_skipped": float(self.skipped)}

    def kept(self) -> dict[str, torch.Tensor]:
        """`gradient/NAME` → the gradient of the step before; nothing where it decides nothing, for it is as large as
        the weights. The tensors are never changed any more."""
        kept = self._previous if self._decides else None
        return {f"{GRADIENT}/{name}": tensor for name, tensor in (kept or {}).items()}

    def restore(self, gradients: Mapping[str, torch.Tensor], skipped: bool) -> None:
        """Go on from what `kept` and `skipped` were; NAME → gradient. Without any the next step is taken as it is."""
        self._previous = dict(gradients) or None
        self.skipped = skipped

    def _cosine(self) -> tuple[float, float] | None:
        """Cosine of this gradient with the one before, and its part along it as a multiple of that; None if there is
        none, or if one of them is zero."""
        if self._previous is None:
            return None
        pairs = [(local(p.grad), local(self._previous[n])) for n, p in self._named.items() if p.grad is not None]
        sums = [
            torch.stack([(x * y).sum().double() for x, y in which]).sum()
            for which in (pairs, [(g, g) for g, _ in pairs], [(h, h) for _, h in pairs])
        ]
        dot, new, old = self._ranks.total(torch.stack(sums).tolist())
        return (dot / math.sqrt(new * old), dot / old) if new > 0 and old > 0 else None
