"""Markets that swing by ±40 % every half hour, for a day: what following them costs, and what staying would have cost.

Pure: the decisions are the service's own (`activation.decide`, `bids`), everything around them is simulated. Machines
have different mean prices and swing each at its own time. In the first market a lease pays the price in force. In the
second the price is the floor of a bid: a lease pays its own bid, one below the floor is stopped (it delivers nothing)
until its bid is raised, and a machine that was let go is left alone for a while. A replacement boots for a minute while
both are paid.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from app.fleet import bids
from app.fleet.activation import Candidate, Decision, Policy, Running, decide
from app.fleet.market import Usual, average

DAY_S = 24 * 3600.0
TICK_S, BOOT_S = 10.0, 60.0
SWING, PERIOD_S = 0.4, 1800.0
WINDOW_S = 2 * 3600.0
NODES, SLOTS, MACHINES = 8, 12, 60
FOLLOW = Policy(rent_below=1 / 1.1)
STAY = replace(FOLLOW, min_saving=0.99, early_saving=0.99)
"""Nothing saves its whole price, so nobody is ever swapped."""
ON_DEMAND = 2.0
"""On-demand price over the mean floor: no bid goes above it."""

Price = Callable[[float], int]


@dataclass(slots=True)
class Held:
    """A lease of the simulated fleet."""

    machine: str
    since: float
    bid: int = 0


@dataclass
class Fleet:
    """Does what is decided, and counts what that costs."""

    prices: dict[str, Price]
    policy: Policy
    bidding: bool = False
    means: dict[str, int] = field(default_factory=dict)
    leases: dict[str, Held] = field(default_factory=dict)
    leaving: dict[str, list[str]] = field(default_factory=dict)
    """Lease → those that take its place once they work."""
    swaps: list[float] = field(default_factory=list)
    raises: int = 0
    usual: dict[str, Usual] = field(default_factory=dict)
    cooling: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Machine → how often it was let go for its floor, and until when it is left alone."""
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
            ready = sum(1 for x in self.leases.values() if now - x.since >= BOOT_S and self._runs(x, now))
            self.short_s += TICK_S if now > 10 * BOOT_S and ready < NODES else 0.0
            self.paid += sum(self._rate(x, now) for x in self.leases.values() if self._runs(x, now)) * TICK_S / 3600

    def _runs(self, held: Held, now: float) -> bool:
        return not self.bidding or held.bid >= self.prices[held.machine](now)

    def _rate(self, held: Held, now: float) -> int:
        return held.bid if self.bidding else self.prices[held.machine](now)

    def _decide(self, now: float) -> None:
        self.usual = {m: average(self.usual.get(m), price(now), now) for m, price in self.prices.items()}
        running = [self._running(key, x, now) for key, x in self.leases.items() if key not in self.leaving]
        taken = {x.machine for x in self.leases.values()}
        free = [m for m in self.prices if m not in taken and self.cooling.get(m, (0, 0.0))[1] <= now]
        market = [self._candidate(f"o-{m}", m, now) for m in free]
        decision = decide(running, market, float(NODES), SLOTS - len(self.leaving), self.policy)
        self._cool(decision, running, now)
        for key, _ in decision.release:
            del self.leases[key]
        made = []
        for choice in decision.rent:
            self.born += 1
            made.append(f"lease-{self.born}")
            worth = decision.limits.get(choice.key)
            bid = bids.bid(self.prices[choice.machine](now), self._caps(choice.machine), worth)
            self.leases[made[-1]] = Held(choice.machine, now, bid or choice.price)
        self.leaving |= {key: made for key, _ in decision.retire}
        self.swaps += [now] * (len(decision.retire) + len(decision.release))
        for key in decision.rebid:
            self._raise(self.leases[key], decision.limits.get(key), now)
        for held in self.leases.values() if self.bidding else ():
            held.bid = bids.lowered(self.prices[held.machine](now), held.bid, self._caps(held.machine)) or held.bid

    def _raise(self, held: Held, worth: int | None, now: float) -> None:
        bid = bids.bid(self.prices[held.machine](now), self._caps(held.machine), worth)
        if bid is not None and bid > held.bid:
            held.bid, self.raises = bid, self.raises + 1

    def _cool(self, decision: Decision, running: list[Running], now: float) -> None:
        """A machine that was let go because others outbid us is left alone, the longer the more often."""
        outbid = {r.candidate.key for r in running if r.outbid or r.ending}
        for key in outbid & {key for key, _ in [*decision.release, *decision.retire]}:
            machine = self.leases[key].machine
            count, until = self.cooling.get(machine, (0, 0.0))
            count = bids.troubles(count, until, now) if count else 1
            self.cooling[machine] = (count, now + bids.cooldown_s(count))

    def _caps(self, machine: str) -> bids.Caps:
        return bids.Caps(on_demand=round(self.means[machine] * ON_DEMAND)) if self.means else bids.Caps()

    def _running(self, key: str, held: Held, now: float) -> Running:
        age, floor = now - held.since, self.prices[held.machine](now)
        one = self._candidate(key, held.machine, now)
        if not self.bidding:
            return Running(one, age >= BOOT_S, age)
        caps = self._caps(held.machine)
        if not bids.presses(floor, held.bid, caps):
            return Running(replace(one, price=held.bid), age >= BOOT_S, age)
        full = bids.bid(floor, caps)
        if full is None:
            return Running(one, age >= BOOT_S, age, ending="above its on-demand price")
        known = self.usual[held.machine].known
        return Running(replace(one, price=full), age >= BOOT_S, age, outbid=True, least=floor, known=known)

    def _candidate(self, key: str, machine: str, now: float) -> Candidate:
        usual, margin = self.usual[machine], bids.MARGIN if self.bidding else 1.0
        return Candidate(
            key, machine, round(self.prices[machine](now) * margin), 1.0,
            round(usual.micros_h * margin) if now > usual.since else None,
        )  # fmt: skip


def wave(mean: float, phase: float) -> Price:
    """A sine around a mean."""
    return lambda now: round(mean * (1 + SWING * math.sin(2 * math.pi * (now / PERIOD_S + phase))))


def market(rng: random.Random) -> tuple[dict[str, Price], dict[str, int]]:
    """Machines whose mean prices lie within ±20 % of each other; their prices and means."""
    means = {f"m{i}": rng.uniform(240_000, 360_000) for i in range(MACHINES)}
    return {name: wave(mean, rng.random()) for name, mean in means.items()}, {n: round(m) for n, m in means.items()}


def busiest(swaps: list[float]) -> int:
    """Most swaps in any two hours."""
    return max((sum(1 for t in swaps if begin <= t < begin + WINDOW_S) for begin in swaps), default=0)


def compare(markets: int, seconds: float, *, bidding: bool) -> dict[str, float]:
    """A fleet that follows beside one that stays, over several markets."""
    ratios, swaps, raises, most, short = [], [], [], 0.0, 0.0
    for seed in range(markets):
        prices, means = market(random.Random(seed))
        follow, stay = (Fleet(prices, p, bidding, means if bidding else {}) for p in (FOLLOW, STAY))
        follow.run(seconds)
        stay.run(seconds)
        if stay.swaps:
            raise RuntimeError("the fleet that stays has moved")
        ratios.append(follow.paid / stay.paid)
        swaps.append(len(follow.swaps) / NODES / (seconds / WINDOW_S))
        raises.append(follow.raises / NODES / (seconds / WINDOW_S))
        most = max(most, busiest(follow.swaps) / NODES)
        short = max(short, follow.short_s)
    return {
        "vs_never_swapping_mean": round(statistics.mean(ratios), 4),
        "vs_never_swapping_max": round(max(ratios), 4),
        "swaps_per_node_2h_mean": round(statistics.mean(swaps), 4),
        "swaps_per_node_2h_max": round(most, 4),
        "short_s": short,
        **({"raises_per_node_2h_mean": round(statistics.mean(raises), 4)} if bidding else {}),
    }


def run(markets: int, seconds: float = DAY_S) -> dict[str, float]:
    """All figures; those of the market of bids begin with `bid_`."""
    plain = compare(markets, seconds, bidding=False)
    floors = compare(markets, seconds, bidding=True)
    return {"markets": markets, **plain, **{f"bid_{name}": value for name, value in floors.items()}}


def _row(name: str, figures: dict[str, float], prefix: str) -> str:
    mean, most, cost = (
        figures[prefix + key] for key in ("swaps_per_node_2h_mean", "swaps_per_node_2h_max", "vs_never_swapping_mean")
    )
    return f"{name:<28}{mean:>12.3f}{most:>12.3f}{cost:>22.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A fleet in a market that swings.")
    parser.add_argument("--markets", type=int, default=5)
    found = run(parser.parse_args().markets)
    print(f"{'':<28}{'swaps/node/2h':>12}{'most':>11}{'cost vs never swapping':>23}")
    print(_row("price in force swings", found, ""))
    print(_row("floors of bids swing", found, "bid_"))
    print(json.dumps(found))
