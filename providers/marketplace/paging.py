"""Filters, order and keyset pages of the instance list.

Invariant: pure; walking the tokens yields every row once, even if rows are added or removed meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .grammar import OPS, holds
from .refusals import invalid_args

MAX_PAGE = 25
FILTERABLE = ("actual_status", "gpu_name", "verification", "id", "label")
SORTABLE = ("id", "label", "actual_status", "gpu_name", "start_date", "machine_id")


@dataclass(frozen=True, slots=True)
class PageQuery:
    """What a list call asks for."""

    filters: Mapping[str, Mapping[str, Any]]
    order: tuple[tuple[str, bool], ...]
    cols: tuple[str, ...] | None
    limit: int
    after: tuple[Any, ...] | None


def _json(text: str | None, what: str, empty: Any) -> Any:
    if text is None or text == "":
        return empty
    try:
        return json.loads(text)
    except ValueError:
        raise invalid_args(f"{what} is not JSON") from None


def encode_token(key: Sequence[Any]) -> str:
    """An opaque token for the row with this sort key."""
    return base64.urlsafe_b64encode(json.dumps(list(key)).encode()).decode()


def decode_token(token: str) -> tuple[Any, ...]:
    """The sort key inside a token; Refused when it is not one of ours."""
    try:
        key = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (ValueError, binascii.Error):
        raise invalid_args("after_token is not valid") from None
    if not isinstance(key, list):
        raise invalid_args("after_token is not valid")
    return tuple(key)


def _order(raw: Any) -> tuple[tuple[str, bool], ...]:
    if not isinstance(raw, list):
        raise invalid_args("order_by must be a list")
    out = []
    for item in raw:
        if not isinstance(item, Mapping) or item.get("col") not in SORTABLE:
            raise invalid_args(f"order_by: columns are {', '.join(SORTABLE)}")
        out.append((str(item["col"]), item.get("dir", "asc") == "desc"))
    if "id" not in [name for name, _ in out]:
        out.append(("id", False))
    return tuple(out)


def parse_page(params: Mapping[str, str]) -> PageQuery:
    """Read the query string of a list call. Raises Refused (400) when it is wrong."""
    filters = _json(params.get("select_filters"), "select_filters", {})
    if not isinstance(filters, Mapping) or not all(isinstance(v, Mapping) for v in filters.values()):
        raise invalid_args("select_filters must be an object of {column: {op: value}}")
    for name, conditions in filters.items():
        if name not in FILTERABLE:
            raise invalid_args(f"select_filters: {name} can't be filtered on; columns are {', '.join(FILTERABLE)}")
        for op, value in conditions.items():
            if op not in OPS or (op in ("in", "notin") and not isinstance(value, list)):
                raise invalid_args(f"select_filters: {op} is not a valid op for {name}")
    cols = _json(params.get("select_cols"), "select_cols", None)
    if cols is not None and not (isinstance(cols, list) and all(isinstance(c, str) for c in cols)):
        raise invalid_args("select_cols must be a list of names")
    try:
        limit = int(params.get("limit") or MAX_PAGE)
    except ValueError:
        raise invalid_args("limit must be a whole number") from None
    token = params.get("after_token")
    return PageQuery(
        filters=filters,
        order=_order(_json(params.get("order_by"), "order_by", [{"col": "id", "dir": "asc"}])),
        cols=None if cols is None or cols == ["*"] else tuple(cols),
        limit=max(1, min(limit, MAX_PAGE)),
        after=decode_token(token) if token else None,
    )


class _Key:
    """A sort key whose parts may descend and may be null (nulls first)."""

    def __init__(self, values: Sequence[Any], descending: Sequence[bool]) -> None:
        self.values = values
        self.descending = descending

    def __lt__(self, other: _Key) -> bool:
        for mine, theirs, down in zip(self.values, other.values, self.descending, strict=True):
            if mine == theirs:
                continue
            if mine is None or theirs is None:
                less = mine is None
            else:
                try:
                    less = bool(mine < theirs)
                except TypeError:
                    raise invalid_args("after_token does not fit order_by") from None
            return less != down
        return False


def page(rows: Sequence[Mapping[str, Any]], query: PageQuery) -> dict[str, Any]:
    """The answer's body for one page."""
    found = [
        row for row in rows
        if all(holds(row[name], op, value, name) for name, ops in query.filters.items() for op, value in ops.items())
    ]  # fmt: skip
    names = [name for name, _ in query.order]
    descending = [down for _, down in query.order]
    keyed = sorted(((_Key([row[n] for n in names], descending), row) for row in found), key=lambda pair: pair[0])
    if query.after is not None:
        if len(query.after) != len(names):
            raise invalid_args("after_token does not fit order_by")
        last = _Key(query.after, descending)
        keyed = [pair for pair in keyed if last < pair[0]]
    shown = keyed[: query.limit]
    more = len(keyed) > len(shown)
    return {
        "success": True,
        "instances_found": len(found),
        "total_instances": len(found),
        "label_counts": dict(Counter(str(row["label"] or "") for row in found)),
        "next_token": encode_token(shown[-1][0].values) if more and shown else None,
        "instances": [dict(row) if query.cols is None else {c: row.get(c) for c in query.cols} for _, row in shown],
    }
