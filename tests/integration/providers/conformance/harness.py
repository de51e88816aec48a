"""What the conformance suite needs of a provider: an adapter in front of an emulator, and hands on the emulator.

Invariant: the suite talks to the adapter only through `providers.base.Provider`; everything else that it does (refuse,
lose, hide, take away) goes through `Harness`, so that the same tests run over every provider.

To add a provider, write `harness_NAME.py` in this folder with one module-level value
`REGISTERED = Registered("NAME", open_harness, not_applicable={...})`; it is found by its file name.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from providers.base import Billing, Offer, OfferQuery, Provider, RentSpec

DEADLINE_S = 10.0
UNKNOWN_GPU = "RTX 9999 Ti"
"""A card that no table of ours names: a harness makes its emulator sell one."""
T = TypeVar("T")


class Harness(Protocol):
    """One fresh account at one emulated provider. Faults count from the call on and are used up once each."""

    @property
    def provider(self) -> Provider:
        """The adapter under test, with the right key. The harness closes it."""
        ...

    @property
    def secret(self) -> str:
        """The account's key: must show up nowhere."""
        ...

    def with_wrong_key(self) -> Provider:
        """Another adapter for the same emulator whose key is wrong. The harness closes it."""
        ...

    def query(self) -> OfferQuery:
        """A search that finds at least two offers, in the mode of billing that the suite shall rent with."""
        ...

    def spec(self, offer: Offer, label: str) -> RentSpec:
        """An order for this offer that the emulator takes; `rent_spec` below is mostly enough."""
        ...

    async def calls(self) -> int:
        """How many requests of any kind the adapters have sent so far."""
        ...

    async def creates(self) -> int:
        """How many create requests the adapters have sent so far, whatever came of them."""
        ...

    async def create_tokens(self) -> Sequence[str]:
        """Idempotency tokens of these requests, oldest first; [] where the provider has none."""
        ...

    async def ignore_filters(self) -> None:
        """From now on the emulator answers searches with everything that it has, whatever is asked for."""
        ...

    async def garble_next_search(self) -> None:
        """The next search is answered with a success that can't be read."""
        ...

    async def refuse_next_create(self) -> None:
        """The next create is answered with a clear refusal, and nothing is made."""
        ...

    async def lose_next_create(self, *, created: bool) -> None:
        """The next create's answer is lost (dropped connection, timeout, 5xx); the machine is made or not."""
        ...

    async def hide_new(self) -> None:
        """Instances made from now on are missing in lists, as if the provider's list lagged behind."""
        ...

    async def show_new(self) -> None:
        """The end of `hide_new`."""
        ...

    async def truncate_next_listing(self) -> None:
        """The next listing misses at least one instance in a way that the provider's protocol lets one notice."""
        ...

    async def garble_next_listing(self) -> None:
        """The next listing is answered with a success that can't be read."""
        ...

    async def vanish(self, instance_id: str) -> None:
        """The instance is gone without our doing."""
        ...

    async def preempt(self, instance_id: str) -> None:
        """The provider takes the machine away."""
        ...

    async def announce(self, instance_id: str) -> None:
        """The provider says that it will take the machine away (only where `caps.notice_s` > 0)."""
        ...

    async def fail_releases(self, count: int) -> None:
        """The next `count` releases fail for a passing reason, and nothing is released by them."""
        ...

    async def add_foreign(self, label: str) -> str:
        """Somebody else's instance in the same account; returns its id. Not counted as a create."""
        ...


OpenHarness = Callable[[Path], AbstractAsyncContextManager[Harness]]


@dataclass(frozen=True, slots=True)
class Registered:
    """A provider that takes part. `not_applicable`: test function name to the reason, which pytest prints."""

    name: str
    open: OpenHarness
    """Called with a private folder, once a test."""
    not_applicable: Mapping[str, str] = field(default_factory=dict)


def rent_spec(offer: Offer, label: str, *, disk_gb: float = 20.0, ports: tuple[int, ...] = ()) -> RentSpec:
    """A plain order; bids twice the floor where bids are asked for."""
    bid = 2 * offer.compute_micros_h if offer.billing is Billing.SPOT_BID else None
    return RentSpec(label, "img", "sleep 600", {"GREETING": "hello"}, disk_gb, ports, bid)


def registered() -> list[Registered]:
    """Every `harness_*.py` of this folder."""
    package = __package__ or ""
    names = sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name.startswith("harness_"))
    found = [importlib.import_module(f"{package}.{name}").REGISTERED for name in names]
    return [one for one in found if isinstance(one, Registered)]


async def until(read: Callable[[], Awaitable[T]], good: Callable[[T], bool], what: str) -> T:
    """Poll until `good`; fails with `what` and the last value at the deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_S
    while True:
        value = await read()
        if good(value):
            return value
        if loop.time() > end:
            raise AssertionError(f"{what} did not happen; last seen: {value}")
        await asyncio.sleep(0.02)
