"""When a pool changes its mind: what ends, what is outbid, what a switch costs, and what the limits of bids rest on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.fleet.activation import Candidate, Decision, Policy, Running, decide

POLICY = Policy()
OLD = 100_000.0


def offer(key: str, price: int, mu: float = 1.0, *, usual: int | None = None, start_s: float = 0.0) -> Candidate:
    return Candidate(key, f"machine-{key}", price, mu, usual, start_s)


def lease(key: str, price: int, mu: float = 1.0, *, age: float = OLD, usual: int | None = None) -> Running:
    return Running(offer(key, price, mu, usual=usual), True, age)


def outbid(price: int, floor: int, *, usual: int | None = None, known: bool = True) -> Running:
    return Running(offer("a", price, usual=usual), True, OLD, outbid=True, least=floor, known=known)


def ending(key: str, mu: float = 1.0) -> Running:
    return Running(offer(key, 100, mu), True, OLD, ending="its host ends the contract in 300 s")


def test_what_ends_and_is_not_needed_goes_at_once() -> None:
    made = decide([ending("a"), lease("b", 100)], [offer("c", 50)], 1.0, 8, POLICY)
    assert made == Decision(release=[("a", "its host ends the contract in 300 s; the others are enough")])


def test_who_must_go_for_a_lower_cap_is_first_who_ends_anyway() -> None:
    made = decide([lease("dear", 900), ending("a"), lease("cheap", 100)], [], 9.0, 2, POLICY)
    assert [key for key, _ in made.release] == ["a"]
    assert made.release[0][1] == "3 machines, but only 2 are allowed now"


def test_a_negative_cap_gives_everything_back() -> None:
    assert len(decide([lease("a", 1), lease("b", 2)], [], 9.0, -1, POLICY).release) == 2


@pytest.mark.parametrize(("known", "kept"), [(True, False), (False, True)])
def test_while_nobody_can_tell_a_swing_from_a_rise_an_outbid_machine_is_held_longer(known: bool, kept: bool) -> None:
    made = decide([outbid(230_000, 200_000, known=known)], [offer("b", 150_000)], 1.0, 8, POLICY)
    assert (made.rebid == ["a"]) is kept
    far = decide([outbid(230_000, 200_000, known=known)], [offer("b", 50_000)], 1.0, 8, POLICY)
    assert far.rebid == [], "no swing explains that"


def test_what_takes_the_place_of_an_outbid_machine_is_priced_as_it_usually_is() -> None:
    held, dip = outbid(230_000, 200_000), offer("b", 150_000, usual=190_000)
    assert decide([held], [dip], 1.0, 8, POLICY).rebid == ["a"]
    assert decide([held], [replace(dip, usual=150_000)], 1.0, 8, POLICY).rebid == []


def test_a_machine_that_does_less_takes_no_outbid_ones_place() -> None:
    held = outbid(230_000, 200_000)
    assert decide([held], [offer("b", 100_000, 0.94)], 1.0, 8, POLICY).rebid == ["a"]
    assert decide([held], [offer("b", 100_000, 0.95)], 0.95, 8, POLICY).rebid == []


def test_an_outbid_machine_that_ends_is_not_bid_for() -> None:
    held = replace(outbid(230_000, 200_000), ending="its price rose")
    made = decide([held], [offer("b", 300_000)], 1.0, 8, POLICY)
    assert (made.rebid, made.retire) == ([], [("a", "its price rose")])
    assert "a" not in made.limits


def test_what_nobody_else_could_do_is_worth_any_bid() -> None:
    assert decide([], [offer("a", 100)], 1.0, 8, POLICY).limits == {}
    assert decide([], [offer("a", 100), offer("b", 150, 0.9)], 1.0, 8, POLICY).limits == {}
    assert decide([], [offer("a", 100), offer("b", 150, 0.96)], 1.0, 8, POLICY).limits == {"a": 150}
    two = decide([], [offer("a", 100), offer("b", 90, 0.5), offer("c", 80, 0.5)], 1.0, 8, POLICY)
    assert two.limits == {"a": 170}, "or several"


def test_machines_that_are_rented_together_do_not_stand_in_for_each_other() -> None:
    made = decide([], [offer("a", 100), offer("b", 110), offer("c", 200)], 2.0, 8, POLICY)
    assert made.limits == {"a": 200, "b": 200}


@pytest.mark.parametrize(("start_s", "swapped"), [(0.0, True), (1100.0, True), (1300.0, False)])
def test_a_switch_pays_for_both_machines_until_the_slower_start_is_over(start_s: float, swapped: bool) -> None:
    """$50 an hour are saved for an hour; $150 an hour are paid while it starts."""
    made = decide([lease("a", 100_000)], [offer("b", 50_000, start_s=start_s)], 1.0, 8, replace(POLICY, switch_s=600.0))
    assert bool(made.retire) is swapped
    slow = [offer("b", 20_000, 0.5, start_s=start_s), offer("c", 30_000, 0.5, start_s=60.0)]
    both = decide([lease("a", 100_000)], slow, 1.0, 8, replace(POLICY, switch_s=600.0))
    assert bool(both.retire) is swapped


def test_what_a_swap_saves_and_costs_is_told() -> None:
    (told,) = decide([lease("a", 100_000)], [offer("b", 40_000)], 1.0, 8, replace(POLICY, switch_s=360.0)).retire
    assert told == ("a", "swapped for 1 cheaper: saves $0.0600/h, the switch costs $0.0140")


def test_the_dearest_of_those_that_a_swap_pays_for_goes_first() -> None:
    held = [lease("cheap", 50_000), lease("dear", 100_000), lease("dearer", 120_000, 2.0)]
    made = decide(held, [offer("b", 20_000)], 4.0, 8, POLICY)
    assert [key for key, _ in made.retire] == ["dear"], "by unit cost, not by price"


def test_a_machine_dearer_than_it_usually_is_is_not_fled_from_while_its_price_comes_back() -> None:
    assert decide([lease("a", 140_000, usual=100_000)], [offer("b", 90_000)], 1.0, 8, POLICY) == Decision()


@pytest.mark.parametrize(("free", "rent", "release", "retire"), [(0, 2, 2, 0), (1, 2, 1, 1), (2, 2, 0, 2)])
def test_the_endangered_make_only_as_much_room_as_is_missing(free: int, rent: int, release: int, retire: int) -> None:
    held = [Running(offer(key, 300), True, OLD, endangered=True) for key in "ab"]
    made = decide(held, [offer("c", 100), offer("d", 100)], 2.0, 2 + free, POLICY)
    assert (len(made.rent), len(made.release), len(made.retire)) == (rent, release, retire)
    assert all("about to be interrupted" in why for _, why in [*made.release, *made.retire])


def test_a_surplus_is_given_back_one_at_a_time() -> None:
    assert len(decide([lease(str(n), 100) for n in range(6)], [], 1.0, 8, POLICY).release) == 1


def test_the_reserve_is_used_up_before_anybody_is_rented_and_then_filled() -> None:
    reserve, market = replace(POLICY, rent_below=1 / 1.1), [offer(key, 100, 0.25) for key in "bcde"]
    assert decide([lease("a", 100, 0.95)], market, 1.0, 8, reserve) == Decision()
    assert len(decide([lease("a", 100, 0.9)], market, 1.0, 8, reserve).rent) == 1
    assert len(decide([lease("a", 100, 0.5)], market, 1.0, 8, reserve).rent) == 2, "up to the target, and no further"


def test_what_takes_a_machines_place_must_fit_into_the_free_slots() -> None:
    held, halves = outbid(230_000, 200_000), [offer("b", 50_000, 0.5), offer("c", 50_000, 0.5)]
    assert decide([held], halves, 1.0, 1, POLICY).rebid == ["a"]
    young = replace(held, age_s=600.0)
    dearer = [offer("b", 75_000, 0.5), offer("c", 75_000, 0.5)]
    assert {c.key for c in decide([young], dearer, 1.0, 3, POLICY).rent} == {"b", "c"}
    assert decide([held], [offer("b", 50_000)], 1.0, 1, POLICY).rebid == [], "one in the place of one always does"
    assert (
        decide([lease("a", 100_000)], [offer("b", 20_000, 0.5), offer("c", 20_000, 0.5)], 1.0, 1, POLICY) == Decision()
    )
    alone = [offer("a", 100), offer("b", 90, 0.5), offer("c", 80, 0.5)]
    assert decide([], alone, 1.0, 1, POLICY).limits == {}


def test_what_an_outbid_machine_would_cost_and_what_it_is_worth_is_told() -> None:
    made = decide([outbid(230_000, 200_000)], [offer("b", 150_000)], 1.0, 8, POLICY)
    assert made.retire == [("a", "outbid: keeping it costs $0.2000/h, what takes its place is worth $0.1765/h")]


@pytest.mark.parametrize(("life_h", "swapped"), [(1.0, False), (2.0, True)])
def test_a_saving_that_lasts_longer_pays_for_a_dearer_switch(life_h: float, swapped: bool) -> None:
    policy = replace(POLICY, life_h=life_h, switch_s=2000.0)
    assert bool(decide([lease("a", 100_000)], [offer("b", 50_000)], 1.0, 8, policy).retire) is swapped


def test_an_offer_that_does_nothing_is_nobodys_replacement() -> None:
    market = [offer("dud", 1, 0.0), offer("b", 50_000)]
    assert [c.key for c in decide([lease("a", 100_000)], market, 1.0, 8, POLICY).rent] == ["b"]
