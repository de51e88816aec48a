"""A provider in memory, with the faults that real ones have at the turn of a switch.

Invariant: what a machine costs is kept here on its own, so that the service's ledger can be held against it; a create
call is counted by label whatever comes of it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from providers.base import (
    Balance,
    BidTooLow,
    Billing,
    Caps,
    Charge,
    Instance,
    InstanceNotFound,
    Listing,
    Notice,
    Offer,
    OfferGone,
    OfferQuery,
    Phase,
    PriceIncrease,
    ProviderError,
    RentResult,
    RentSpec,
    Transient,
)

Outcome = Literal["created", "refuse", "unknown_created", "unknown_nothing", "doomed", "die_before", "die_after"]
DISK_MICROS_GB_MONTH = 7_200_000
"""$7.20 per GB and month of 720 h: exactly 10000 micro-dollars per GB and hour."""


class Died(BaseException):
    """The control process is killed in the middle of its create call."""


@dataclass
class Machine:
    """A machine that somebody offers."""

    machine_id: str
    price_micros_h: int
    gpu_name: str = "RTX 4090"
    reliability: float = 1.0
    max_duration_s: float | None = None
    down_mbps: float = 500.0


@dataclass
class Rented:
    """An instance as it really is."""

    instance_id: str
    label: str
    machine: Machine
    rate_micros_h: int
    disk_gb: float
    env: dict[str, str]
    billing: Billing
    created_at: float
    runs_at: float
    phase: Phase | None = None
    """Overrides what time alone would make of it."""
    raw_status: str = ""
    stopped_at: float | None = None
    """When its GPU stopped being billed, if it was interrupted."""
    gone_at: float | None = None
    ends_at: float | None = None
    """When its host ends the contract."""

    def current(self, now: float) -> Phase:
        """Phase at a moment."""
        if self.phase is not None:
            return self.phase
        return Phase.RUNNING if now >= self.runs_at else Phase.LOADING

    def gpu_seconds(self, now: float) -> float:
        """Billed GPU time until now."""
        end = min(x for x in (self.gone_at, self.stopped_at, now) if x is not None)
        return max(0.0, end - self.runs_at)

    def disk_seconds(self, now: float) -> float:
        """Billed disk time until now."""
        return (self.gone_at if self.gone_at is not None else now) - self.created_at


@dataclass
class FakeProvider:
    """Implements `providers.base.Provider`."""

    clock: Callable[[], float]
    machines: list[Machine]
    name: str = "marketplace"
    spot: bool = False
    pools: bool = False
    """Each of `machines` is a pool, of which there is always one more; its interruptible ones take no bid."""
    download_micros_gb: int = 1_000
    boot_s: float = 0.0
    listing_lag_s: float = 0.0
    outcomes: deque[Outcome] = field(default_factory=deque)
    """What the next create calls do; `created` when empty."""
    refusal: ProviderError = field(default_factory=lambda: OfferGone("somebody else has it"))
    """What `refuse` says."""
    billed_factor: float = 1.0
    on_demand_factor: float = 2.0
    """In spot mode: what machines cost on demand, over the floor of a bid."""
    tells_floors: bool = False
    """Instances show the floor of their bid, which is then their machine's price."""
    wishes: dict[str, PriceIncrease] = field(default_factory=dict)
    """Instance → the price increase that waits for an answer."""
    accepted: list[str] = field(default_factory=list)
    credit: int | ProviderError = 1_000_000_000
    """Micro-dollars in the account, or what the balance call raises."""
    bill_factor: float | None = None
    """Its bill as a multiple of what things really cost; None for a provider without a bill."""
    bill_lag_s: float = 0.0
    bill_error: ProviderError | None = None
    bills_read: int = 0
    list_error: ProviderError | None = None
    incomplete: bool = False
    release_failures: int = 0
    search_error: ProviderError | None = None
    ghosts: bool = False
    """A release is accepted, and does nothing."""
    rented: dict[str, Rented] = field(default_factory=dict)
    creates: Counter[str] = field(default_factory=Counter)
    release_calls: Counter[str] = field(default_factory=Counter)
    bids: list[tuple[str, int]] = field(default_factory=list)
    listings: int = 0
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def caps(self) -> Caps:
        """Bids only in spot mode."""
        return Caps(
            spot=self.spot, change_bid=self.spot, bandwidth_billed=True, pools=self.pools,
            spot_billing=Billing.SPOT_MARKET if self.pools else Billing.SPOT_BID,
        )  # fmt: skip

    # What tests do to it

    def live(self) -> list[Rented]:
        """Instances that cost money now."""
        return [r for r in self.rented.values() if r.gone_at is None]

    def live_machines(self) -> list[str]:
        """Their machine ids, sorted."""
        return sorted(r.machine.machine_id for r in self.live())

    def add_foreign(self, label: str) -> Rented:
        """Somebody else's instance in the same account."""
        made = self._make(Machine("foreign", 1), label, 1, 10.0, {}, Billing.ON_DEMAND)
        made.phase = Phase.RUNNING
        return made

    def pause(self, instance_id: str) -> None:
        """Outbid."""
        machine = self.rented[instance_id]
        machine.phase, machine.raw_status, machine.stopped_at = Phase.PAUSED, "stopped", self.clock()

    def fail(self, instance_id: str) -> None:
        """The container will never run."""
        machine = self.rented[instance_id]
        machine.phase, machine.raw_status, machine.stopped_at = Phase.FAILED, "exited", self.clock()

    def vanish(self, instance_id: str) -> None:
        """Gone without a word."""
        self.rented[instance_id].gone_at = self.clock()

    def resurrect(self, instance_id: str) -> None:
        """It was never really gone."""
        self.rented[instance_id].gone_at = None

    def cost(self, label_part: str = "echo2:") -> dict[str, float]:
        """What our instances have really cost, micro-dollars."""
        now = self.clock()
        ours = [r for r in self.rented.values() if label_part in r.label]
        return {
            "gpu": sum(r.rate_micros_h * r.gpu_seconds(now) / 3600 for r in ours),
            "disk": sum(DISK_MICROS_GB_MONTH * r.disk_gb / 720 * r.disk_seconds(now) / 3600 for r in ours),
        }

    # What the service calls

    async def search(self, query: OfferQuery) -> list[Offer]:
        """Machines that nobody has."""
        if self.search_error is not None:
            raise self.search_error
        taken = set() if self.pools else {r.machine.machine_id for r in self.live()}
        now = datetime.fromtimestamp(self.clock(), UTC)
        factor = self.on_demand_factor if self.spot and query.billing is Billing.ON_DEMAND else 1.0
        return [
            Offer(
                provider=self.name,
                offer_id=f"offer-{m.machine_id}",
                machine_id=m.machine_id,
                gpu_name=m.gpu_name,
                num_gpus=1,
                gpu_ram_mb=24_000,
                billing=query.billing,
                compute_micros_h=round(m.price_micros_h * factor),
                disk_micros_gb_month=DISK_MICROS_GB_MONTH,
                upload_micros_gb=2_000,
                download_micros_gb=self.download_micros_gb,
                up_mbps=500.0,
                down_mbps=m.down_mbps,
                reliability=m.reliability,
                region="XX",
                max_duration_s=m.max_duration_s,
                dlperf=0.0,
                ports=10,
                fetched_at=now,
            )
            for m in self.machines
            if m.machine_id not in taken
        ]

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """One create call; its outcome is what the switches say."""
        self.creates[spec.label] += 1
        if (spec.bid_micros_h is None) == (offer.billing is Billing.SPOT_BID):
            raise AssertionError("a bid goes with spot offers and with no others")
        outcome = self.outcomes.popleft() if self.outcomes else "created"
        machine = next(m for m in self.machines if m.machine_id == offer.machine_id)
        if outcome == "refuse":
            return RentResult("refused", error=self.refusal)
        if outcome == "unknown_nothing":
            return RentResult("unknown", error=Transient("the connection broke"))
        if outcome == "die_before":
            raise Died
        rate = round((spec.bid_micros_h or machine.price_micros_h) * self.billed_factor)
        made = self._make(machine, spec.label, rate, spec.disk_gb, dict(spec.env), offer.billing)
        if outcome == "unknown_created":
            return RentResult("unknown", error=Transient("the connection broke"))
        if outcome == "die_after":
            raise Died
        if outcome == "doomed":
            made.phase = Phase.PAUSED
            made.stopped_at = made.created_at
            return RentResult("refused", doomed_id=made.instance_id, error=BidTooLow("the bid does not win"))
        return RentResult("created", instance_id=made.instance_id)

    def _make(
        self, machine: Machine, label: str, rate: int, disk_gb: float, env: dict[str, str], billing: Billing
    ) -> Rented:
        instance_id, now = str(next(self._ids)), self.clock()
        made = Rented(instance_id, label, machine, rate, disk_gb, env, billing, now, now + self.boot_s)
        self.rented[instance_id] = made
        return made

    async def get(self, instance_id: str) -> Instance | None:
        """One instance, without lag."""
        found = self.rented.get(instance_id)
        return None if found is None or found.gone_at is not None else self._show(found)

    async def list(self) -> Listing:
        """All instances, foreign ones included; nothing of them when the listing is not complete."""
        self.listings += 1
        if self.list_error is not None:
            raise self.list_error
        if self.incomplete:
            return Listing(False, [])
        now = self.clock()
        shown = [self._show(r) for r in self.live() if now - r.created_at >= self.listing_lag_s]
        return Listing(True, shown)

    def _show(self, r: Rented) -> Instance:
        now = self.clock()
        started = datetime.fromtimestamp(r.runs_at, UTC) if now >= r.runs_at and r.stopped_at != r.created_at else None
        return Instance(
            provider=self.name,
            instance_id=r.instance_id,
            label=r.label,
            phase=r.current(now),
            raw_status=r.raw_status or r.current(now).value,
            detail="",
            billing=r.billing,
            compute_micros_h=r.rate_micros_h,
            machine_id=r.machine.machine_id,
            gpu_name=r.machine.gpu_name,
            started_at=started,
            floor_micros_h=r.machine.price_micros_h if self.tells_floors and r.billing is Billing.SPOT_BID else None,
            ends_at=None if r.ends_at is None else datetime.fromtimestamp(r.ends_at, UTC),
        )

    async def release(self, instance_id: str) -> None:
        """Destroy; gone is fine."""
        self.release_calls[instance_id] += 1
        if self.release_failures > 0:
            self.release_failures -= 1
            raise Transient("try again in 60 s")
        found = self.rented.get(instance_id)
        if found is not None and found.gone_at is None and not self.ghosts:
            found.gone_at = self.clock()

    async def set_bid(self, instance_id: str, bid_micros_h: int) -> None:
        """Change a bid."""
        if instance_id not in self.rented:
            raise InstanceNotFound(f"no instance {instance_id}")
        self.bids.append((instance_id, bid_micros_h))
        self.rented[instance_id].rate_micros_h = bid_micros_h

    def wish(self, instance_id: str, price_usd: float) -> None:
        """The host of a machine wants more."""
        number, rate = f"9{len(self.wishes)}", round(price_usd * 1_000_000)
        self.wishes[instance_id] = PriceIncrease(self.name, instance_id, number, rate)

    async def price_increases(self) -> Sequence[PriceIncrease]:
        """Those that wait for an answer."""
        return list(self.wishes.values())

    async def accept_increase(self, increase_id: str) -> None:
        """It holds at once."""
        (found,) = [w for w in self.wishes.values() if w.increase_id == increase_id]
        del self.wishes[found.instance_id]
        self.accepted.append(found.instance_id)
        self.rented[found.instance_id].rate_micros_h = found.compute_micros_h

    async def logs(self, instance_id: str, tail: int) -> str:
        """None."""
        return ""

    async def balance(self) -> Balance:
        """What the switch says."""
        if isinstance(self.credit, ProviderError):
            raise self.credit
        return Balance(self.credit)

    async def charges(self, since: datetime) -> Sequence[Charge]:
        """A GPU and a disk line for each instance, as far as the bill reaches."""
        self.bills_read += 1
        if self.bill_error is not None:
            raise self.bill_error
        if self.bill_factor is None:
            return []
        reach, out = self.clock() - self.bill_lag_s, []
        for r in self.rented.values():
            end = min(reach, r.gone_at if r.gone_at is not None else reach)
            begin, until = datetime.fromtimestamp(r.created_at, UTC), datetime.fromtimestamp(end, UTC)
            gpu = r.rate_micros_h * min(r.gpu_seconds(self.clock()), max(0.0, end - r.runs_at)) / 3600
            disk = DISK_MICROS_GB_MONTH * r.disk_gb / 720 * max(0.0, end - r.created_at) / 3600
            if until >= since:
                out.append(
                    Charge(self.name, r.instance_id, r.label, "gpu", round(gpu * self.bill_factor), begin, until)
                )
                # Some bills know ids only.
                out.append(Charge(self.name, r.instance_id, "", "disk", round(disk * self.bill_factor), begin, until))
        return out

    async def _no_notices(self) -> AsyncIterator[Notice]:
        none: list[Notice] = []
        for notice in none:
            yield notice

    def notices(self) -> AsyncIterator[Notice]:
        """None."""
        return self._no_notices()

    async def aclose(self) -> None:
        """Nothing is open."""


def machines_of(**prices_usd: float) -> list[Machine]:
    """Machines by id with their prices per hour."""
    return [Machine(name, round(price * 1_000_000)) for name, price in prices_usd.items()]
