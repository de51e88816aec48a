"""What every provider adapter offers, and the errors it may raise.

Invariant: an adapter never guesses. An answer it can't read raises; an empty list means that the provider said
"none"; a create whose outcome is not known is reported as `unknown` and settled by the caller through `list`.

Money is integer micro-dollars (1 USD = 1_000_000), rates of money are micro-dollars per hour for the whole
machine, sizes are bytes or GB (10**9 bytes) where the name says so, link rates are Mbit/s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal, Protocol, runtime_checkable

# A part of the interface: who talks to a provider imports both from here.
from providers.errors import (
    AuthError as AuthError,
)
from providers.errors import (
    BadRequest as BadRequest,
)
from providers.errors import (
    BidTooLow as BidTooLow,
)
from providers.errors import (
    CapabilityError as CapabilityError,
)
from providers.errors import (
    CreditError as CreditError,
)
from providers.errors import (
    EndpointDeprecated as EndpointDeprecated,
)
from providers.errors import (
    InstanceNotFound as InstanceNotFound,
)
from providers.errors import (
    MalformedAnswer as MalformedAnswer,
)
from providers.errors import (
    NoCapacity as NoCapacity,
)
from providers.errors import (
    OfferGone as OfferGone,
)
from providers.errors import (
    ProviderError as ProviderError,
)
from providers.errors import (
    QuotaError as QuotaError,
)
from providers.errors import (
    RateLimited as RateLimited,
)
from providers.errors import (
    Retry as Retry,
)
from providers.errors import (
    Transient as Transient,
)
from providers.told import (
    Balance as Balance,
)
from providers.told import (
    Charge as Charge,
)
from providers.told import (
    Notice as Notice,
)
from providers.told import (
    PriceIncrease as PriceIncrease,
)

MICROS_PER_USD = 1_000_000
HOURS_PER_MONTH = 720
"""vast.ai's month for storage prices (verified against its documented example)."""


class Billing(StrEnum):
    """How a machine is paid: a fixed price, the user's own bid, or the market's price in force."""

    ON_DEMAND = "on_demand"
    SPOT_BID = "spot_bid"
    SPOT_MARKET = "spot_market"


class Phase(StrEnum):
    """Life of an instance as far as we care; the provider's own word is kept beside it (`raw_status`)."""

    PENDING = "pending"
    LOADING = "loading"
    RUNNING = "running"
    PAUSED = "paused"
    """Stopped or outbid: no GPU, disk still billed, may come back by itself."""
    FAILED = "failed"
    """Will never run."""
    TERMINATING = "terminating"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Caps:
    """What a provider can do, so that the caller asks before it acts."""

    spot: bool
    change_bid: bool
    bandwidth_billed: bool
    idempotency_key: bool = False
    notice_s: float = 0.0
    list_page: int = 25
    pulls_image: bool = True
    """Whether a machine downloads the image before it starts; False where its software is there already."""
    prepaid: bool = True
    """False where the account is billed afterwards: there is no credit, and `balance` raises CapabilityError."""
    spot_billing: Billing = Billing.SPOT_BID
    """How interruptible machines are paid here: what to search for where `spot` is True."""
    release_each_s: float = 0.0
    """Seconds between two destroy calls, where they have to go one after the other."""
    pools: bool = False
    """Whether an offer is a pool, a kind of machine in a place, of which any number may be had, and not one machine."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Something the provider would rent to us now."""

    provider: str
    offer_id: str
    machine_id: str
    """Stable identity of the machine (or type + zone): the key of cool-downs."""
    gpu_name: str
    num_gpus: int
    gpu_ram_mb: int
    """Per GPU."""
    billing: Billing
    compute_micros_h: int
    """Whole offer, without disk and traffic: the on-demand price, or the floor of a bid."""
    disk_micros_gb_month: int
    upload_micros_gb: int
    download_micros_gb: int
    up_mbps: float
    down_mbps: float
    reliability: float
    """0..1, the provider's own figure."""
    region: str
    max_duration_s: float | None
    """Seconds until the host ends the contract; None when open-ended."""
    dlperf: float
    """The provider's own performance score for the whole offer; 0 when it has none."""
    ports: int
    """How many ports can be published."""
    fetched_at: datetime
    raw_status: str = ""
    disk_gb: float | None = None
    """The largest disk that can be had; None where that is not told."""


@dataclass(frozen=True, slots=True)
class OfferQuery:
    """Filters of a search. Adapters push down what they can and check everything again locally."""

    billing: Billing
    gpu_names: tuple[str, ...] = ()
    max_compute_micros_h: int | None = None
    min_reliability: float = 0.0
    min_duration_s: float = 0.0
    min_ports: int = 0
    disk_gb: float = 10.0
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class RentSpec:
    """What to rent and what to run on it. `label` is the intent's identity at the provider."""

    label: str
    """`echo2:<fleet>:<lease>:<attempt>`; nothing else may carry it."""
    image: str
    onstart: str
    env: Mapping[str, str]
    disk_gb: float
    ports: tuple[int, ...] = ()
    bid_micros_h: int | None = None
    """Required for SPOT_BID, must be None otherwise."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One machine that we pay for, as the provider shows it."""

    provider: str
    instance_id: str
    label: str
    phase: Phase
    raw_status: str
    detail: str
    billing: Billing | None
    compute_micros_h: int | None
    """Billed rate now; None when the provider does not tell (never zero for unknown)."""
    machine_id: str
    gpu_name: str
    started_at: datetime | None
    """When the GPU's billing began; None while it has not."""
    public_host: str | None = None
    ports: Mapping[int, int] = field(default_factory=dict)
    """Container port to public port."""
    floor_micros_h: int | None = None
    """What a bid must reach now; None for machines without bids, and where it is not told."""
    ends_at: datetime | None = None
    """When the host ends the contract; None when that is open or not told."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All of our instances. `complete` is False when any page is missing: then it proves no absence."""

    complete: bool
    instances: Sequence[Instance]


@dataclass(frozen=True, slots=True)
class RentResult:
    """Outcome of exactly one create request.

    created: `instance_id` is billing now. refused: nothing was made, except `doomed_id` if set, which must be
    destroyed. unknown: it may or may not exist; look its label up and rent nothing for this intent until then.
    """

    outcome: Literal["created", "refused", "unknown"]
    instance_id: str | None = None
    doomed_id: str | None = None
    error: ProviderError | None = None


@runtime_checkable
class Provider(Protocol):
    """One account at one provider."""

    @property
    def name(self) -> str:
        """Name used in settings, leases and offers."""
        ...

    @property
    def caps(self) -> Caps:
        """What this provider can do."""
        ...

    async def search(self, query: OfferQuery) -> list[Offer]:
        """Offers that pass `query`, filters applied again locally. Raises on broken answers."""
        ...

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """Send exactly one create request, without any transport retry, and return as soon as the id is known."""
        ...

    async def get(self, instance_id: str) -> Instance | None:
        """One instance; None only if the provider positively says that there is none."""
        ...

    async def list(self) -> Listing:
        """All instances of the account, other people's labels included."""
        ...

    async def release(self, instance_id: str) -> None:
        """Destroy. Returns when the request was accepted or the instance is positively gone; auth errors raise."""
        ...

    async def set_bid(self, instance_id: str, bid_micros_h: int) -> None:
        """Change a bid. Raises CapabilityError where there are none."""
        ...

    async def logs(self, instance_id: str, tail: int) -> str:
        """The last lines that the instance printed; "" when they are not ready."""
        ...

    async def balance(self) -> Balance:
        """Credit left. Also serves as the check of the key. CapabilityError unless `caps.prepaid`."""
        ...

    async def charges(self, since: datetime) -> Sequence[Charge]:
        """The provider's own bill since then; [] where it has none."""
        ...

    def notices(self) -> AsyncIterator[Notice]:
        """Interruption notices, for providers that send them."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


@runtime_checkable
class Announcing(Protocol):
    """A provider that tells of price increases before they hold."""

    async def price_increases(self) -> Sequence[PriceIncrease]:
        """All that wait for an answer."""
        ...

    async def accept_increase(self, increase_id: str) -> None:
        """Agree to one. BadRequest if it does not wait any more."""
        ...
