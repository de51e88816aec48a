"""Which work may be handed out, and which prompts it is for. Pure.

Invariant: no work item is handed out whose rollouts could not be trained on in time, if the queue before it is
consumed in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

LOOK = 3
"""Newest steps that say how much the next one consumes."""


def grantable(*, step: int, version: int, staleness: int, prompts: int, ahead: int) -> int:
    """How many further groups sampled under `version` would still be admissible when their turn comes.

    `step` is t, the learner's completed steps; `prompts` what a step consumes (`consumed`); `ahead` counts groups that
    are accepted or leased and not yet trained on. The group after `ahead` others is consumed at step
    t + ⌊ahead / prompts⌋ and is admissible while that step minus `version` is at most S. Same bound as AReaL's
    admission, (η + version + 1)·B − (accepted + running).
    """
    return max(0, (staleness + version - step + 1) * prompts - ahead)


def reach(published: int, staleness: int) -> int:
    """The newest version that a learner can have, if the service has heard of none since `published`.

    All that it was given was sampled under that version or an older one, so the last step t that it can make of it has
    t − published ≤ S; that step makes version t + 1.
    """
    return published + staleness + 1


def consumed(recent: Sequence[int], *, prompts: int, most: int) -> int:
    """Groups that the next step will consume at least: `prompts`, or more if every one of the newest steps did.

    A learner makes up for groups without a signal from what is to spare (`learner.refill`). What it consumed over and
    above `prompts` is let out again, so that there is something to spare; `most` bounds it. With fewer than LOOK steps
    on record nothing is known.
    """
    return prompts if len(recent) < LOOK else max(prompts, min(most, *recent))


@lru_cache(maxsize=16)
def _order(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(size)


def prompt_at(seed: int, ordinal: int, size: int) -> int:
    """The prompt of the `ordinal`-th work item: every prompt once an epoch, in an order that only the seed decides."""
    return int(_order(seed, ordinal // size, size)[ordinal % size])


def item_seed(seed: int, ordinal: int) -> int:
    """Sampling seed of a work item: 63 bits, distinct for each ordinal, reproducible."""
    state = np.random.SeedSequence([seed, ordinal]).generate_state(1, np.uint64)[0]
    return int(state) >> 1


def lease_deadline(*, t_train: float | None, prompts: int, items: float, node_rate_groups_s: float | None) -> float:
    """Seconds that a node has to answer `items` groups: ten times what it should need, between 20 s and 30 min."""
    expected = items / node_rate_groups_s if node_rate_groups_s else items * 2.0
    floor = 4 * t_train if t_train else 0.0
    return min(1800.0, max(20.0, 10 * expected, floor))


SLICE = 0.35
"""Share of T_train that one node's lease may take: what is under way is not at hand when the learner needs it."""


def share(*, t_train: float | None, group_size: int, prompts: int, node_rate: float | None) -> int:
    """Most groups that one node may lease at once: what it makes in a slice of T_train.

    `node_rate` is in rollouts per second. A node that nobody has measured, or a slow one, gets an eighth of a batch, so
    that the cost of asking and committing is spread. Without this bound a few slow nodes hold all that admission lets
    out, and the learner waits for the slowest of them.
    """
    least = max(1, prompts // 8)
    if not node_rate or not t_train:
        return least
    return max(least, min(prompts, round(node_rate * SLICE * t_train / group_size)))


UNMEASURED_SHARE = 0.25
"""Of a batch: so much a node may hold of whose speed nothing was measured."""
UNMEASURED_LEAST = 2
"""Groups: one on its way in while the next is sampled."""


def unmeasured(
    *, prior: float, group_size: int, prompts: int, t_train: float | None, staleness: int, held: float
) -> int:
    """How many further groups a node may have whose speed was not measured yet, while it holds `held`.

    What its prior (rollouts per second) makes in the time that one lease has, at most a quarter of a batch (or two
    groups), and never more than half of all that admission lets be ahead. A machine that is slow, or dead, keeps no
    more than that from the others until its first groups have come in.
    """
    seconds = lease_deadline(t_train=t_train, prompts=prompts, items=1, node_rate_groups_s=None)
    likely = max(1, math.floor(prior * seconds / group_size))
    most = max(UNMEASURED_LEAST, math.ceil(UNMEASURED_SHARE * prompts))
    admitted = max(1, (staleness + 1) * prompts // 2)
    return max(0, math.floor(min(likely, most, admitted) - held))
