"""Calls about the price of a machine that a provider did not take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from providers.base import Transient
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import FakeClock, machines, world
from tests.integration.control.test_prices import bidding, lease_of


@dataclass
class Deaf(FakeProvider):
    """Does not take the first call that is about money."""

    calls: int = 0

    def _hear(self) -> None:
        self.calls += 1
        if self.calls == 1:
            raise Transient("try again in 60 s")

    async def set_bid(self, instance_id: str, bid_micros_h: int) -> None:
        """The second time."""
        self._hear()
        await super().set_bid(instance_id, bid_micros_h)

    async def accept_increase(self, increase_id: str) -> None:
        """The second time."""
        self._hear()
        await super().accept_increase(increase_id)


async def test_a_bid_that_was_not_taken_is_sent_again_and_counts_once_it_is(
    tmp_path: Path, database_url: str, clock: FakeClock
) -> None:
    deaf = Deaf(clock, machines(0.2, 0.9))
    async with world(tmp_path / "state", database_url, deaf) as control:
        await bidding(control, deaf)
        deaf.machines[0].price_micros_h = 225_000
        await control.round(10)
        lease = await lease_of(control, "m1")
        assert (deaf.calls, deaf.bids, lease.rate_micros_h, lease.agreed_micros_h) == (1, [], 230_000, 230_000)
        await control.round(10)
        lease = await lease_of(control, "m1")
        assert (deaf.bids, lease.rate_micros_h, lease.agreed_micros_h) == ([("1", 258_750)], 258_750, 258_750)
        await control.round(10)
        assert deaf.calls == 2, "and then no more"


async def test_a_price_increase_whose_acceptance_was_not_taken_is_accepted_again(
    tmp_path: Path, database_url: str, clock: FakeClock
) -> None:
    deaf = Deaf(clock, machines(0.2, 0.9))
    async with world(tmp_path / "state", database_url, deaf) as control:
        job_id = await control.create()
        learner, (node,) = await control.running(job_id)
        deaf.wish("1", 0.25)
        await control.rounds(1, 10, node, learner)
        lease = await lease_of(control, "m1")
        assert (deaf.calls, deaf.accepted, lease.agreed_micros_h) == (1, [], 200_000)
        await control.rounds(1, 10, node, learner)
        lease = await lease_of(control, "m1")
        assert (deaf.accepted, lease.agreed_micros_h, lease.announced_micros_h) == (["1"], 250_000, None)
