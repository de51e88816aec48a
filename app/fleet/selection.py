"""Whether a node chooses among answers by their reward: what twins say of it, all together. Pure.

A twin is a second group for a prompt, by another node. While both nodes hand in what they sampled, the 2n rewards of
the two groups are exchangeable: given all of them, each way to deal them out to two groups is as likely as any other,
whatever the policy, the prompt and the distribution of rewards. Who sends the best (or worst) of several answers has
the higher (lower) ones more often.

With x the rewards less their common mean, over their common standard deviation, and S the sum of x over one group, a
group that is tilted by θ is dealt out with a probability in proportion to exp(θ·S). A bet on θ₁ against all θ ≤ θ₀ pays
e = exp((θ₁ − θ₀)·S)·Z(θ₀)/Z(θ₁), Z(θ) being the mean of exp(θ·S) over all ways to deal. Its mean is at most 1 under
each of those, for the ratio rises with S, and so does S with θ. So what is made of a stake of 1 by bet after bet
reaches K with a probability of at most 1/K, however long it goes on (Ville). θ₀ is what honest nodes may differ by:
their versions are not always the same, nor what their engines round.

Who of two is at fault a comparison does not say. So each node is judged by what *several* others say, those left out
that say most: one of them, or a third if there are more. A coalition that is not larger than that convicts nobody. And
of each partner's testimony a part is not staked, so that friends who choose alike can't outweigh the others.

Invariant: an honest node of which at most `liars(m)` of its m partners choose, or do whatever they like, is convicted
with a probability below 1e-6 in its life.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logs = tuple[float, ...]
"""ln e, one for each of BETS."""

BETS = (0.25, 0.5, 1.0)
"""θ₁. Best of two at a pass rate of one half is 0.55, best of four about 1. A third of the stake is bet on each."""
MARGIN = 0.1
"""θ₀ of one version: odds of rewards 0 and 1 that differ by a factor of 1.22 at least, or P(higher) of about 0.57 to
0.6 for groups of 8 to 16."""
PER_VERSION = 0.05
"""And so much more for each step between the versions: a factor of 1.1 to the odds."""
CERTAIN = math.log(2e6)
"""ln of the threshold: two directions of 5e-7 each."""
STAKE = 0.9
"""Of what is made by each partner's comparisons: a tenth stays as it is, so that nobody takes more than ln 10 off."""
MOST = 64
"""Answers of each group that are compared."""
NEW = 16
"""Comparisons up to which a node has more twins than others."""
DOUBT = math.log(20.0)
"""So much against a node, all partners counted, has it watched as closely as a new one."""
EAGER = 5.0
"""So many times the share of others has a node that is new or in doubt."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one pair of groups says: that the first one's rewards are higher (`rise`), or lower (`fall`), than those of
    an honest pair."""

    rise: Logs
    fall: Logs
    first: bool = True
    """Its group was given out before the twin was made: that there is one could not be known."""

    @property
    def turned(self) -> Comparison:
        """The same of the other group."""
        return Comparison(self.fall, self.rise, not self.first)


NOTHING = Comparison((0.0,) * len(BETS), (0.0,) * len(BETS))
"""A pair that says nothing: all rewards are the same."""


def compare(one: Sequence[float], other: Sequence[float], gap: int) -> Comparison:
    """The rewards of two groups for one prompt, in the order of their samples. `gap`: steps between their versions."""
    mine, theirs = one[:MOST], other[:MOST]
    x = _standard(np.asarray([*mine, *theirs], dtype=np.float64))
    if x is None or not mine or not theirs:
        return NOTHING
    margin = MARGIN + PER_VERSION * max(0, gap)
    total = float(x[: len(mine)].sum())
    return Comparison(_bets(x, len(mine), total, margin), _bets(-x, len(mine), -total, margin))


def _standard(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    """Less the mean, over the standard deviation; None if all are the same."""
    largest = float(np.max(np.abs(rewards), initial=0.0))
    if not math.isfinite(largest) or largest == 0.0:
        return None
    scaled = rewards / largest
    centred = scaled - scaled.mean()
    deviation = float(np.sqrt(np.mean(np.square(centred))))
    return centred / deviation if deviation > 1e-9 else None


def _bets(x: npt.NDArray[np.float64], count: int, total: float, margin: float) -> Logs:
    below = _log_mean(x, count, margin)
    return tuple((bet - margin) * total + below - _log_mean(x, count, bet) if bet > margin else 0.0 for bet in BETS)


def _log_mean(x: npt.NDArray[np.float64], count: int, tilt: float) -> float:
    """ln of the mean of exp(tilt·Σx) over all subsets of `count`: subsets of the first i either have the i-th or not,
    so that means over them follow from those over the first i − 1."""
    weights = np.exp(tilt * x)
    sizes = np.arange(count + 1, dtype=np.float64)
    means = np.zeros(count + 1)
    means[0] = 1.0
    for i, weight in enumerate(weights, 1):
        share = np.minimum(sizes / i, 1.0)
        without = (1.0 - share) * means
        without[1:] += share[1:] * weight * means[:-1]
        means = without
    return math.log(means[count])


@dataclass(frozen=True, slots=True)
class Said:
    """What all twins of a node say of it. ln of e-values."""

    twins: int
    partners: int
    higher: float
    """That its rewards are too high, those partners left out who say most; CERTAIN convicts."""
    lower: float
    doubt: float
    """The greater of both with nobody left out: a reason to look closer, no proof."""

    @property
    def worst(self) -> float:
        """The greater of `higher` and `lower`."""
        return max(self.higher, self.lower)


def liars(partners: int) -> int:
    """So many of a node's partners may be against it."""
    return max(1, partners // 3)


def said(testimony: Mapping[str, Sequence[Comparison]]) -> Said:
    """`testimony`: partner → comparisons of the node's groups with that one's."""
    away, all_ = liars(len(testimony)), list(testimony.values())
    return Said(
        twins=sum(len(found) for found in all_),
        partners=len(testimony),
        higher=_either(all_, away, lambda c: c.rise),
        lower=_either(all_, away, lambda c: c.fall),
        doubt=max(_either(all_, 0, lambda c: c.rise), _either(all_, 0, lambda c: c.fall)),
    )


def _either(partners: Sequence[Sequence[Comparison]], away: int, side: Callable[[Comparison], Logs]) -> float:
    """ln of what is made with half of the stake on all comparisons and half on those of which the node could not know:
    who is honest where a twin may be suspected must not gain by it."""
    every = _evidence([[side(c) for c in found] for found in partners], away)
    unknown = _evidence([[side(c) for c in found if c.first] for found in partners], away)
    return float(np.logaddexp(every, unknown)) - math.log(2)


def _evidence(partners: Sequence[Sequence[Logs]], away: int) -> float:
    """ln of what is made of a stake of 1, the `away` partners left out of whom most was made."""
    each: list[float] = []
    for bet in range(len(BETS)):
        made = sorted(_staked(sum(logs[bet] for logs in found)) for found in partners)
        kept = made[: max(0, len(made) - away)] if away else made
        # Who took something off is not left out.
        each.append(sum(kept) + sum(min(0.0, one) for one in made[len(kept) :]))
    return float(np.logaddexp.reduce(each)) - math.log(len(BETS)) if each else 0.0


def _staked(made: float) -> float:
    return float(np.logaddexp(math.log(1 - STAKE), math.log(STAKE) + made))


def guilt(found: Said) -> str:
    """Why a node is to be quarantined; empty: it is not."""
    if found.worst < CERTAIN:
        return ""
    what, digits = "higher" if found.higher >= found.lower else "lower", math.floor(found.worst / math.log(10))
    return (
        f"chosen: its rewards are {what} than those of {found.partners} other nodes for the same prompts, in "
        f"{found.twins} twins (chance: below 1e-{digits}): a choice among answers by their reward, or another way to "
        "score them"
    )


def share(base: float, *, twins: int, doubt: float) -> float:
    """The chance with which a group of a node gets a twin. `base`: the job's `trust.twin_share`."""
    return min(1.0, base * (EAGER if twins < NEW or doubt >= DOUBT else 1.0))
