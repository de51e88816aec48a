"""The marketplace reads vast.ai's search grammar as the official client sends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from providers.marketplace.config import DEFAULT_MACHINES, load_machines
from providers.marketplace.grammar import parse_query, run_query
from providers.marketplace.refusals import Refused
from providers.marketplace.views import Machine, offer_row

SPECS = load_machines(DEFAULT_MACHINES)


def rows(kind: str = "ondemand", storage: float = 10.0) -> list[dict[str, Any]]:
    return [offer_row(Machine(s, s.dph_base, s.min_bid, i), kind, storage, 0) for i, s in enumerate(SPECS, 1)]


def search(body: dict[str, Any]) -> list[dict[str, Any]]:
    query = parse_query({"limit": 100, **body})
    return run_query(rows(query.kind, query.storage_gb), query)


@pytest.mark.parametrize(
    ("filters", "keep"),
    [
        ({"gpu_name": {"eq": "RTX 4090"}}, lambda r: r["gpu_name"] == "RTX 4090"),
        ({"gpu_name": {"in": ["RTX 4090", "RTX 5090"]}}, lambda r: r["gpu_name"] in ("RTX 4090", "RTX 5090")),
        ({"gpu_name": {"notin": ["RTX 3090"]}}, lambda r: r["gpu_name"] != "RTX 3090"),
        ({"gpu_name": {"neq": "L40S"}}, lambda r: r["gpu_name"] != "L40S"),
        ({"reliability": {"gt": "0.99"}}, lambda r: r["reliability"] > 0.99),
        ({"reliability2": {"gte": 0.99}}, lambda r: r["reliability"] >= 0.99),
        ({"inet_down": {"lt": "900"}}, lambda r: r["inet_down"] < 900),
        ({"gpu_ram": {"gte": 23000.0, "lte": "33000"}}, lambda r: 23000 <= r["gpu_ram"] <= 33000),
        ({"geolocation": {"in": ["SE", "NO"]}}, lambda r: r["geolocation"] in ("Sweden, SE", "Norway, NO")),
        ({"geolocation": {"notin": ["BR"]}}, lambda r: not r["geolocation"].endswith("BR")),
        ({"datacenter": {"eq": True}}, lambda r: r["hosting_type"] == 1),
        ({"verified": {"eq": "true"}, "external": {"eq": False}, "rentable": {"eq": True}}, lambda r: True),
        ({"verified": {"eq": False}}, lambda r: False),
        ({"duration": {"gt": 86400.0 * 61}}, lambda r: False),
    ],
)
def test_each_operator_keeps_what_it_says(filters: dict[str, Any], keep: Any) -> None:
    expected = {r["machine_id"] for r in rows() if keep(r)}
    assert {r["machine_id"] for r in search(filters)} == expected


def test_twenty_four_and_eighty_gigabytes_are_decimal() -> None:
    """The client sends 24 GB as 24000: a card of 24564 MB and one of 81559 for 80 must be found."""
    assert "RTX 4090" in {r["gpu_name"] for r in search({"gpu_ram": {"gte": 24000.0}})}
    assert "H100 SXM" in {r["gpu_name"] for r in search({"gpu_ram": {"gte": 80000.0}})}


def test_order_and_limit() -> None:
    found = search({"order": [["gpu_name", "asc"], ["dph_total", "desc"]], "limit": 4})
    assert [r["gpu_name"] for r in found] == ["A100 SXM4", "H100 SXM", "L40S", "RTX 3090"]
    assert found[3]["dph_base"] == 0.15


@pytest.mark.parametrize(("sent", "bid"), [("on-demand", False), ("ondemand", False), ("bid", True), (None, False)])
def test_type_decides_the_price_shown(sent: str | None, bid: bool) -> None:
    row = search({"type": sent, "gpu_name": {"eq": "L40S"}, "allocated_storage": 36.0})[0]
    assert row["is_bid"] is bid
    assert row["dph_total"] == pytest.approx((0.38 if bid else 0.62) + 36 * 0.2 / 720)


@pytest.mark.parametrize(
    "body",
    [
        {"gpu_name": {"like": "RTX"}},
        {"gpu_name": {"in": "RTX 4090"}},
        {"gpu_name": "RTX 4090"},
        {"num_gpus": {"gte": "two"}},
        {"no_such_column": {"eq": 1}},
        {"type": "cheap"},
        {"limit": 0},
        {"limit": "nan"},
        {"order": "dph_total"},
        {"order": [["dph_total", "up"]]},
        {"order": [["no_such_column", "asc"]]},
    ],
)
def test_what_can_not_be_understood_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        search(body)
    assert (caught.value.status, caught.value.body["error"]) == (400, "invalid_request")


def test_a_bad_op_is_named() -> None:
    with pytest.raises(Refused, match="like is not a valid search op"):
        search({"gpu_name": {"like": "RTX"}})


def test_price_list_has_spread_for_each_cheap_card() -> None:
    assert len(SPECS) >= 12
    for name in ("RTX 3090", "RTX 4090", "RTX 5090"):
        prices = {s.dph_base for s in SPECS if s.gpu_name == name}
        assert len(prices) >= 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('dph_base = "0.1234567"', "six decimals"),
        ('dph_base = "cheap"', "dph_base"),
        ("reliability = 1.5", "reliability"),
        ("inet_up = 0", "inet_up"),
        ("colour = 3", "colour"),
    ],
)
def test_a_wrong_price_list_is_refused_by_name(tmp_path: Path, change: str, words: str) -> None:
    text = DEFAULT_MACHINES.read_text().split("[[machine]]")[1]
    name = change.split(" =")[0]
    lines = [line for line in text.splitlines() if not line.startswith(f"{name} ")]
    path = tmp_path / "m.toml"
    path.write_text("\n".join(["[[machine]]", *lines, change]))
    with pytest.raises(ValueError, match=words):
        load_machines(path)
