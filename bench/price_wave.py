"""A market that swings by ±40 % every half hour, for a day: what following it costs, and what staying would have cost.

Pure: the decision is the service's own (`activation.decide`), everything around it is simulated. Machines have
different mean prices and swing each at its own time; a lease pays the price in force, a replacement boots for a minute
while both are paid.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from app.fleet.activation import Candidate, Policy, Running, decide
from app.fleet.market import Usual, average

DAY_S = 24 * 3600.0
TICK_S, BOOT_S = 10.0, 60.0
SWING, PERIOD_S = 0.4, 1800.0
WINDOW_S = 2 * 3600.0
NODES, SLOTS, MACHINES = 8, 12, 60
FOLLOW = Policy(rent_below=1 / 1.1)
STAY = replace(FOLLOW, min_saving=1.0, early_saving=1.0)
"""Nothing saves its whole price, so nobody is ever swapped."""

Price = Callable[[float], int]


@dataclass(frozen=True, slots=True)
class Held:
    """A lease of the simulated fleet."""

    machine: str
    since: float


@dataclass
class Fleet:
    """Does what is decided, and counts what that costs."""

    prices: dict[str, Price]
    policy: Policy
    leases: dict[str, Held] = field(default_factory=dict)
    leaving: dict[str, list[str]] = field(default_factory=dict)
    """Lease → those that take its place once they work."""
    swaps: list[float] = field(default_factory=list)
    usual: dict[str, Usual] = field(default_factory=dict)
    paid: float = 0.0
    """Micro-dollars."""
    short_s: float = 0.0
    born: int = 0

    def run(self, seconds: float) -> None:
        """Let time pass."""
        for tick in range(round(seconds / TICK_S)):
            now = tick * TICK_S
            for old, heirs in list(self.leaving.items()):
                if all(now - self.leases[h].since >= BOOT_S for h in heirs):
                    del self.leases[old], self.leaving[old]
            self._decide(now)
            ready = sum(1 for x in self.leases.values() if now - x.since >= BOOT_S)
            self.short_s += TICK_S if now > 10 * BOOT_S and ready < NODES else 0.0
            self.paid += sum(self.prices[x.machine](now) for x in self.leases.values()) * TICK_S / 3600

    def _decide(self, now: float) -> None:
        self.usual = {m: average(self.usual.get(m), price(now), now) for m, price in self.prices.items()}
        running = [
            Running(self._candidate(key, x.machine, now), now - x.since >= BOOT_S, now - x.since)
            for key, x in self.leases.items()
            if key not in self.leaving
        ]
        taken = {x.machine for x in self.leases.values()}
        market = [self._candidate(f"o-{m}", m, now) for m in self.prices if m not in taken]
        decision = decide(running, market, float(NODES), SLOTS - len(self.leaving), self.policy)
        for key, _ in decision.release:
            del self.leases[key]
        made = []
        for choice in decision.rent:
            self.born += 1
            made.append(f"lease-{self.born}")
            self.leases[made[-1]] = Held(choice.machine, now)
        self.leaving |= {key: made for key, _ in decision.retire}
        self.swaps += [now] * (len(decision.retire) + len(decision.release))

    def _candidate(self, key: str, machine: str, now: float) -> Candidate:
        usual = self.usual[machine]
        return Candidate(
            key, machine, self.prices[machine](now), 1.0, round(usual.micros_h) if now > usual.since else None
        )


def wave(mean: float, phase: float) -> Price:
    """A sine around a mean."""
    return lambda now: round(mean * (1 + SWING * math.sin(2 * math.pi * (now / PERIOD_S + phase))))


def market(rng: random.Random) -> dict[str, Price]:
    """Machines whose mean prices lie within ±20 % of each other."""
    return {f"m{i}": wave(rng.uniform(240_000, 360_000), rng.random()) for i in range(MACHINES)}


def busiest(swaps: list[float]) -> int:
    """Most swaps in any two hours."""
    return max((sum(1 for t in swaps if begin <= t < begin + WINDOW_S) for begin in swaps), default=0)


def run(markets: int, seconds: float = DAY_S) -> dict[str, float]:
    """All figures."""
    ratios, swaps, most, short = [], [], 0.0, 0.0
    for seed in range(markets):
        prices = market(random.Random(seed))
        follow, stay = Fleet(prices, FOLLOW), Fleet(prices, STAY)
        follow.run(seconds)
        stay.run(seconds)
        if stay.swaps:
            raise RuntimeError("the fleet that stays has moved")
        ratios.append(follow.paid / stay.paid)
        swaps.append(len(follow.swaps) / NODES / (seconds / WINDOW_S))
        most = max(most, busiest(follow.swaps) / NODES)
        short = max(short, follow.short_s)
    return {
        "markets": markets,
        "vs_never_swapping_mean": round(statistics.mean(ratios), 4),
        "vs_never_swapping_max": round(max(ratios), 4),
        "swaps_per_node_2h_mean": round(statistics.mean(swaps), 4),
        "swaps_per_node_2h_max": round(most, 4),
        "short_s": short,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A fleet in a market that swings.")
    parser.add_argument("--markets", type=int, default=5)
    print(json.dumps(run(parser.parse_args().markets)))
