"""Our requests against those that the official client 1.9.1 was seen to send."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from providers.base import BadRequest, Billing, CapabilityError, Offer, OfferQuery, RentSpec
from providers.marketplace.grammar import parse_query
from providers.marketplace.orders import parse_order
from providers.marketplace.refusals import Refused
from providers.vastai.parse import disk_micros_h
from providers.vastai.payload import create_body, search_body

CLI_CREATE: dict[str, Any] = json.loads("""
{"client_id":"me","image":"vllm/vllm-openai:v0.11","env":{"HF_HOME":"/w/hf","-p 8000:8000":"1"},"price":0.33,
 "disk":60.0,
 "label":"L","extra":null,"onstart":"echo hi","image_login":null,"python_utf8":false,"lang_utf8":false,
 "use_jupyter_lab":false,"jupyter_dir":null,"force":false,"cancel_unavail":true,"template_hash_id":null,"user":null,
 "runtype":"ssh_direc ssh_proxy"}""")
CLI_SEARCH: dict[str, Any] = json.loads("""
{"verified":{"eq":true},"external":{"eq":false},"rentable":{"eq":true},"gpu_name":{"eq":"RTX 4090"},
 "num_gpus":{"gte":"1"},"reliability":{"gt":"0.98"},"dph_total":{"lte":"1.2"},"inet_down":{"gte":"500"},
 "duration":{"gt":259200.0},"cuda_max_good":{"gte":"12.4"},"gpu_ram":{"gte":23000.0},
 "geolocation":{"notin":["CN","VN"]},"disk_space":{"gte":"60"},
 "order":[["dlperf_per_dphtotal","desc"],["dph_total","asc"]],"type":"on-demand","limit":5,"allocated_storage":60.0}""")

OFFER = Offer(
    provider="vastai",
    offer_id="7000001",
    machine_id="4242",
    gpu_name="RTX 4090",
    num_gpus=1,
    gpu_ram_mb=24564,
    billing=Billing.SPOT_BID,
    compute_micros_h=310_000,
    disk_micros_gb_month=149_333,
    upload_micros_gb=20_000,
    download_micros_gb=10_000,
    up_mbps=800.5,
    down_mbps=950.2,
    reliability=0.99,
    region="Sweden, SE",
    max_duration_s=None,
    dlperf=100.0,
    ports=100,
    fetched_at=datetime(2026, 1, 1, tzinfo=UTC),
)
FIXED = replace(OFFER, billing=Billing.ON_DEMAND)
SPEC = RentSpec("L", "vllm/vllm-openai:v0.11", "echo hi", {"HF_HOME": "/w/hf"}, 60.0, (8000,), 330_000)


def test_create_says_what_the_official_client_says() -> None:
    ours = create_body(OFFER, SPEC)
    assert ours == {
        "client_id": "me",
        "image": "vllm/vllm-openai:v0.11",
        "disk": 60.0,
        "label": "L",
        "env": {"HF_HOME": "/w/hf", "-p 8000:8000": "1"},
        "onstart": "echo hi",
        "runtype": "ssh_direct",
        "cancel_unavail": True,
        "target_state": "running",
        "price": 0.33,
    }
    for name in set(ours) - {"runtype", "target_state"}:
        assert ours[name] == CLI_CREATE[name]
        assert type(ours[name]) is type(CLI_CREATE[name])
    assert parse_order(ours) == parse_order(CLI_CREATE)


def test_on_demand_has_no_price_at_all() -> None:
    ours = create_body(FIXED, replace(SPEC, bid_micros_h=None))
    assert "price" not in ours
    assert None not in ours.values()


def test_a_bid_is_for_the_whole_instance() -> None:
    ours = create_body(replace(OFFER, num_gpus=4), replace(SPEC, bid_micros_h=4_000_000))
    assert ours["price"] == 4.0


@pytest.mark.parametrize(
    ("offer", "spec", "words"),
    [
        (OFFER, replace(SPEC, bid_micros_h=None), "set bid_micros_h"),
        (FIXED, SPEC, "leave bid_micros_h out"),
        (OFFER, replace(SPEC, bid_micros_h=999), "change the bid"),
        (OFFER, replace(SPEC, bid_micros_h=32_000_001), "change the bid"),
        (OFFER, replace(SPEC, label=""), "label"),
        (OFFER, replace(SPEC, label="x" * 257), "label"),
        (OFFER, replace(SPEC, onstart="x" * 4097), "onstart"),
        (OFFER, replace(SPEC, env={"A": "x" * 257}), "env A"),
        (OFFER, replace(SPEC, env={f"A{i}": "x" * 250 for i in range(140)}), "env in all"),
        (OFFER, replace(SPEC, ports=tuple(range(1, 66))), "ports"),
        (OFFER, replace(SPEC, disk_gb=7.0), "disk_gb"),
    ],
)
def test_what_vast_would_misread_is_never_sent(offer: Offer, spec: RentSpec, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        create_body(offer, spec)


def test_market_priced_spot_does_not_exist_here() -> None:
    with pytest.raises(CapabilityError):
        create_body(replace(OFFER, billing=Billing.SPOT_MARKET), SPEC)
    with pytest.raises(CapabilityError):
        search_body(OfferQuery(Billing.SPOT_MARKET), True)


def test_search_always_sends_a_limit_and_parses_at_the_marketplace() -> None:
    query = OfferQuery(Billing.SPOT_BID, ("RTX_4090",), 500_000, 0.95, 3600, 2, 60.0)
    ours = search_body(query, verified_only=True)
    assert ours["limit"] == 1000
    assert ours["gpu_name"] == {"in": ["RTX 4090"]}
    parsed, theirs = parse_query(ours), parse_query(CLI_SEARCH)
    assert (parsed.kind, parsed.storage_gb) == ("bid", 60.0)
    assert (theirs.kind, theirs.limit, theirs.storage_gb) == ("ondemand", 5, 60.0)


def test_disk_price_of_the_documented_example() -> None:
    assert disk_micros_h(OFFER, 10.0) == 2_074


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"env": "-e A=B"}, "invalid_args"),
        ({"env": {"-p 53:53/udp": "1"}}, "invalid_args"),
        ({"env": {"no good": "1"}}, "invalid_args"),
        ({"image": ""}, "invalid_args"),
        ({"disk": 1}, "invalid_args"),
        ({"price": 0.0001}, "invalid_price"),
        ({"price": "cheap"}, "invalid_price"),
        ({"onstart": "x" * 5000}, "invalid_args"),
        ({"label": "x" * 300}, "invalid_args"),
    ],
)
def test_the_marketplace_refuses_what_vast_refuses(change: dict[str, Any], error: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_order({**CLI_CREATE, **change})
    assert (caught.value.status, caught.value.body["error"]) == (400, error)
