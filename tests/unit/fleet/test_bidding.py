"""What is paid for machines that we hold: within all that limits it, each bid sent once; what a floor usually is."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, cast

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import activation
from app.fleet.bidding import Bidding
from app.fleet.core import Core
from app.fleet.leases import Leases
from app.fleet.market import USUAL_S, Market
from app.fleet.nodes import Nodes
from app.fleet.purse import Room
from app.storage.models import Lease
from providers.base import Billing, PriceIncrease, Transient

FREE = Room({})
MUCH = 10**9
SESSION = cast(AsyncSession, None)


class Deaf:
    """A provider that takes nothing."""

    async def set_bid(self, instance_id: str, bid_micros_h: int) -> None:
        raise Transient("503")

    async def accept_increase(self, increase_id: str) -> None:
        raise Transient("503")

    async def price_increases(self) -> list[PriceIncrease]:
        return []


class Office:
    """Of a service, as far as bidding looks at it: its clock, its calls, and what is told and given back."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self.calls: list[Coroutine[Any, Any, None]] = []
        self.told: list[str] = []
        self.retired: list[str] = []
        self.cooled: list[str] = []
        self.providers = {"p": Deaf()}

    def clock(self) -> float:
        return self.now

    def emit(self, session: object, job_id: str, kind: str, message: str, **data: object) -> None:
        self.told.append(f"{kind}: {message}")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.count += 1
        self.calls.append(work)

    async def retire(self, session: object, lease: Lease, reason: str) -> None:
        self.retired.append(reason)

    async def cool_down(self, session: object, lease: Lease, reason: str) -> None:
        self.cooled.append(reason)


class Priced(Market):
    """Knows one on-demand price."""

    ceiling: int | None = None

    def on_demand(self, lease: Lease) -> int | None:
        """The same for all."""
        return self.ceiling


class Desk:
    """Bidding on its own. What it sends is not sent, unless a test does it."""

    def __init__(self, ceiling: int | None = None) -> None:
        self.rest = Office()
        core = cast(Core, self.rest)
        self.market = Priced(core)
        self.market.ceiling = ceiling
        self.bidding = Bidding(core, cast(Leases, self.rest), self.market, cast(Nodes, self.rest))

    @property
    def calls(self) -> int:
        """How many were sent to a provider."""
        for call in self.rest.calls:
            call.close()
        return self.rest.count


def lease(billing: Billing = Billing.SPOT_BID, **values: Any) -> Lease:
    """At $0.20/h of rent and $0.08/h for the rest, and its floor has risen to $0.25/h."""
    given = {
        "rate_micros_h": 200_000, "effective_micros_h": 300_000, "start_micros_h": 20_000, "market_micros_h": 250_000,
        "instance_id": "1", **values,
    }  # fmt: skip
    return Lease(
        id="l", job_id="j", provider="p", machine_id="m", num_gpus=1, gpu_name="RTX 4090", billing=billing, **given
    )


@pytest.mark.parametrize(
    ("user", "ceiling", "worth", "spare", "sent"),
    [
        (None, None, None, MUCH, 287_500),
        (260_000, None, None, MUCH, 260_000),
        (249_999, None, None, MUCH, None),
        (None, 270_000, None, MUCH, 270_000),
        (None, 249_999, None, MUCH, None),
        (None, None, 350_000, MUCH, 270_000),
        (None, None, 329_999, MUCH, None),
        (None, None, None, 87_500, 287_500),
        (None, None, None, 87_499, None),
    ],
)
def test_a_bid_is_raised_within_all_that_limits_it(
    user: int | None, ceiling: int | None, worth: int | None, spare: int, sent: int | None
) -> None:
    desk = Desk(ceiling)
    left = desk.bidding.keep(lease(), user, worth, FREE, spare)
    assert desk.bidding.sent.get("l") == sent
    assert left.burns == ({} if sent is None else {"p": sent - 200_000}), "what is promised takes its room"
    assert desk.calls == (sent is not None)


def test_a_bid_that_is_under_way_is_not_sent_again_until_the_floor_moves() -> None:
    desk, held = Desk(), lease()
    assert desk.bidding.keep(held, None, None, FREE, MUCH).burns == {"p": 87_500}
    assert desk.bidding.keep(held, None, None, FREE, MUCH) is FREE
    assert desk.calls == 1
    held.market_micros_h = 260_000
    desk.bidding.keep(held, None, None, FREE, MUCH)
    assert (desk.calls, desk.bidding.sent) == (2, {"l": 299_000})


@pytest.mark.parametrize(
    ("held", "room"),
    [
        (lease(), Room({"p": 1_000_000}, per_hour=1_087_499)),
        (lease(), Room({}, closed={"p": "no credit"})),
        (lease(instance_id=None), FREE),
        (lease(market_micros_h=100_000), FREE),
    ],
)
def test_a_bid_stays_where_caps_or_the_machine_do_not_let_it_rise(held: Lease, room: Room) -> None:
    desk = Desk()
    assert desk.bidding.keep(held, None, None, room, MUCH) is room
    assert desk.calls == 0


def test_what_a_machine_is_worth_lowers_no_bid() -> None:
    desk = Desk()
    assert desk.bidding.keep(lease(market_micros_h=195_000), None, 278_000, FREE, MUCH) is FREE
    assert desk.calls == 0


def test_a_price_increase_is_accepted_as_it_is() -> None:
    desk, held = Desk(ceiling=1), lease(Billing.ON_DEMAND, announced_micros_h=290_000, announced_id="7")
    assert desk.bidding.keep(held, None, None, FREE, MUCH).burns == {"p": 90_000}
    assert desk.bidding.sent == {"l": 290_000}
    desk.bidding.ease(held, None)
    assert desk.calls == 1


@pytest.mark.parametrize(
    ("floor", "user", "ceiling", "sent"),
    [
        (150_000, None, None, 172_500),
        (154_000, None, None, None),
        (150_000, 160_000, None, 160_000),
        (150_000, None, 155_000, 155_000),
        (150_000, None, 149_999, None),
    ],
)
def test_a_bid_is_lowered_to_what_would_be_bid_now(
    floor: int, user: int | None, ceiling: int | None, sent: int | None
) -> None:
    desk, held = Desk(ceiling), lease(market_micros_h=floor)
    for _ in range(2):
        desk.bidding.ease(held, user)
    assert desk.bidding.sent.get("l") == sent
    assert desk.calls == (sent is not None), "once"


def test_what_a_floor_usually_is_takes_an_hour_to_know() -> None:
    desk, held = Desk(ceiling=500_000), lease(market_micros_h=200_000)
    first = desk.bidding.outlook(held)
    assert (first.usual_floor, first.known, first.on_demand) == (None, False, 500_000), "one look is no average"
    desk.rest.now = USUAL_S - 1
    held.market_micros_h = 300_000
    second = desk.bidding.outlook(held)
    assert second.usual_floor == pytest.approx(200_000 + (1 - 1 / 2.71828) * 100_000, rel=1e-3)
    assert not second.known
    desk.rest.now = USUAL_S
    assert desk.bidding.outlook(held).known


def test_nothing_swings_where_nobody_bids() -> None:
    desk = Desk(ceiling=500_000)
    for billing in (Billing.ON_DEMAND, Billing.SPOT_MARKET):
        found = desk.bidding.outlook(lease(billing))
        assert (found.usual_floor, found.known, found.on_demand) == (None, True, None)


@pytest.mark.parametrize("held", [lease(), lease(Billing.ON_DEMAND, announced_micros_h=290_000, announced_id="7")])
async def test_what_a_provider_did_not_take_is_sent_again(held: Lease) -> None:
    desk = Desk()
    for count in (1, 2):
        desk.bidding.keep(held, None, None, FREE, MUCH)
        await desk.rest.calls.pop()
        assert desk.rest.count == count
    assert desk.bidding.sent == {}
    assert desk.rest.told == [], "what did not happen is not told"


def running(*, outbid: bool = False, ending: str = "") -> list[activation.Running]:
    other = activation.Running(activation.Candidate("other", "p:o", 1, 1.0), True, 0.0, outbid=True, ending="soon")
    mine = activation.Running(activation.Candidate("l", "p:m", 1, 1.0), True, 0.0, outbid=outbid, ending=ending)
    return [other, mine]


def test_an_end_is_told_once_and_anew_when_it_was_off_meanwhile() -> None:
    desk = Desk()
    for ending, count in (("soon", 1), ("sooner", 1), ("", 1), ("soon", 2)):
        desk.bidding.warn(SESSION, [lease()], running(ending=ending)[1:])
        assert len(desk.rest.told) == count
    assert desk.rest.told[0] == "lease_endangered: RTX 4090 on machine m has to be replaced: soon"


@pytest.mark.parametrize(
    ("held", "user", "gone", "cooled"),
    [
        (lease(), None, False, False),
        (lease(), 200_000, False, False),
        (lease(), 199_999, True, True),
        (lease(host_ends_at=1059.9), None, True, False),
        (lease(host_ends_at=1060.0), None, False, False),
        (lease(host_ends_at=1060.0), 199_999, True, True),
    ],
)
async def test_a_machine_goes_right_before_its_end_and_when_it_is_dearer_than_it_may_be(
    held: Lease, user: int | None, gone: bool, cooled: bool
) -> None:
    desk = Desk()
    desk.rest.now = 1000.0
    await desk.bidding.end(SESSION, [held], user)
    assert (len(desk.rest.retired), len(desk.rest.cooled)) == (gone, cooled)


@pytest.mark.parametrize(
    ("held", "outbid", "ending", "cooled"),
    [
        (lease(), True, "", True),
        (lease(), False, "outbid", True),
        (lease(), False, "", False),  # it was too much, or another is cheaper: nothing is wrong with it
        (lease(market_micros_h=200_000), True, "", False),  # it could be had at its bid
        (lease(Billing.ON_DEMAND), True, "", False),
    ],
)
async def test_only_a_machine_that_others_outbid_us_for_is_left_alone(
    held: Lease, outbid: bool, ending: str, cooled: bool
) -> None:
    desk = Desk()
    await desk.bidding.let_go(SESSION, held, running(outbid=outbid, ending=ending))
    assert desk.rest.cooled == (["outbid: its floor is $0.250000/h"] if cooled else [])
