"""vast.ai's HTTP API over the market.

Invariant: bodies and paths are vast.ai's; what is decided is decided in `market.py`. A path has no slash at its end
here: the gate takes it off.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from .contract import Contract
from .grammar import parse_query, run_query
from .host import Host
from .market import Market
from .orders import parse_order, price_micros
from .paging import page, parse_page
from .refusals import Refused, auth_error, invalid_args, no_such_instance
from .views import dollars, instance_row, offer_row

router = APIRouter()
LOG_BYTES = 1_000_000


def market_of(request: Request) -> Market:
    """The market behind this application."""
    market: Market = request.app.state.market
    return market


def bearer(request: Request) -> str:
    """The key that came with the request, "" without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def require_owner(request: Request) -> Market:
    """Let the account's key pass; an instance's own key may do less."""
    market, key = market_of(request), bearer(request)
    if hmac.compare_digest(key.encode(), market.config.api_key.encode()):
        return market
    if key and any(hmac.compare_digest(key, c.api_key) for c in market.live()):
        raise Refused(401, "auth_error", "This key may only stop or destroy its own instance")
    raise auth_error()


def require_tenant(request: Request, instance_id: int) -> tuple[Market, Contract]:
    """Let the account's key pass, and an instance's key for that instance."""
    market, key = market_of(request), bearer(request)
    contract = market.contracts.get(instance_id)
    if not (contract is not None and contract.live and hmac.compare_digest(key.encode(), contract.api_key.encode())):
        require_owner(request)
    return market, market.find(instance_id)


async def json_object(request: Request, empty_ok: bool = False) -> dict[str, Any]:
    """The body as an object. Refused (400) otherwise."""
    raw = await request.body()
    if not raw and empty_ok:
        return {}
    try:
        body = json.loads(raw)
    except ValueError:
        raise invalid_args("the body is not JSON") from None
    if not isinstance(body, dict):
        raise invalid_args("the body must be a JSON object")
    return body


def _search(market: Market, raw: Any) -> JSONResponse:
    query = parse_query(raw)
    now = market.clock.now_ns()
    rows = [offer_row(machine, query.kind, query.storage_gb, now) for machine in market.offers()]
    return JSONResponse({"success": True, "offers": run_query(rows, query)})


@router.post("/api/v0/bundles")
async def bundles(request: Request) -> Response:
    """Search, flat query. No key needed."""
    return _search(market_of(request), await json_object(request, empty_ok=True))


@router.put("/api/v0/search/asks")
async def search_asks(request: Request) -> Response:
    """Search, query under `q`."""
    return _search(market_of(request), (await json_object(request)).get("q") or {})


@router.get("/api/v0/gpu_names/unique")
async def gpu_names(request: Request) -> Response:
    """Every GPU name in the price list. No key needed."""
    return JSONResponse({"gpu_names": sorted({m.spec.gpu_name for m in market_of(request).machines.values()})})


@router.put("/api/v0/asks/{ask_id}")
async def create(request: Request, ask_id: int) -> Response:
    """Rent one machine."""
    market = require_owner(request)
    order = parse_order(await json_object(request))
    contract = market.create(ask_id, order, request.scope.get("echo2.fault"))
    return JSONResponse({"success": True, "new_contract": contract.id, "instance_api_key": contract.api_key})


def _row(market: Market, contract: Contract) -> dict[str, Any]:
    return instance_row(contract, market.machine_of(contract), market.clock.now_ns())


@router.get("/api/v0/instances")
async def retired_list(request: Request) -> Response:
    """The old list, retired."""
    require_owner(request)
    raise Refused(410, "deprecated_endpoint", "This endpoint is retired: use /api/v1/instances/")


@router.get("/api/v1/instances")
async def list_instances(request: Request) -> Response:
    """One page of the account's instances."""
    market = require_owner(request)
    body = page([_row(market, contract) for contract in market.listed()], parse_page(request.query_params))
    if request.scope.get("echo2.fault") == "list_truncated":
        body["instances"] = body["instances"][: len(body["instances"]) // 2]
        body["next_token"] = None
    return JSONResponse(body)


@router.get("/api/v0/instances/filters")
async def instance_filters(request: Request) -> Response:
    """The distinct values that the list can be filtered by."""
    market = require_owner(request)
    names = ("actual_status", "gpu_name", "verification")
    rows = {tuple(row[name] for name in names) for row in (_row(market, c) for c in market.listed())}
    return JSONResponse({"success": True, "filters": [dict(zip(names, row, strict=True)) for row in sorted(rows)]})


@router.get("/api/v0/instances/{instance_id}")
async def show(request: Request, instance_id: int) -> Response:
    """One instance, null when it is gone."""
    market = require_owner(request)
    contract = market.contracts.get(instance_id)
    if contract is None or not contract.live:
        return JSONResponse({"instances": None})
    return JSONResponse({"instances": _row(market, contract)})


@router.delete("/api/v0/instances/{instance_id}")
async def destroy(request: Request, instance_id: int) -> Response:
    """End one instance."""
    market, contract = require_tenant(request, instance_id)
    market.destroy(contract)
    return JSONResponse({"success": True})


@router.delete("/api/v0/instances")
async def destroy_many(request: Request) -> Response:
    """End several instances."""
    market = require_owner(request)
    ids = _ids((await json_object(request)).get("instance_ids"))
    for contract in [market.find(number) for number in ids]:
        market.destroy(contract)
    return JSONResponse({"success": True, "destroyed": ids})


def _ids(raw: Any) -> list[int]:
    if not isinstance(raw, list) or not all(isinstance(x, int | str) and str(x).isdigit() for x in raw) or not raw:
        raise invalid_args("expected a list of instance ids")
    return list(dict.fromkeys(int(x) for x in raw))


def _set_state(market: Market, contract: Contract, state: Any) -> None:
    if state == "stopped":
        market.stop(contract)
    elif state == "running":
        market.start(contract)
    else:
        raise invalid_args('state must be "running" or "stopped"')


@router.put("/api/v0/instances/{instance_id}")
async def change(request: Request, instance_id: int) -> Response:
    """Stop, start or rename one instance."""
    market, contract = require_tenant(request, instance_id)
    body = await json_object(request)
    if "label" in body:
        require_owner(request)
        label = body["label"]
        if label is not None and (not isinstance(label, str) or len(label) > 1024):
            raise invalid_args("label must be text of at most 1024 characters")
        market.set_label(contract, label)
    elif "state" in body:
        _set_state(market, contract, body["state"])
    else:
        raise invalid_args("give state or label")
    return JSONResponse({"success": True})


@router.put("/api/v0/instances")
async def change_many(request: Request) -> Response:
    """Stop or start several instances."""
    market = require_owner(request)
    body = await json_object(request)
    for contract in [market.find(number) for number in _ids(body.get("ids"))]:
        _set_state(market, contract, body.get("state"))
    return JSONResponse({"success": True})


@router.put("/api/v0/instances/bid_price/{instance_id}")
async def change_bid(request: Request, instance_id: int) -> Response:
    """Change a bid; a null price bids what wins."""
    market = require_owner(request)
    contract = market.find(instance_id)
    price = (await json_object(request)).get("price")
    market.set_bid(contract, None if price is None else price_micros(price))
    return JSONResponse({"success": True})


@router.get("/api/v0/users/current")
async def current_user(request: Request) -> Response:
    """The account and its credit; the check of a key."""
    market = require_owner(request)
    credit = dollars(market.credit_micros())
    return JSONResponse({
        "id": 1, "username": "local", "email": "local@marketplace.invalid", "credit": credit, "balance": credit,
        "balance_threshold": 0.0, "can_pay": True, "has_billing": True, "api_key": market.config.api_key,
    })  # fmt: skip


@router.put("/api/v0/instances/request_logs/{instance_id}")
async def request_logs(request: Request, instance_id: int) -> Response:
    """Make an instance's last output readable under an address nobody can guess."""
    market = require_owner(request)
    contract = market.find(instance_id)
    body = await json_object(request, empty_ok=True)
    tail = str(body.get("tail") or "1000")
    if not tail.isdigit():
        raise invalid_args("tail must be a number of lines")
    token = secrets.token_urlsafe(16)
    request.app.state.results[token] = (contract.id, int(tail), str(body.get("filter") or ""))
    return JSONResponse({"success": True, "result_url": f"{request.base_url}results/{token}"})


@router.get("/results/{token}")
async def result(request: Request, token: str) -> Response:
    """The output asked for before; needs no key but the address."""
    wanted = request.app.state.results.get(token)
    if wanted is None:
        raise no_such_instance(0)
    number, tail, keep = wanted
    host: Host = request.app.state.machines
    path = host.log_path(number)
    lines: list[str] = []
    if path.exists():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines(keepends=True)
    shown = [line for line in lines if keep in line][-tail:] if tail else []
    return PlainTextResponse("".join(shown))
