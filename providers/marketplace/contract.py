"""One rented instance: what was ordered, what state it is in, what it costs.

Invariant: `state` alone decides what is billed and whether a process may live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from .billing import Account

GB = 10**9


class State(StrEnum):
    """Life of a contract."""

    LOADING = "loading"
    BROKEN = "created"
    """Made, but its container can't start; stays so."""
    RUNNING = "running"
    STOPPED = "stopped"
    EXITED = "exited"
    OFFLINE = "offline"
    DESTROYED = "destroyed"


@dataclass(frozen=True, slots=True)
class Order:
    """What the tenant asked for."""

    image: str
    onstart: str
    env: Mapping[str, str]
    """Variables, without the port keys."""
    ports: tuple[int, ...]
    disk_bytes: int
    label: str | None
    bid_micros_h: int | None
    """None for on demand."""
    start: bool = True


@dataclass(slots=True)
class Contract:
    """A machine let to a tenant."""

    id: int
    machine_id: int
    order: Order
    api_key: str = field(repr=False)
    created_ns: int
    account: Account
    state: State
    label: str | None
    detail: str = ""
    due_ns: int = 0
    """When a LOADING contract may start."""
    first_run_ns: int | None = None
    running_ns: int = 0
    """Start of the present run."""
    outbid: bool = False
    held: bool = False
    """Outbid by a fault: stays so until the machine's price is changed."""
    public_ports: dict[int, int] = field(default_factory=dict)
    pid: int | None = None
    pid_started: float = 0.0
    """Creation time of the process, so that a number used again is never killed."""

    @property
    def is_bid(self) -> bool:
        """Whether the tenant pays a bid."""
        return self.order.bid_micros_h is not None

    @property
    def live(self) -> bool:
        """Whether it still exists for its tenant."""
        return self.state is not State.DESTROYED

    def settle(self, now_ns: int) -> None:
        """Bill the time since the last call under the state that held until now."""
        disk = self.state not in (State.OFFLINE, State.DESTROYED)
        self.account.settle(now_ns, gpu=self.state is State.RUNNING, disk=disk)

    def enter(self, state: State, now_ns: int, detail: str = "") -> None:
        """Bill up to now, then change state."""
        self.settle(now_ns)
        self.state = state
        self.detail = detail
        if state is State.RUNNING:
            self.running_ns = now_ns
            self.first_run_ns = self.first_run_ns or now_ns
            self.outbid = False


def dump(contract: Contract) -> dict[str, Any]:
    """A JSON value that `load` reads back."""
    order = asdict(contract.order)
    order["env"] = dict(contract.order.env)
    skipped = ("account", "order", "state", "public_ports")
    plain = {name: getattr(contract, name) for name in Contract.__dataclass_fields__ if name not in skipped}
    return {**plain, "order": order, "account": contract.account.dump(), "state": contract.state.value}


def load(raw: dict[str, Any]) -> Contract:
    """The contract that `dump` wrote, without its ports, which died with the marketplace."""
    order = {**raw["order"], "ports": tuple(raw["order"]["ports"])}
    values = {**raw, "order": Order(**order), "account": Account.load(raw["account"]), "state": State(raw["state"])}
    return Contract(**values)
