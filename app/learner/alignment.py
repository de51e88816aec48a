"""Gradient alignment control (GAC, arXiv 2603.01501): experimental.

With stale rollouts consecutive policy gradients keep pointing the same way, as they do not on-policy, so that what was
learnt already is learnt again. GAC watches the cosine c of a gradient with the one before: while it is small nothing
happens, above a first threshold the part along the previous gradient is shrunk, above a second one the step is skipped.
That there are these three regimes and that the projection goes one way is read from public notes; both thresholds and
the amount of shrinking here are inferred.

Invariant: what is left of a gradient never points against the previous one because of this, and is never longer.
"""

from __future__ import annotations


def removed(cosine: float, low: float) -> float:
    """Share of the part along the previous gradient that is to go: 0 up to `low`, then what brings c·‖g‖ along it down
    to low·‖g‖."""
    return 0.0 if cosine <= low else 1.0 - low / cosine


def skipped(cosine: float, high: float, again: bool) -> bool:
    """Whether the step changes nothing. Never twice in a row (`again`): at unchanged weights large batches have nearly
    the same gradient, and the learner would stand still for ever."""
    return cosine > high and not again
