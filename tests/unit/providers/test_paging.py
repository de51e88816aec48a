"""Walking the pages of the instance list."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from providers.marketplace.paging import page, parse_page
from providers.marketplace.refusals import Refused


def row(number: int, label: str | None = "x", status: str | None = "running") -> dict[str, Any]:
    return {
        "id": number,
        "label": label,
        "actual_status": status,
        "gpu_name": "RTX 4090",
        "verification": "verified",
        "start_date": float(number % 3),
        "machine_id": number,
    }


def walk(rows: list[dict[str, Any]], **params: str) -> list[list[int]]:
    pages, token = [], None
    while True:
        answer = page(rows, parse_page({**params, **({"after_token": token} if token else {})}))
        pages.append([r["id"] for r in answer["instances"]])
        token = answer["next_token"]
        if token is None:
            return pages


@given(st.sets(st.integers(1, 400), max_size=120), st.integers(1, 40), st.sampled_from(["asc", "desc"]))
def test_every_row_comes_once_in_order(ids: set[int], limit: int, way: str) -> None:
    order = json.dumps([{"col": "start_date", "dir": way}])
    pages = walk([row(i) for i in ids], limit=str(limit), order_by=order)
    flat = [i for p in pages for i in p]
    sign = 1 if way == "asc" else -1
    assert flat == sorted(ids, key=lambda i: (sign * (i % 3), i))
    assert all(len(p) <= min(limit, 25) for p in pages)


def test_rows_added_and_removed_between_pages_do_not_shift_the_rest() -> None:
    rows = [row(i) for i in range(10, 20)]
    first = page(rows, parse_page({"limit": "5"}))
    changed = [r for r in rows if r["id"] != 12] + [row(5)]
    rest = page(changed, parse_page({"limit": "5", "after_token": first["next_token"]}))
    assert [r["id"] for r in rest["instances"]] == [15, 16, 17, 18, 19]


def test_filters_columns_and_counts() -> None:
    rows = [row(1, "a"), row(2, "b"), row(3, "a", "loading"), row(4, None, None)]
    params = {"select_filters": '{"label": {"in": ["a"]}}', "select_cols": '["id", "label"]'}
    answer = page(rows, parse_page(params))
    assert answer["instances"] == [{"id": 1, "label": "a"}, {"id": 3, "label": "a"}]
    assert (answer["instances_found"], answer["label_counts"]) == (2, {"a": 2})
    assert page(rows, parse_page({}))["label_counts"] == {"a": 2, "b": 1, "": 1}


@pytest.mark.parametrize(
    "params",
    [
        {"select_filters": '{"dph_total": {"gt": 1}}'},
        {"select_filters": "{"},
        {"select_filters": '{"label": "x"}'},
        {"order_by": '[{"col": "dph_total"}]'},
        {"after_token": "!!"},
        {"limit": "many"},
    ],
)
def test_a_wrong_query_is_a_400(params: dict[str, str]) -> None:
    with pytest.raises(Refused) as caught:
        parse_page(params)
    assert caught.value.status == 400
