"""Prices that move, and what follows from them: who is outbid, who goes on, who is stopped for lack of money.

Invariant: a contract that runs on demand keeps its price; one that was outbid by a fault stays so until its machine's
price is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .contract import State
from .market import Market
from .views import Machine


def reprice(market: Market, machines: Iterable[Machine], change: Callable[[Machine], tuple[int, int]]) -> None:
    """Set (dph_base, min_bid) of machines. Contracts that run on demand keep their price."""
    for machine in machines:
        machine.dph_base, machine.min_bid = change(machine)
        tenant = market.contracts.get(machine.tenant) if machine.tenant is not None else None
        if tenant is not None:
            tenant.held = False
    market.save()


def decide(market: Market) -> None:
    """What follows from bids, floors and credit: outbid, resume, stop for lack of money."""
    broke = market.credit_micros() <= 0
    for contract in market.live():
        bid, floor = contract.order.bid_micros_h, market.machine_of(contract).min_bid
        active = contract.state in (State.RUNNING, State.LOADING)
        if active and broke:
            market.stop(contract, "no credit left")
        elif active and bid is not None and bid < floor:
            market.stop(contract, "outbid", outbid=True)
        elif (
            contract.state is State.STOPPED
            and contract.outbid
            and not contract.held
            and bid is not None
            and bid >= floor
            and not broke
        ):
            contract.outbid = False
            market.load_again(contract)
