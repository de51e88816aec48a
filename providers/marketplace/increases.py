"""Pending price increases, as vast.ai shows and settles them.

Invariant: an increase changes nothing until its tenant accepts it; each is answered once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from .api import json_object, require_owner
from .clock import NS
from .contract import Contract
from .market import Market
from .refusals import Refused, invalid_args

router = APIRouter(prefix="/api/v0/instances")
FIRST = 9001


def announce(market: Market, contract: Contract, rate: int) -> int:
    """The host wants `rate` micro-dollars per hour. Returns the id of the pending row; a newer one takes its place."""
    number = max(market.increases, default=FIRST - 1) + 1
    for old in [n for n, (one, _) in market.increases.items() if one == contract.id]:
        del market.increases[old]
    market.increases[number] = (contract.id, rate)
    return number


def _row(market: Market, number: int, contract: Contract, rate: int) -> dict[str, Any]:
    spec = market.machine_of(contract).spec
    end = contract.created_ns / NS + spec.duration_days * 86400
    return {
        "pending_price_increase_id": number, "contract_id": contract.id,
        "host_id": spec.host_id or spec.machine_id // 10, "new_gpu_costpersec": rate / 1e6 / 3600,
        "old_gpu_costpersec": contract.account.tariff.gpu_h / 1e6 / 3600, "new_disk_ram_costpersec": None,
        "old_disk_ram_costpersec": None, "new_bwu_cost": None, "old_bwu_cost": None, "new_bwd_cost": None,
        "old_bwd_cost": None, "new_platform_fee": None, "old_platform_fee": None, "contract_end_date": end,
        "ask_end_date": end, "created_at": market.clock.now_ns() / NS,
    }  # fmt: skip


@router.get("/pending-price-increases")
async def pending(request: Request) -> Response:
    """All that wait for an answer."""
    market = require_owner(request)
    rows = [
        _row(market, number, market.contracts[contract], rate)
        for number, (contract, rate) in market.increases.items()
        if market.contracts[contract].live
    ]
    return JSONResponse({"success": True, "count": len(rows), "truncated": False, "pending_price_increases": rows})


async def _answered(request: Request) -> tuple[Market, int, Contract, int]:
    market, body = require_owner(request), await json_object(request)
    number = body.get("pending_price_increase_id")
    if set(body) != {"pending_price_increase_id"} or isinstance(number, bool) or not isinstance(number, int):
        raise invalid_args('the body must be exactly {"pending_price_increase_id": number}')
    contract_id, rate = market.increases.pop(number, (0, 0))
    contract = market.contracts.get(contract_id)
    if contract is None or not contract.live:
        raise Refused(404, "no_pending_price_increase", "No such price increase waits for an answer.")
    return market, number, contract, rate


@router.put("/accept-price-increase")
async def accept(request: Request) -> Response:
    """Pay more from now on."""
    market, number, contract, rate = await _answered(request)
    market.settle_all()
    contract.account.reprice(replace(contract.account.tariff, gpu_h=rate))
    market.save()
    return JSONResponse({"success": True, "pending_price_increase_id": number, "contract_id": contract.id})


@router.put("/reject-price-increase")
async def reject(request: Request) -> Response:
    """The contract goes on at the old price until it ends."""
    _, number, contract, _ = await _answered(request)
    return JSONResponse({"success": True, "pending_price_increase_id": number, "contract_id": contract.id})
