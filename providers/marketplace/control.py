"""The side that tests and demos use to move the market: prices, deaths of hosts, faults, what was asked.

Invariant: mounted only when the configuration says so, and behind the account's key.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from . import auction
from .api import json_object, require_owner
from .config import ConfigError, to_micros
from .faults import Faults
from .gate import Requests
from .host import Host
from .increases import announce
from .refusals import Refused, invalid_args
from .views import Machine, dollars

router = APIRouter(prefix="/_market", dependencies=[Depends(require_owner)])


@router.get("/state")
async def state(request: Request) -> Response:
    """Machines, instances (destroyed ones too), live processes and the whole bill in micro-dollars."""
    market = require_owner(request)
    host: Host = request.app.state.machines
    total = market.billed_micros()
    running = host.running()
    machines = [
        {
            "machine_id": m.spec.machine_id, "gpu_name": m.spec.gpu_name, "ask_id": m.ask_id, "tenant": m.tenant,
            "dph_base": dollars(m.dph_base), "min_bid": dollars(m.min_bid), "offline": m.offline,
        }
        for m in market.machines.values()
    ]  # fmt: skip
    instances = [
        {
            "id": c.id, "machine_id": c.machine_id, "label": c.label, "state": c.state.value, "detail": c.detail,
            "is_bid": c.is_bid, "pid": running.get(c.id), "outbid": c.outbid, "billed_micros": c.account.total_micros(),
            "by_kind": {kind.value: c.account.micros(kind) for kind in c.account.totals},
        }
        for c in market.contracts.values()
    ]  # fmt: skip
    return JSONResponse({
        "machines": machines, "instances": instances, "pids": sorted(running.values()), "running": len(running),
        "live": len(market.live()), "billed_micros": total,
    })  # fmt: skip


def _selected(machines: list[Machine], selector: Any) -> list[Machine]:
    if not isinstance(selector, dict) or set(selector) - {"machine_id", "gpu_name"}:
        raise invalid_args("selector must be an object with machine_id, gpu_name, both or none")
    found = [m for m in machines if all(getattr(m.spec, name) == value for name, value in selector.items())]
    if not found:
        raise Refused(404, "no_such_machine", f"no machine matches {selector}")
    return found


@router.post("/price")
async def price(request: Request) -> Response:
    """Set dph_base and min_bid (dollars) of the machines selected, or multiply both by `factor`."""
    market = require_owner(request)
    body = await json_object(request)
    machines = _selected(list(market.machines.values()), body.get("selector", {}))
    factor = body.get("factor", 1)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        raise invalid_args("factor must be a number above 0")
    try:
        given = {name: to_micros(body[name], name) for name in ("dph_base", "min_bid") if name in body}
    except ConfigError as error:
        raise invalid_args(str(error)) from error

    def change(machine: Machine) -> tuple[int, int]:
        base, floor = given.get("dph_base", machine.dph_base), given.get("min_bid", machine.min_bid)
        return round(base * factor), round(floor * factor)

    auction.reprice(market, machines, change)
    return JSONResponse({"success": True, "machines": [m.spec.machine_id for m in machines]})


@router.post("/machines/{machine_id}/increase")
async def increase(request: Request, machine_id: int) -> Response:
    """The host wants `dph_base` dollars per hour of whoever rents its machine on demand."""
    market = require_owner(request)
    machine = _selected(list(market.machines.values()), {"machine_id": machine_id})[0]
    tenant = market.contracts.get(machine.tenant) if machine.tenant is not None else None
    if tenant is None or not tenant.live or tenant.is_bid:
        raise Refused(404, "no_such_instance", f"nobody rents machine {machine_id} on demand")
    try:
        rate = to_micros((await json_object(request)).get("dph_base"), "dph_base")
    except ConfigError as error:
        raise invalid_args(str(error)) from error
    return JSONResponse({"success": True, "pending_price_increase_id": announce(market, tenant, rate)})


@router.post("/machines/{machine_id}/kill")
async def kill(request: Request, machine_id: int) -> Response:
    """The host dies at once."""
    market = require_owner(request)
    market.set_offline(_selected(list(market.machines.values()), {"machine_id": machine_id})[0], offline=True)
    return JSONResponse({"success": True})


@router.post("/machines/{machine_id}/revive")
async def revive(request: Request, machine_id: int) -> Response:
    """The host is back; its container has exited."""
    market = require_owner(request)
    market.set_offline(_selected(list(market.machines.values()), {"machine_id": machine_id})[0], offline=False)
    return JSONResponse({"success": True})


@router.post("/faults")
async def add_fault(request: Request) -> Response:
    """Order faults: {call, kind, count}."""
    faults: Faults = request.app.state.faults
    fault = faults.add(await json_object(request))
    return JSONResponse({"success": True, "call": fault.call, "kind": fault.kind, "count": fault.count})


@router.delete("/faults")
async def clear_faults(request: Request) -> Response:
    """Forget ordered faults."""
    request.app.state.faults.clear()
    return JSONResponse({"success": True})


@router.get("/requests")
async def requests(request: Request) -> Response:
    """How often each call arrived, creates by label and by ask, and how many calls suffered which fault."""
    seen: Requests = request.app.state.requests
    return JSONResponse({
        "calls": dict(seen.calls), "creates_by_label": dict(seen.creates_by_label),
        "creates_by_ask": dict(seen.creates_by_ask), "faults": dict(request.app.state.faults.taken),
    })  # fmt: skip
