"""The market: machines, contracts, prices, money. Changes state; starting and killing processes is `host.py`'s work.

Invariant: a contract is billed under the state that held until the change; a machine has at most one tenant and is
offered only when it has none. Synchronous throughout, so that each command is atomic on the event loop.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from . import contract as contracts
from .billing import Account, Tariff
from .clock import NS, Clock
from .config import MachineSpec, MarketConfig
from .contract import Contract, Order, State
from .gateway import Link
from .refusals import Refused, invalid_args, no_such_instance
from .store import Store
from .views import Machine

FIRST_ASK = 7_000_001
FIRST_CONTRACT = 31_000_001
NEVER_STARTS = (
    "Error: OCI runtime create failed: nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8"
)


class Market:
    """One account's market. `leftover` ends what a dead marketplace's process (pid, started, key) left behind."""

    def __init__(
        self, config: MarketConfig, machines: Iterable[MachineSpec], clock: Clock, store: Store,
        leftover: Callable[[int, float, str], int],
    ) -> None:  # fmt: skip
        self.config = config
        self.clock = clock
        self._store = store
        self._random = random.Random(config.seed)
        meta = store.load("meta").get(0, {"ask": FIRST_ASK, "contract": FIRST_CONTRACT})
        self._next_ask: int = meta["ask"]
        self._next_contract: int = meta["contract"]
        self.contracts = {number: contracts.load(raw) for number, raw in store.load("contract").items()}
        self.links: dict[int, Link] = {}
        self.increases: dict[int, tuple[int, int]] = {}
        """Pending price increases: number → contract, micro-dollars per hour. They die with the contracts."""
        prices = store.load("machine")
        self.machines = {spec.machine_id: self._machine(spec, prices.get(spec.machine_id)) for spec in machines}
        self._dirty: set[int] = set()
        for contract in self.contracts.values():
            if contract.live:
                self._bury(contract, leftover)
        self.save()

    def _machine(self, spec: MachineSpec, saved: Mapping[str, int] | None) -> Machine:
        base, floor = (saved["dph_base"], saved["min_bid"]) if saved else (spec.dph_base, spec.min_bid)
        return Machine(spec=spec, dph_base=base, min_bid=floor, ask_id=self._new_ask())

    def _bury(self, contract: Contract, leftover: Callable[[int, float, str], int]) -> None:
        """End a contract of an earlier run: its bill closes at the last instant that was counted."""
        if contract.pid is not None:
            leftover(contract.pid, contract.pid_started, contract.api_key)
        contract.enter(State.DESTROYED, contract.account.settled_ns, "the marketplace was restarted")
        contract.pid = None
        self._dirty.add(contract.id)

    def _new_ask(self) -> int:
        self._next_ask += 1
        return self._next_ask - 1

    # reading

    def offers(self) -> list[Machine]:
        """Machines that can be rented now."""
        return [m for m in self.machines.values() if m.ask_id is not None and not m.offline]

    def live(self) -> list[Contract]:
        """Contracts that are not destroyed, oldest first."""
        return [c for c in self.contracts.values() if c.live]

    def listed(self) -> list[Contract]:
        """What the list call shows: the newest are missing while `list_lag_s` lasts."""
        horizon = self.clock.now_ns() - int(self.config.list_lag_s * NS)
        return [c for c in self.live() if c.created_ns <= horizon]

    def find(self, instance_id: int) -> Contract:
        """A live contract, or Refused 404 no_such_instance."""
        found = self.contracts.get(instance_id)
        if found is None or not found.live:
            raise no_such_instance(instance_id)
        return found

    def machine_of(self, contract: Contract) -> Machine:
        """The machine that a contract is on."""
        return self.machines[contract.machine_id]

    def billed_micros(self) -> int:
        """The whole bill, settled to now."""
        self.settle_all()
        return sum(c.account.total_micros() for c in self.contracts.values())

    def credit_micros(self) -> int:
        """Credit left."""
        return self.config.credit_micros - self.billed_micros()

    # renting

    def create(self, ask_id: int, order: Order, fault: str | None = None) -> Contract:
        """Rent. Refused with `new_contract` when a stopped instance was made all the same."""
        machine = self._asked(ask_id)
        if machine.spec.disk_space * 10**9 < order.disk_bytes:
            raise invalid_args(f"disk is larger than the {machine.spec.disk_space} GB of the machine")
        if self.credit_micros() <= 0:
            raise Refused(400, "insufficient_credit", "Your account lacks credit; add some to rent.")
        contract = self._sign(machine, order, fault)
        low = order.bid_micros_h is not None and order.bid_micros_h < machine.min_bid
        if low:
            contract.outbid = True
            self._enter(contract, State.STOPPED, "outbid")
        elif not order.start:
            self._enter(contract, State.STOPPED, "")
        self.save()
        if low or fault == "success_false_with_id":
            status, error = (400, "invalid_price") if low else (200, "internal_error")
            msg = "bid is below the minimum bid" if low else "the instance could not be scheduled"
            raise Refused(status, error, f"{error}: {msg}", new_contract=contract.id)
        return contract

    def _asked(self, ask_id: int) -> Machine:
        for machine in self.offers():
            if machine.ask_id == ask_id:
                return machine
        if FIRST_ASK <= ask_id < self._next_ask:
            msg = f"error 410/3907: no_such_ask Instance type {ask_id} is no longer available."
            raise Refused(410, "no_such_ask", msg, ask_id=ask_id)
        msg = f"error 404/3603: no_such_ask Instance type by id {ask_id} is not available."
        raise Refused(404, "invalid_args", msg, ask_id=ask_id)

    def _sign(self, machine: Machine, order: Order, fault: str | None) -> Contract:
        now = self.clock.now_ns()
        spec = machine.spec
        rate = machine.dph_base if order.bid_micros_h is None else order.bid_micros_h
        tariff = Tariff(rate, spec.storage_cost, spec.inet_down_cost, spec.inet_up_cost, order.disk_bytes)
        contract = Contract(
            id=self._next_contract, machine_id=spec.machine_id, order=order, api_key=secrets.token_hex(24),
            created_ns=now, account=Account(tariff, now), state=State.LOADING, label=order.label, due_ns=self._due(now),
            detail="pulling image",
        )  # fmt: skip
        self._next_contract += 1
        self.contracts[contract.id] = contract
        machine.ask_id, machine.tenant = None, contract.id
        self._dirty.add(contract.id)
        if fault == "never_starts":
            self._enter(contract, State.BROKEN, NEVER_STARTS)
        elif fault == "outbid_loading":
            contract.outbid = contract.held = True
            self._enter(contract, State.STOPPED, "outbid while loading")
        return contract

    def _due(self, now: int) -> int:
        return now + int(self.config.start_delay_s * self._random.uniform(0.5, 1.5) * NS)

    # changing

    def _enter(self, contract: Contract, state: State, detail: str = "") -> None:
        self._settle(contract)
        contract.enter(state, self.clock.now_ns(), detail)
        self._dirty.add(contract.id)

    def destroy(self, contract: Contract) -> None:
        """End the contract; its machine is offered again once its processes are gone (`vacate`)."""
        self._enter(contract, State.DESTROYED, "destroyed")
        self.save()

    def vacate(self, contract: Contract) -> None:
        """The last process of a destroyed contract is gone: bill the last bytes and offer the machine again."""
        self._settle(contract)
        self.links.pop(contract.id, None)
        contract.pid = None
        machine = self.machine_of(contract)
        if machine.tenant == contract.id:
            machine.tenant, machine.ask_id = None, self._new_ask()
        self._dirty.add(contract.id)
        self.save()

    def stop(self, contract: Contract, detail: str = "stopped", outbid: bool = False) -> None:
        """Stop the container; the disk stays. A host that is down has nothing to stop."""
        if contract.state is not State.OFFLINE:
            contract.outbid = outbid
            self._enter(contract, State.STOPPED, detail)
            self.save()

    def start(self, contract: Contract) -> None:
        """Start a stopped or exited instance. Refused when its machine or its bid does not allow it."""
        machine = self.machine_of(contract)
        if machine.offline:
            raise Refused(400, "no_capacity", "the host is offline")
        bid = contract.order.bid_micros_h
        if bid is not None and bid < machine.min_bid:
            raise Refused(400, "invalid_price", "the bid is below the minimum bid")
        if contract.state in (State.STOPPED, State.EXITED, State.OFFLINE):
            contract.held = contract.outbid = False
            self.load_again(contract)
            self.save()

    def load_again(self, contract: Contract) -> None:
        """A stopped contract starts loading."""
        self._enter(contract, State.LOADING, "starting")
        contract.due_ns = self._due(self.clock.now_ns())

    def running(self, contract: Contract, pid: int, started: float) -> None:
        """Its process has started: the GPU is billed from now on."""
        contract.pid, contract.pid_started = pid, started
        self._enter(contract, State.RUNNING, "success, running " + contract.order.image)
        self.save()

    def exited(self, contract: Contract, code: int) -> None:
        """Its process ended by itself."""
        self._enter(contract, State.EXITED, f"container exited with status {code}")
        self.save()

    def set_label(self, contract: Contract, label: str | None) -> None:
        """Rename."""
        contract.label = label
        self._dirty.add(contract.id)
        self.save()

    def set_bid(self, contract: Contract, micros_h: int | None) -> None:
        """Change a bid from now on; None bids what wins. Refused for on-demand contracts."""
        if not contract.is_bid:
            raise invalid_args("this instance is not interruptible: it has no bid")
        machine = self.machine_of(contract)
        price = machine.min_bid if micros_h is None else micros_h
        if not 1000 <= price <= 32_000_000 * machine.spec.num_gpus:
            raise invalid_args("price must be 0.001 to 32 times num_gpus dollars per hour")
        self._settle(contract)
        contract.order = replace(contract.order, bid_micros_h=price)
        contract.account.reprice(replace(contract.account.tariff, gpu_h=price))
        self._dirty.add(contract.id)
        self.save()

    def set_offline(self, machine: Machine, offline: bool) -> None:
        """The host dies, or comes back with its container exited."""
        machine.offline = offline
        tenant = self.contracts.get(machine.tenant) if machine.tenant is not None else None
        if tenant is not None and tenant.live:
            state, detail = (State.OFFLINE, "host is offline") if offline else (State.EXITED, "host was rebooted")
            self._enter(tenant, state, detail)
        self.save()

    # money

    def _settle(self, contract: Contract) -> None:
        now = self.clock.now_ns()
        link = self.links.get(contract.id)
        if link is not None:
            up, down = link.drain()
            contract.account.traffic(now, down=down, up=up)
        if contract.live:
            contract.settle(now)

    def settle_all(self) -> None:
        """Count time and bytes of every contract up to now."""
        for contract in self.contracts.values():
            if contract.live or contract.id in self.links:
                self._settle(contract)
                self._dirty.add(contract.id)

    def save(self) -> None:
        """Commit what changed."""
        documents: list[tuple[str, int, Any]] = [
            ("contract", number, contracts.dump(self.contracts[number])) for number in sorted(self._dirty)
        ]
        documents += [
            ("machine", m.spec.machine_id, {"dph_base": m.dph_base, "min_bid": m.min_bid})
            for m in self.machines.values()
        ]
        documents.append(("meta", 0, {"ask": self._next_ask, "contract": self._next_contract}))
        self._store.save(documents)
        self._dirty.clear()

    def close(self) -> None:
        """End every contract, close the bill."""
        for contract in self.live():
            self._enter(contract, State.DESTROYED, "the marketplace stopped")
        self.settle_all()
        self.save()
        self._store.close()
