"""What is rented, kept and given back: tables, properties, and a market that swings for a day."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.fleet.activation import Candidate, Decision, Patience, Policy, Running, decide, kind_of

POLICY = Policy()
OLD = 100_000.0


def offer(key: str, price: int, mu: float = 1.0) -> Candidate:
    return Candidate(key, f"machine-{key}", price, mu)


def lease(
    key: str, price: int, mu: float = 1.0, *, age: float = OLD, ready: bool = True, endangered: bool = False
) -> Running:
    return Running(offer(key, price, mu), ready, age, endangered)


def keys(pairs: list[tuple[str, str]]) -> list[str]:
    return [key for key, _ in pairs]


def test_an_empty_pool_rents_the_cheapest_cover() -> None:
    decision = decide([], [offer("a", 300), offer("b", 100), offer("c", 200)], 2.0, 8, POLICY)
    assert {c.key for c in decision.rent} == {"b", "c"}
    assert not decision.release
    assert not decision.retire


def test_booting_machines_count_as_capacity() -> None:
    running = [lease("a", 100, 2.0, age=1, ready=False)]
    assert decide(running, [offer("b", 1)], 2.0, 8, POLICY) == Decision()


def test_the_last_bit_of_a_sum_rents_nobody() -> None:
    running = [lease(str(i), 100, math.nextafter(0.1, 0)) for i in range(10)]
    assert sum(r.candidate.mu for r in running) < 1.0
    assert decide(running, [offer("b", 100, 0.1)], 1.0, 20, POLICY) == Decision()


def test_the_dead_band() -> None:
    """Neither renting nor releasing between the target and 1.26 of it (1.2 in a calm pool), nor when a release would go
    too near to it."""
    for pool, age in ((1.0, OLD), (1.1, OLD), (1.2, OLD), (1.25, 600.0)):
        running = [lease("a", 100, 0.15, age=age), lease("b", 100, pool - 0.15, age=age)]
        assert decide(running, [], 1.0, 8, POLICY) == Decision()
    # 2 × the target, but without either the rest is near the target: the next noise would rent again.
    young = [lease("a", 100, 1.02, age=600.0), lease("b", 100, 1.02, age=600.0)]
    assert decide(young, [], 1.0, 8, POLICY) == Decision()
    assert len(decide(young, [], 0.9, 8, POLICY).release) == 1
    # A target with a reserve of ten percent in it is not topped by as much again.
    reserve = Policy(rent_below=1 / 1.1)
    young = [lease("a", 100, 0.15, age=600.0), lease("b", 100, 1.02, age=600.0)]
    assert decide(young, [], 1.0, 8, POLICY) == Decision()
    assert keys(decide(young, [], 1.0, 8, reserve).release) == ["a"]
    calm = [lease(str(i), 100, 0.35, age=1800.0) for i in range(4)]
    assert len(decide(calm, [], 1.05, 8, reserve).release) == 1, "1.05 is less than the target's reserve, but enough"
    assert decide([*calm[:3], lease("new", 100, 0.35, age=1700.0)], [], 1.05, 8, reserve) == Decision()
    assert decide([*calm[:3], lease("few", 100, 0.15, age=1800.0)], [], 1.1, 8, reserve) == Decision(), "1.2 is near"
    hiccup = Policy(rent_below=1 / 1.1, lasting=1.25)
    assert decide(calm, [], 1.05, 8, hiccup) == Decision(), "the learner was faster a moment ago"
    settled = [lease("a", 100, 1.0), lease("b", 100, 1.0)]
    assert len(decide(settled, [], 1.0, 8, POLICY).release) == 1, "but twice the target is not paid for for ever"


@given(
    st.lists(st.tuples(st.floats(0.1, 3.0), st.integers(1, 1000), st.booleans()), min_size=1, max_size=8),
    st.floats(0.1, 4.0),
)
def test_what_still_boots_replaces_nobody_who_works(pool: list[tuple[float, int, bool]], target: float) -> None:
    """A machine that boots may never come: until it works, those that do are not given back for being too much."""
    running = [lease(str(i), price, mu, ready=ready) for i, (mu, price, ready) in enumerate(pool)]
    gone = set(keys(decide(running, [], target, 8, POLICY).release))
    if gone:
        assert sum(r.candidate.mu for r in running if r.ready and r.candidate.key not in gone) >= target * (1 - 1e-9)


def test_surplus_releases_the_dearest_rho_that_can_be_spared() -> None:
    running = [lease("dear", 900, 0.3), lease("big", 2000, 1.0), lease("cheap", 100, 0.3)]
    decision = decide(running, [], 1.2, 8, POLICY)
    assert keys(decision.release) == ["dear"]
    assert "pool 1.6 > 1.44, dearest ρ" in decision.release[0][1]
    assert not decision.rent
    assert not decision.retire


@pytest.mark.parametrize(("age", "ready"), [(119.0, True), (OLD, False), (0.0, False)])
def test_nothing_is_released_or_swapped_before_its_minimum_life_or_while_it_boots(age: float, ready: bool) -> None:
    young = [lease("a", 900, 1.0, age=age, ready=ready), lease("b", 900, 1.0, age=age, ready=ready)]
    assert decide(young, [offer("c", 1, 5.0)], 0.5, 8, POLICY) == Decision()


def test_a_swap_must_pay() -> None:
    running = [lease("a", 100_000)]
    assert decide(running, [offer("b", 86_000)], 1.0, 8, POLICY) == Decision(), "14 % is less than the least saving"
    decision = decide(running, [offer("b", 84_000)], 1.0, 8, POLICY)
    assert [c.key for c in decision.rent] == ["b"]
    assert keys(decision.retire) == ["a"]
    assert decision.release == []
    dear_switch = Policy(switch_s=1800.0)
    assert decide(running, [offer("b", 70_000)], 1.0, 8, dear_switch) == Decision(), "both are paid for half an hour"


def test_a_swap_delivers_at_least_the_same() -> None:
    assert decide([lease("a", 100_000, 1.0)], [offer("b", 1000, 0.9)], 1.0, 8, POLICY) == Decision()
    decision = decide([lease("a", 100_000, 1.0)], [offer("b", 1000, 0.9), offer("c", 1000, 0.2)], 1.0, 8, POLICY)
    assert {c.key for c in decision.rent} == {"b", "c"}


def test_a_young_lease_is_swapped_only_for_what_no_swing_offers() -> None:
    young = [lease("a", 100_000, age=600.0)]
    assert decide(young, [offer("b", 43_000)], 1.0, 8, POLICY) == Decision()
    assert keys(decide(young, [offer("b", 30_000)], 1.0, 8, POLICY).retire) == ["a"]
    settled = [lease("a", 100_000, age=POLICY.settle_s)]
    assert keys(decide(settled, [offer("b", 43_000)], 1.0, 8, POLICY).retire) == ["a"]


def test_at_the_cap_the_old_one_goes_first() -> None:
    decision = decide([lease("a", 100_000)], [offer("b", 10_000)], 1.0, 1, POLICY)
    assert keys(decision.release) == ["a"]
    assert not decision.rent
    assert not decision.retire


def test_a_pool_that_is_short_at_its_cap_still_looks_for_better_prices() -> None:
    decision = decide([lease("a", 100_000)], [offer("b", 10_000, 2.0)], 9.0, 1, POLICY)
    assert keys(decision.release) == ["a"]


def test_fewer_slots_than_machines_release_the_endangered_then_the_dearest() -> None:
    running = [lease("a", 300), lease("b", 100), lease("c", 200), lease("d", 50, endangered=True)]
    decision = decide(running, [offer("x", 1)], 9.0, 2, POLICY)
    assert keys(decision.release) == ["d", "a"]
    assert not decision.rent
    assert not decision.retire
    assert not decision.rebid
    assert "only 2 are allowed" in decision.release[0][1]


def test_endangered_ones_compete_at_their_new_price() -> None:
    cheap = decide([lease("a", 100, endangered=True)], [offer("b", 200)], 1.0, 8, POLICY)
    assert cheap.rebid == ["a"]
    assert not cheap.rent
    assert not cheap.retire
    assert not cheap.release
    dear = decide([lease("a", 300, endangered=True)], [offer("b", 200)], 1.0, 8, POLICY)
    assert [c.key for c in dear.rent] == ["b"]
    assert keys(dear.retire) == ["a"], "it works until its replacement does"
    assert dear.rebid == []
    full = decide([lease("a", 300, endangered=True)], [offer("b", 200)], 1.0, 1, POLICY)
    assert keys(full.release) == ["a"], "without room for both it makes place first"


def test_an_endangered_lease_that_nobody_can_replace_is_bid_for() -> None:
    assert decide([lease("a", 10**9, endangered=True)], [], 1.0, 8, POLICY).rebid == ["a"]


def outbid(key: str, price: int, *, floor: int, usual: int | None = None, age: float = OLD) -> Running:
    one = Candidate(key, f"machine-{key}", price, 1.0, usual)
    return Running(one, True, age, outbid=True, least=floor)


def test_an_outbid_lease_stays_while_that_costs_less_than_another_and_the_switch() -> None:
    held = outbid("a", 230_000, floor=200_000)
    kept = decide([held], [offer("b", 190_000)], 1.0, 8, POLICY)
    assert (kept.rebid, kept.rent, kept.retire) == (["a"], [], [])
    assert kept.limits["a"] > 200_000
    gone = decide([held], [offer("b", 150_000)], 1.0, 8, POLICY)
    assert [c.key for c in gone.rent] == ["b"]
    assert keys(gone.retire) == ["a"], "it stays until its replacement works"
    assert "outbid" in gone.retire[0][1]
    assert gone.rebid == []


def test_an_outbid_lease_bids_no_more_than_it_is_worth() -> None:
    held = outbid("a", 230_000, floor=200_000)
    made = decide([held], [offer("b", 172_000)], 1.0, 8, POLICY)
    assert made.rebid == ["a"]
    assert 200_000 <= made.limits["a"] < 230_000


def test_a_dear_switch_keeps_an_outbid_lease() -> None:
    held = outbid("a", 230_000, floor=200_000)
    slow = Candidate("b", "machine-b", 150_000, 1.0, start_s=1800.0)
    assert decide([held], [slow], 1.0, 8, POLICY).rebid == ["a"]


def test_an_outbid_lease_that_nobody_can_replace_stays() -> None:
    assert decide([outbid("a", 10**9, floor=10**9)], [], 1.0, 8, POLICY).rebid == ["a"]


def test_an_outbid_lease_that_nobody_needs_goes() -> None:
    running = [outbid("a", 230_000, floor=200_000), lease("c", 100_000)]
    made = decide(running, [offer("b", 100_000)], 1.0, 8, POLICY)
    assert keys(made.release) == ["a"]
    assert made.rebid == []


def test_a_swing_of_the_floor_is_followed_and_a_rise_beyond_it_is_not() -> None:
    market = [offer("b", 170_000)]
    usually = 190_000
    assert decide([outbid("a", 270_000, floor=235_000, usual=usually)], market, 1.0, 8, POLICY).rebid == ["a"]
    assert decide([outbid("a", 350_000, floor=305_000, usual=usually)], market, 1.0, 8, POLICY).rebid == []


def test_what_ends_is_replaced_before_it_does_whatever_it_costs() -> None:
    ending = Running(offer("a", 100), True, OLD, ending="its host ends the contract in 300 s")
    made = decide([ending], [offer("b", 900)], 1.0, 8, POLICY)
    assert [c.key for c in made.rent] == ["b"]
    assert made.retire == [("a", "its host ends the contract in 300 s")]
    assert decide([ending], [], 1.0, 8, POLICY) == Decision(), "without another it works as long as it can"
    full = decide([ending], [offer("b", 900)], 1.0, 1, POLICY)
    assert keys(full.release) == ["a"]


def test_what_is_rented_is_worth_what_would_be_rented_instead() -> None:
    made = decide([], [offer("a", 100), offer("b", 130), offer("c", 200)], 1.0, 8, POLICY)
    assert [c.key for c in made.rent] == ["a"]
    assert made.limits == {"a": 130}


def test_the_own_machines_are_not_rented_again() -> None:
    running = [lease("a", 100, 1.0)]
    same = Candidate("new-offer", "machine-a", 1, 5.0)
    assert decide(running, [same], 3.0, 8, POLICY).rent == []


CANDIDATES = st.lists(st.tuples(st.integers(0, 10**6), st.floats(0.01, 3.0), st.integers(0, 12)), max_size=10)
FATES = st.sampled_from(["well", "well", "endangered", "outbid", "ending"])
LEASES = st.lists(
    st.tuples(st.integers(1, 10**6), st.floats(0.01, 3.0), st.booleans(), st.floats(0, 20_000), FATES),
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(offers=CANDIDATES, leases=LEASES, target=st.floats(0.1, 8.0), slots=st.integers(0, 10))
def test_any_decision(
    offers: list[tuple[int, float, int]],
    leases: list[tuple[int, float, bool, float, str]],
    target: float,
    slots: int,
) -> None:
    running = [
        Running(
            Candidate(f"l{i}", f"mine{i}", price, mu), ready, age, fate == "endangered", fate == "outbid",
            price // 2, ending="soon" if fate == "ending" else "",
        )
        for i, (price, mu, ready, age, fate) in enumerate(leases)
    ]  # fmt: skip
    market = [Candidate(f"o{i}", f"m{machine}", price, mu) for i, (price, mu, machine) in enumerate(offers)]
    decision = decide(running, market, target, slots, POLICY)
    by_key = {r.candidate.key: r for r in running}
    leaving = [*keys(decision.release), *keys(decision.retire)]
    assert len(running) - len(decision.release) + len(decision.rent) <= max(slots, 0), "slots are never exceeded"
    assert len(set(leaving)) == len(leaving)
    assert set(leaving) | set(decision.rebid) <= set(by_key)
    assert not set(leaving) & set(decision.rebid)
    assert len({c.machine for c in decision.rent}) == len(decision.rent)
    assert all(by_key[k].endangered or by_key[k].outbid for k in decision.rebid)
    assert not any(by_key[k].ending for k in decision.rebid)
    assert all(decision.limits.get(k, by_key[k].least) >= by_key[k].least for k in decision.rebid)
    assert all(reason for _, reason in [*decision.release, *decision.retire])
    if len(running) <= slots:
        for key in leaving:
            held = by_key[key]
            risky = held.endangered or held.outbid or held.ending
            assert risky or (held.ready and held.age_s >= POLICY.min_life_s)
        if any(r.outbid or r.ending for r in running):
            return
        safe = sum(r.candidate.mu for r in running if not r.endangered)
        if decision.release and not decision.rent and safe > target and len(running) < slots:
            assert safe - sum(by_key[k].candidate.mu for k in keys(decision.release)) >= target
        if len(decision.rent) and not decision.retire and not decision.release:
            assert safe < target, "nobody is rented for a pool that is large enough"


@dataclass
class World:
    """Machines whose price is a function of time, a pool that does what is decided."""

    prices: dict[str, Callable[[float], int]]
    target: float
    slots: int
    fixed: bool
    """Leases keep the price of the moment they began (on-demand); else they pay the price in force."""
    noise: Callable[[], float] = lambda: 1.0
    leases: dict[str, tuple[str, float, int]] = field(default_factory=dict)
    """Lease → machine, since when, price at that moment."""
    retiring: dict[str, list[str]] = field(default_factory=dict)
    born: int = 0
    moves: list[float] = field(default_factory=list)
    short_s: float = 0.0
    paid: float = 0.0

    def run(self, seconds: float, tick: float = 10.0, boot: float = 60.0, policy: Policy = POLICY) -> None:
        now = 0.0
        while now < seconds:
            for old, heirs in list(self.retiring.items()):
                if all(now - self.leases[h][1] >= boot for h in heirs if h in self.leases):
                    self.leases.pop(old, None)
                    del self.retiring[old]
            self.tick(now, boot, policy)
            ready = sum(1 for _, since, _ in self.leases.values() if now - since >= boot)
            self.short_s += tick if now > 300 and ready < self.target else 0.0
            self.paid += sum(self.price(key, now) for key in self.leases) * tick / 3600
            now += tick

    def price(self, key: str, now: float) -> int:
        machine, _, begin = self.leases[key]
        return begin if self.fixed else self.prices[machine](now)

    def tick(self, now: float, boot: float, policy: Policy) -> None:
        held = {key: self.leases[key] for key in self.leases if key not in self.retiring}
        running = [
            Running(Candidate(key, machine, self.price(key, now), self.noise()), now - since >= boot, now - since)
            for key, (machine, since, _) in held.items()
        ]
        taken = {machine for machine, _, _ in self.leases.values()}
        market = [Candidate(f"o{m}", m, price(now), 1.0) for m, price in self.prices.items() if m not in taken]
        decision = decide(running, market, self.target * self.noise(), self.slots - len(self.retiring), policy)
        for key, _ in decision.release:
            del self.leases[key]
        made = []
        for choice in decision.rent:
            self.born += 1
            made.append(f"l{self.born}")
            self.leases[made[-1]] = (choice.machine, now, choice.price)
        self.retiring |= {key: made for key, _ in decision.retire}
        self.moves += [now] * (len(decision.retire) + len(decision.release))
        assert len(self.leases) <= self.slots


def wave(base: float, phase: float, swing: float = 0.4, period: float = 1800.0) -> Callable[[float], int]:
    return lambda now: round(base * (1 + swing * math.sin(2 * math.pi * (now / period + phase))))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("slots", [4, 10])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_price_wave_moves_each_node_at_most_once_in_two_hours(
    fixed: bool, together: bool, slots: int, seed: int
) -> None:
    """±40 % every half hour for a day, all machines together or each at its own time, leases at either price."""
    rng = random.Random(seed)
    nodes, hours = 4, 24
    prices = {f"m{i}": wave(rng.uniform(280_000, 320_000), 0.0 if together else rng.random()) for i in range(30)}
    world = World(prices, float(nodes), slots, fixed)
    world.run(hours * 3600.0)
    assert len(world.moves) <= nodes * hours / 2
    for begin in range(0, hours - 1):
        window = [t for t in world.moves if begin * 3600 <= t < begin * 3600 + 7200]
        assert len(window) <= nodes * 2, "at most one for each node, and one more at the window's border"
    if slots > nodes:
        assert world.short_s == 0.0, "a replacement works before the old one goes"


def test_the_wave_does_move_somebody_without_the_settling_time() -> None:
    """The wave test can fail: it is the settling time that keeps the nodes in place."""
    rng = random.Random(1)
    prices = {f"m{i}": wave(rng.uniform(280_000, 320_000), rng.random()) for i in range(30)}
    world = World(prices, 4.0, 10, fixed=False)
    world.run(6 * 3600.0, policy=Policy(settle_lives=1.0))
    assert len(world.moves) > 4 * 6 / 2


def test_a_price_that_falls_for_good_is_followed() -> None:
    prices: dict[str, Callable[[float], int]] = {f"dear{i}": lambda now: 300_000 for i in range(4)}
    prices |= {f"new{i}": lambda now: 300_000 if now < 3600 else 150_000 for i in range(4)}
    world = World(prices, 4.0, 10, fixed=False)
    world.run(6 * 3600.0)
    assert all(machine.startswith("new") for machine, _, _ in world.leases.values())
    assert len(world.moves) <= 4


@pytest.mark.parametrize(
    ("gamma", "target", "an_hour"),
    [(1.0, 4.0, 0.5), (1.1, 4.4, 0.5), (1.1, 3.3, 0.5), (1.1, 4.2, 2.0), (1.1, 10.5, 2.0)],
)
def test_noise_of_measurements_does_not_churn(gamma: float, target: float, an_hour: float) -> None:
    """±4 % on every throughput and on the target: the pool finds a size and stays there, or nearly so: where a whole
    machine lies between too little and too much, it comes and goes no more often than a start-up costs."""
    rng, hours = random.Random(3), 12
    prices: dict[str, Callable[[float], int]] = {f"m{i}": lambda now: 300_000 for i in range(30)}
    world = World(prices, target, 20, fixed=True, noise=lambda: rng.uniform(0.96, 1.04))
    world.run(hours * 3600.0, policy=Policy(rent_below=1 / gamma))
    assert world.born <= target + 1 + hours * an_hour
    assert len(world.moves) <= hours * an_hour


def test_patience_waits_for_what_lasts() -> None:
    patience = Patience()
    rent, nothing = Decision(rent=[Candidate("o", "m", 1, 1.0)]), Decision()
    assert not patience.allows("j", rent, 0.0, 5.0, urgent=False)
    assert not patience.allows("j", nothing, 3.0, 5.0, urgent=False), "it was gone for a moment"
    assert not patience.allows("j", rent, 4.0, 5.0, urgent=False)
    assert not patience.allows("j", rent, 8.9, 5.0, urgent=False)
    assert patience.allows("j", rent, 9.0, 5.0, urgent=False)
    assert not patience.allows("other", rent, 9.0, 5.0, urgent=False), "each job has its own"
    assert patience.allows("third", rent, 9.0, 5.0, urgent=True)


@pytest.mark.parametrize(
    ("decision", "kind"),
    [
        (Decision(), "none"),
        (Decision(rent=[Candidate("o", "m", 1, 1.0)]), "rent"),
        (Decision(rebid=["l"]), "rent"),
        (Decision(release=[("l", "why")]), "release"),
        (Decision(rent=[Candidate("o", "m", 1, 1.0)], retire=[("l", "why")]), "swap"),
    ],
)
def test_kinds(decision: Decision, kind: str) -> None:
    assert kind_of(decision) == kind
