"""The search grammar: `{field: {op: value}}` with coercion, order, limit and virtual columns.

Invariant: pure; a query that can't be understood is refused, never half applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .refusals import invalid_request

Row = Mapping[str, Any]
OPS = ("eq", "neq", "gt", "gte", "lt", "lte", "in", "notin")
TYPES = {
    "on-demand": "ondemand", "ondemand": "ondemand", "bid": "bid", "interruptible": "bid", "reserved": "reserved",
}  # fmt: skip
ALIASES = {
    "reliability2": "reliability", "dphtotal": "dph_total", "dph": "dph_total", "gpu_totalram": "gpu_total_ram",
    "target_reliability": "reliability", "cuda_vers": "cuda_max_good", "dlperf_usd": "dlperf_per_dphtotal",
    "ask_contract_id": "id",
}  # fmt: skip
_NOT_FILTERS = frozenset(
    {"order", "type", "limit", "allocated_storage", "georegion", "chunked", "client_id", "select_cols"}
)
DEFAULT_LIMIT = 64
MAX_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Filter:
    """One condition on one column."""

    field: str
    op: str
    value: Any


@dataclass(frozen=True, slots=True)
class Query:
    """A search that was understood."""

    filters: tuple[Filter, ...]
    order: tuple[tuple[str, bool], ...]
    """(column, descending)."""
    kind: str
    """ondemand, bid or reserved."""
    limit: int
    storage_gb: float


def _number(value: Any, what: str) -> float:
    if isinstance(value, Mapping) and len(value) == 1:
        value = next(iter(value.values()))
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise invalid_request(f"{what} must be a number")
    try:
        number = float(value)
    except ValueError:
        raise invalid_request(f"{what} must be a number, not {value!r}") from None
    if not math.isfinite(number):
        raise invalid_request(f"{what} must be finite")
    return number


def _order(raw: Any) -> tuple[tuple[str, bool], ...]:
    if not isinstance(raw, list):
        raise invalid_request("order must be a list of [column, direction]")
    out = []
    for item in raw:
        if not (isinstance(item, list) and len(item) == 2 and item[1] in ("asc", "desc")):
            raise invalid_request('order must be a list of [column, "asc" or "desc"]')
        out.append((ALIASES.get(str(item[0]), str(item[0])), item[1] == "desc"))
    return tuple(out)


def _filters(body: Mapping[str, Any]) -> tuple[Filter, ...]:
    out = []
    for name, conditions in body.items():
        if name in _NOT_FILTERS:
            continue
        if not isinstance(conditions, Mapping):
            raise invalid_request(f'{name} must be an object such as {{"eq": value}}')
        for op, value in conditions.items():
            if op not in OPS:
                raise invalid_request(f"{op} is not a valid search op")
            if op in ("in", "notin") and not isinstance(value, list):
                raise invalid_request(f"{name}: {op} needs a list")
            out.append(Filter(ALIASES.get(name, name), op, value))
    return tuple(out)


def parse_query(body: Any) -> Query:
    """Read a search body. Raises Refused (400 invalid_request) when it is wrong."""
    if not isinstance(body, Mapping):
        raise invalid_request("the query must be a JSON object")
    kind = body.get("type") or "on-demand"
    if not isinstance(kind, str) or kind not in TYPES:
        raise invalid_request(f"{kind!r} is not a valid type: use on-demand, bid or reserved")
    limit = body.get("limit")
    count = DEFAULT_LIMIT if limit is None else int(_number(limit, "limit"))
    if not 1 <= count <= MAX_LIMIT:
        raise invalid_request(f"limit must be 1 to {MAX_LIMIT}")
    storage = body.get("allocated_storage")
    return Query(
        filters=_filters(body),
        order=_order(body.get("order") or [["score", "desc"]]),
        kind=TYPES[kind],
        limit=count,
        storage_gb=5.0 if storage is None else _number(storage, "allocated_storage"),
    )


def _virtual(row: Row, name: str) -> Any:
    """The value that a filter on `name` compares; virtual columns are derived from real ones."""
    if name == "verified":
        return row.get("verification") == "verified"
    if name == "datacenter":
        return row.get("hosting_type") == 1
    if name == "geolocation":
        return str(row.get("geolocation") or "").rsplit(", ", 1)[-1]
    if name == "external":
        return bool(row.get("external"))
    if name == "gpu_ram_GB":
        return row["gpu_ram"] / 1000
    if name == "cpu_ram_GB":
        return row["cpu_ram"] / 1000
    if name not in row:
        raise invalid_request(f"{name} is not a searchable column")
    return row[name]


def _coerce(value: Any, like: Any, name: str) -> Any:
    """`value` in the type of the column: clients send numbers and booleans as strings."""
    if value is None:
        return None
    if isinstance(like, bool):
        if isinstance(value, str):
            return value.strip().lower() in ("true", "1", "yes")
        return bool(value)
    if isinstance(like, int | float):
        return _number(value, name)
    return str(value)


def holds(actual: Any, op: str, value: Any, name: str = "value") -> bool:
    """Whether `actual op value`; a null column satisfies nothing but neq, notin and eq null."""
    if op in ("in", "notin"):
        wanted = [_coerce(item, actual, name) for item in value]
        return (actual in wanted) == (op == "in")
    wanted_one = _coerce(value, actual, name)
    if op == "eq":
        return bool(actual == wanted_one)
    if op == "neq":
        return bool(actual != wanted_one)
    if actual is None or wanted_one is None:
        return False
    if op == "gt":
        return bool(actual > wanted_one)
    if op == "gte":
        return bool(actual >= wanted_one)
    if op == "lt":
        return bool(actual < wanted_one)
    return bool(actual <= wanted_one)


def run_query(rows: Sequence[dict[str, Any]], query: Query) -> list[dict[str, Any]]:
    """Rows that pass every filter, ordered and cut to the limit."""
    found = [
        row for row in rows
        if row["disk_space"] >= query.storage_gb
        and all(holds(_virtual(row, f.field), f.op, f.value, f.field) for f in query.filters)
    ]  # fmt: skip
    for name, descending in reversed(query.order):
        if rows and name not in rows[0]:
            raise invalid_request(f"order: {name} is not a column")
        found.sort(key=lambda row: (row[name] is None, row[name]), reverse=descending)
    return found[: query.limit]
