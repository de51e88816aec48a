"""Between what is wanted and what may be paid: budget, caps, credit, and what is given back when they are passed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import money
from app.fleet.accounts import Accounts
from app.fleet.budget import Exposure
from app.fleet.core import Core
from app.fleet.lifecycle import Lifecycle
from app.fleet.nodes import Nodes
from app.fleet.priced import Priced
from app.fleet.purse import Room
from app.fleet.ranking import price_offer
from app.fleet.roster import ENDING_DRAIN_S
from app.fleet.sight import Seen
from app.fleet.spending import Spending
from app.protocol.job import JobSpec, JobStatus
from app.protocol.node import NodeState
from app.storage.models import Job, Lease, LeaseState, Node
from tests.unit.fleet.test_market import OFFER, view

SESSION = cast(AsyncSession, None)
FREE = Room({})
NOW = 1000.0
USD = 1_000_000


class Office:
    """Of a service, as far as spending looks at it; a lease that is retired is on its way out."""

    settings = SimpleNamespace(
        min_lease_seconds=120.0, wind_down_seconds=120.0, tick_seconds=10.0, reconcile_seconds=60
    )
    providers = dict.fromkeys(("vastai", "other"), SimpleNamespace(caps=SimpleNamespace(pools=False)))

    def __init__(self) -> None:
        self.told: list[str] = []
        self.held: list[str] = []
        self.retired: list[str] = []
        self.released: list[str] = []
        self.ended: list[tuple[JobStatus, str]] = []
        self.leases = self

    def clock(self) -> float:
        return NOW

    def wind_down_s(self, leases: object) -> float:
        return 120.0

    def emit(self, session: object, job_id: str, kind: str, message: str, **data: object) -> None:
        self.told.append(f"{kind}: {message}")

    def hold(self, session: object, job_id: str, why: str) -> None:
        self.held.append(why)

    async def retire(self, session: object, lease: Lease, reason: str) -> None:
        self.retired.append(lease.id)

    def request_release(self, session: object, lease: Lease, reason: str) -> None:
        self.released.append(lease.id)

    def end(self, session: object, job: Job, outcome: JobStatus, reason: str) -> None:
        self.ended.append((outcome, reason))


def desk() -> tuple[Spending, Office]:
    office = Office()
    made = Spending(
        cast(Core, office), cast(Accounts, office), cast(Nodes, office), cast(Lifecycle, office)
    )  # fmt: skip
    return made, office


def lease(key: str, price: int, *, mu: float = 1.0, provider: str = "vastai", **values: Any) -> Lease:
    """One that runs and has cost nothing yet."""
    nothing = dict.fromkeys((
        "gpu_carry", "disk_carry", "download_carry", "upload_carry", "download_bytes", "download_billed",
        "upload_bytes", "upload_billed", "spent_gpu", "spent_disk", "spent_download", "spent_upload", "disk_gb",
        "disk_micros_gb_month", "download_micros_gb", "upload_micros_gb", "agreed_micros_h", "image_micros",
        "model_micros",
    ), 0)  # fmt: skip
    given = {
        "state": LeaseState.ACTIVE, "created_at": 0.0, "exists_since": 0.0, "gpu_since": 0.0, "gpu_running": False,
        "release_wanted": False, "rate_micros_h": price, "effective_micros_h": price, **nothing, **values,
    }  # fmt: skip
    return Lease(id=key, job_id="j", provider=provider, mu_prior=mu, **given)


def seen(*leases: Lease, budget: int = 100 * USD, step: int = 0, nodes: dict[str, Node] | None = None) -> Seen:
    job = Job(id="j", budget_micros=budget, status=JobStatus.RUNNING, status_since=0.0, step=step)
    return Seen(job, cast(JobSpec, None), leases, nodes or {})


def priced(key: str, compute: int, provider: str = "vastai") -> Priced:
    """An offer without disk and traffic; its bid adds 15 %, its start a little more."""
    offer = replace(
        OFFER, provider=provider, offer_id=key, machine_id=key, compute_micros_h=compute, disk_micros_gb_month=0,
        upload_micros_gb=0, download_micros_gb=0,
    )  # fmt: skip
    return price_offer(offer, view())


def need(p: Priced, *before: Priced) -> int:
    """The least budget with which a machine can be rented beside others that were just rented."""
    return -(-(p.price.total + sum(b.price.total for b in before)) * 240 // 3600)


def keys(choices: list[Any]) -> list[str]:
    return [c.offer.offer_id for c in choices]


ONE, TWO, DEAR = priced("one", 1 * USD), priced("two", 2 * USD), priced("dear", 50 * USD)


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [(need(ONE) - 1, []), (need(ONE), ["one"]), (need(TWO, ONE) - 1, ["one"]), (need(TWO, ONE), ["one", "two"])],
)
def test_machines_are_rented_one_after_the_other_as_long_as_the_budget_pays_for_all(
    budget: int, chosen: list[str]
) -> None:
    spending, office = desk()
    choices, room = spending.affordable(SESSION, seen(budget=budget), [ONE, TWO], [], FREE, {})
    assert keys(choices) == chosen
    assert room.burn == sum(p.price.total for p in (ONE, TWO) if p.offer.offer_id in chosen)
    assert [c.start_micros_h for c in choices] == [p.price.once for p in (ONE, TWO)][: len(choices)]
    assert len(office.told) == (len(chosen) < 2)


def test_what_a_start_downloads_is_kept_back_before_it_is_rented() -> None:
    """Image and model of 24 GB at $0.02 cost more than the first hour of many a machine."""
    dear = price_offer(
        replace(ONE.offer, download_micros_gb=20_000), replace(view(), model_bytes=14e9, image_bytes={"vastai": 10e9})
    )
    assert (dear.price.image_download, dear.price.start_download) == (200_000, 480_000)
    both = need(dear) + 480_000
    for budget, chosen in ((both - 1, []), (both, ["one"]), (both + need(ONE, dear) - 1, ["one"])):
        spending, office = desk()
        choices, _ = spending.affordable(SESSION, seen(budget=budget), [dear, dear], [], FREE, {})
        assert keys(choices) == chosen
        if choices:
            assert (choices[0].image_micros, choices[0].model_micros) == (200_000, 280_000)
        else:
            assert "$0.480000 for what its start downloads" in office.told[0]
    cap = Room({}, exposure=Exposure(both - 1, 0, 0), minimum_s=120.0)
    assert spending.affordable(SESSION, seen(), [dear], [], cap, {})[0] == []


@pytest.mark.parametrize(
    ("values", "unseen"),
    [
        ({"state": LeaseState.INTENT, "exists_since": None}, 480_000),
        ({}, 480_000),
        ({"spent_download": 100_000}, 380_000),  # its node counts what comes of the model
        ({"spent_download": 900_000}, 200_000),  # but not the image
        ({"state": LeaseState.RELEASED, "ended_at": 100.0}, 200_000),
        ({"state": LeaseState.RELEASED, "ended_at": 100.0 - money.BILL_LATE_S}, 0),
        ({"state": LeaseState.REFUSED, "ended_at": None}, 0),
        ({"image_micros": 0, "model_micros": 0}, 0),
    ],
)
def test_what_a_start_downloads_is_committed_until_its_bill_can_be_known(values: dict[str, Any], unseen: int) -> None:
    one = lease("l1", 0, **{"image_micros": 200_000, "model_micros": 280_000, **values})
    assert money.start_unseen(one, 100.0) == unseen
    assert money.exposure_of([one], 100.0, budget=USD, wind_down_s=0.0).unseen == unseen


def test_what_does_not_fit_a_cap_is_left_out_and_the_next_that_does_is_taken() -> None:
    spending, _ = desk()
    cap = ONE.price.total + TWO.price.total
    choices, _ = spending.affordable(SESSION, seen(), [ONE, DEAR, TWO, ONE], [], Room({}, per_hour=cap), {})
    assert keys(choices) == ["one", "two"]


def test_that_the_budget_holds_is_told_once_and_anew_after_something_was_rented() -> None:
    spending, office = desk()
    poor, rich = seen(budget=need(ONE) - 1), seen()
    for found, count in ((poor, 1), (poor, 1), (rich, 1), (poor, 2)):
        spending.affordable(SESSION, found, [ONE], [], FREE, {})
        assert len(office.told) == count
    assert office.told[0].startswith("budget_holds: renting stops: $0.0")
    assert "too little for RTX 4090 at $1.1" in office.told[0]


def test_a_job_without_machines_takes_the_best_that_it_can_pay() -> None:
    spending, office = desk()
    budget, others = need(TWO), [DEAR, TWO, ONE]
    assert keys(spending.affordable(SESSION, seen(budget=budget), [DEAR], others, FREE, {})[0]) == ["two"]
    assert office.told == []
    cap = Room({}, per_hour=ONE.price.total)
    choices, room = spending.affordable(SESSION, seen(budget=budget), [DEAR], others, cap, {})
    assert keys(choices) == ["one"]
    assert room.burn == ONE.price.total
    works = seen(lease("a", 1), budget=budget)
    assert spending.affordable(SESSION, works, [DEAR], others, FREE, {})[0] == [], "it waits for what it needs"
    assert len(office.told) == 1


def test_bids_that_were_sent_and_not_billed_take_their_part_of_the_budget() -> None:
    spending, _ = desk()
    found = seen(lease("a", USD), budget=10 * USD)
    assert spending.spare(found, {}) - spending.spare(found, {"a": 3 * USD}) == pytest.approx(2 * USD, rel=1e-4)


@pytest.mark.parametrize(("step", "outcome"), [(0, JobStatus.FAILED), (1, JobStatus.BUDGET_EXHAUSTED)])
def test_a_job_that_can_pay_for_nothing_is_over(step: int, outcome: JobStatus) -> None:
    spending, office = desk()
    spending.cannot_pay(SESSION, seen(budget=need(ONE), step=step), [DEAR, ONE])
    assert office.ended == [], "the cheapest can be paid: it waits for something else"
    going = lease("a", 1, state=LeaseState.RELEASING)
    spending.cannot_pay(SESSION, seen(going, budget=need(ONE) - 1, step=step), [DEAR, ONE])
    assert office.ended == [], "what is kept back for that machine may come back"
    spending.cannot_pay(SESSION, seen(budget=need(ONE) - 1, step=step), [DEAR, ONE])
    ((found, why),) = office.ended
    assert found is outcome
    assert "RTX 4090 needs $0.07" in why


async def test_a_cap_in_total_that_is_used_up_takes_everything_back() -> None:
    spending, office = desk()
    late, young = (
        Node(drain=True, state=NodeState.DRAINING, state_since=NOW - ENDING_DRAIN_S - more) for more in (0.5, -0.5)
    )
    works = Node(drain=False, state=NodeState.ACTIVE, state_since=0.0)
    found = seen(lease("a", 1), lease("b", 1), lease("c", 1), nodes={"a": works, "b": late, "c": young})
    # A dollar an hour is 8334 micro-dollars in 30 s.
    held = Exposure(100_000, 91_600, USD, wind_down_s=0.0)
    assert not await spending.give_back(SESSION, found, Room({}, exposure=held))
    assert (office.retired, office.held) == ([], [])
    assert await spending.give_back(SESSION, found, Room({}, exposure=replace(held, spent=91_700)))
    assert office.retired == ["a"]
    assert office.released == ["b"], "longer than the end of a job lasts nobody drains"
    assert office.held == ["max_usd_total 0.100000 is used up: everything is given back"]


@pytest.mark.parametrize(
    ("per_hour", "gone"), [(60, []), (59, ["b"]), (40, ["b"]), (39, ["b", "c"]), (0, ["b", "c", "a"])]
)
async def test_the_dearest_for_what_it_makes_goes_first_until_the_rest_fits(per_hour: int, gone: list[str]) -> None:
    spending, office = desk()
    found = seen(lease("a", 30, mu=6.0), lease("b", 20, mu=1.0), lease("c", 10, mu=1.0))
    room = Room({"vastai": 60}, staying_micros_h=60, per_hour=per_hour)
    assert not await spending.give_back(SESSION, found, room)
    assert office.retired == gone


@pytest.mark.parametrize(("credit", "gone"), [(210, ["a"]), (211, [])])
async def test_a_fleet_goes_before_its_credit_can_be_gone_at_the_next_look(credit: int, gone: list[str]) -> None:
    """30 s until somebody acts, 120 s to wind down, 60 s until the credit is looked at again."""
    spending, office = desk()
    found = seen(lease("a", 3600), lease("b", 3600, provider="other"))
    await spending.give_back(SESSION, found, Room({"vastai": 3600, "other": 3600}, credit={"vastai": credit}))
    assert office.retired == gone


CLOSED = Room({}, closed={"vastai": "no credit"})


@pytest.mark.parametrize(
    ("wanted", "chosen", "room", "short", "why"),
    [
        ([ONE, TWO], [], CLOSED, True, "vastai: no credit"),
        ([ONE, TWO], [], CLOSED, False, ""),
        ([ONE, priced("x", USD, "other")], [], CLOSED, True, ""),
        ([priced("x", USD, "other"), ONE], [priced("x", USD, "other")], CLOSED, True, "vastai: no credit"),
        ([priced("x", USD, "other"), ONE], [], CLOSED, True, ""),
        (
            [ONE, priced("x", USD, "other")],
            [],
            replace(CLOSED, closed={**CLOSED.closed, "other": "key"}),
            True,
            "vastai: no credit",
        ),
        ([ONE], [], FREE, True, ""),
        ([], [], CLOSED, True, ""),
    ],
)
def test_that_a_job_is_held_up_is_said_if_nothing_that_it_wants_can_be_had(
    wanted: list[Priced], chosen: list[Priced], room: Room, short: bool, why: str
) -> None:
    spending, office = desk()
    choices, _ = spending.affordable(SESSION, seen(), chosen, [], FREE, {})
    spending.hold(SESSION, seen(), wanted, choices, room, short)
    assert office.held == [why]
