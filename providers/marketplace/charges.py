"""The bill, as vast.ai shows it.

Invariant: what is shown is settled up to the moment of the question; a page token leads to the rest of the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from .api import require_owner
from .paging import decode_token, encode_token
from .refusals import invalid_args
from .views import charge_row, lines_between

router = APIRouter()
DAY_S = 86400
MAX_CHARGES = 500


def _days(filters: Mapping[str, Any]) -> tuple[int, int]:
    day = filters.get("day") or {}
    if not isinstance(day, Mapping):
        raise invalid_args('select_filters: day must be {"gte": epoch, "lte": epoch}')
    bounds = day.get("gte", 0), day.get("lte", 10**11)
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in bounds):
        raise invalid_args("select_filters: day bounds must be epoch seconds")
    return int(bounds[0] // DAY_S), int(bounds[1] // DAY_S)


@router.get("/api/v0/charges")
async def charges(request: Request) -> Response:
    """The bill: one result an instance, one item a kind and a UTC day."""
    market = require_owner(request)
    params = request.query_params
    try:
        filters = json.loads(params.get("select_filters") or "{}")
        limit = max(1, min(int(params.get("limit") or MAX_CHARGES), MAX_CHARGES))
    except ValueError:
        raise invalid_args("select_filters must be JSON and limit a whole number") from None
    if not isinstance(filters, dict):
        raise invalid_args("select_filters must be an object")
    market.settle_all()
    first, last = _days(filters)
    kinds = (filters.get("type") or {}).get("in", ["instance"])
    billed = [(c, lines_between(c.account, first, last)) for c in market.contracts.values()]
    rows = [(c.id, charge_row(c, lines)) for c, lines in billed if lines and "instance" in kinds]
    backwards = params.get("latest_first") == "true"
    rows.sort(key=lambda row: row[0], reverse=backwards)
    total = len(rows)
    if token := params.get("after_token"):
        mark = decode_token(token)[0]
        rows = [row for row in rows if (row[0] < mark if backwards else row[0] > mark)]
    shown = rows[:limit]
    return JSONResponse({
        "success": True, "results": [row for _, row in shown], "count": len(shown), "total": total,
        "next_token": encode_token([shown[-1][0]]) if len(rows) > limit else None,
    })  # fmt: skip
