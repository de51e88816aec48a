"""What to bid for an interruptible machine, and when to let it go. Pure.

Invariant: no bid is above the user's cap, the machine's own on-demand price, or what the job would pay for the machine
that took its place. A bid is what is paid (PROVIDERS: not the floor), so each dollar above the floor is a real cost,
and a bid that the market has left behind is lowered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MARGIN = 1.15
"""A bid this much above the floor survives small moves of the market."""
NEAR = 1.05
"""A bid less than this above the floor is raised before the floor reaches it: who is outbid is stopped first."""
FAR = 1.3
"""A bid more than this above the floor is lowered."""
SWING = 1.5
"""A price up to so many times its usual one is a swing that comes back; beyond that it has risen."""
COOLDOWN_S = 120.0
COOLDOWN_MAX_S = 6 * 3600.0
FORGIVEN_S = 24 * 3600.0
"""A machine that gave no trouble for so long after its last cool-down begins anew."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What limits a bid, micro-dollars per hour of rent; None where nothing does."""

    user: int | None = None
    """`max_price_per_hour`."""
    on_demand: int | None = None
    """For the same machine: nobody pays more for one that can be taken away."""

    @property
    def most(self) -> int | None:
        """The lower of both."""
        given = [cap for cap in (self.user, self.on_demand) if cap is not None]
        return min(given) if given else None


def bid(floor: int, caps: Caps, worth: int | None = None) -> int | None:
    """Floor × margin, at most the caps and what the machine is worth (rent, micro-dollars per hour); None if not even
    the floor is within them."""
    limits = [cap for cap in (caps.most, worth) if cap is not None]
    if limits and floor > min(limits):
        return None
    return min([round(floor * MARGIN), *limits])


def presses(floor: int, rate: int, caps: Caps) -> bool:
    """Whether a bid has to be raised for the machine to stay: it is outbid, or will be soon and could bid more."""
    if floor > rate:
        return True
    better = bid(floor, caps)
    return floor * NEAR > rate and better is not None and better > rate


def lowered(floor: int, rate: int, caps: Caps) -> int | None:
    """The bid to go down to, for one that the floor has left far behind; None if it stays."""
    better = bid(floor, caps)
    return better if floor > 0 and rate > floor * FAR and better is not None and better < rate else None


def limit(rival: int, switch: int, life_h: float, min_saving: float, usual: int | None = None) -> int:
    """The most that keeping a machine may cost (all parts, micro-dollars per hour) before another takes its place.

    `rival` is what its replacement costs for the same throughput, `switch` what moving costs once (both are paid while
    the new one starts, which delivers nothing yet), spread over the `life_h` hours that the saving lasts. Up to there
    its ρ is at most that of the replacement. A machine whose usual price is within that is followed through a swing.
    """
    # A saving below `min_saving`, or one that does not pay for the switch, moves nobody.
    worth = max(math.ceil(rival / (1 - min_saving)) - 1, round(rival + switch / max(life_h, 1e-3)))
    if usual is not None and usual <= worth:
        return max(worth, round(SWING * usual))
    return worth


def cooldown_s(count: int, first_s: float = COOLDOWN_S) -> float:
    """How long a machine is left alone after its `count`-th trouble in a row: it doubles each time."""
    return min(COOLDOWN_MAX_S, first_s * 2.0 ** min(count - 1, 32))


def troubles(before: int, until: float, now: float) -> int:
    """The count of a machine that is in trouble again, whose last cool-down ended at `until`."""
    return 1 if now - until >= FORGIVEN_S else before + 1
