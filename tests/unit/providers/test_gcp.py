"""Google Cloud's adapter: what is sent, what refusals mean, how rows are read, and the list of prices."""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import providers.gcp
from providers import base
from providers.base import Billing, OfferQuery, Phase, RentSpec
from providers.gcp import ComputeCallError, Gcp, Shape
from providers.gcp.errors import classify
from providers.gcp.parse import PHASES, instance
from providers.gcp.payload import google_label, insert_body, instance_name, request_id, script
from providers.gcp.table import parse_table, read_table
from tests.integration.providers.emulators.gcp import Cloud, FakeCompute

SHAPE = Shape("projects/p/global/images/family/f", max_run_s=7200)
SPEC = RentSpec("echo2:Fleet:lease_1:1", "img", "echo hi", {"ECHO2_JOIN_TOKEN": "it's"}, 40.2, (7070,))
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


async def no_sleep(seconds: float) -> None:
    return None


def adapter(cloud: Cloud, **more: Any) -> Gcp:
    return Gcp(FakeCompute(cloud), SHAPE, clock=lambda: NOW, sleep=no_sleep, **more)


async def an_offer(gcp: Gcp) -> base.Offer:
    return (await gcp.search(OfferQuery(Billing.SPOT_MARKET, gpu_names=("L4",))))[0]


async def test_every_machine_is_a_spot_vm_that_ends_itself() -> None:
    offer = await an_offer(adapter(Cloud()))
    body = insert_body(offer, SPEC, SHAPE)
    assert body["scheduling"] == {
        "provisioningModel": "SPOT", "instanceTerminationAction": "DELETE", "onHostMaintenance": "TERMINATE",
        "automaticRestart": False, "maxRunDuration": {"seconds": "7200"},
    }  # fmt: skip
    assert body["disks"][0]["autoDelete"] is True
    assert body["disks"][0]["initializeParams"]["diskSizeGb"] == "41"
    assert body["machineType"] == f"zones/{offer.region}/machineTypes/g2-standard-8"
    assert "serviceAccounts" not in body
    assert offer.max_duration_s == 7200


@pytest.mark.parametrize("label", ["echo2:Fleet:lease_1:1", "echo2:ü:l:1", "e" * 256, "A B"])
def test_the_exact_label_is_kept_where_googles_letters_do_not_allow_it(label: str) -> None:
    offer = base.Offer(
        "gcp", "us-central1-a/g2-standard-8", "m", "L4", 1, 1, Billing.SPOT_MARKET, 1, 1, 1, 0, 0, 0, 1, "", None, 0, 9,
        NOW,
    )  # fmt: skip
    body = insert_body(offer, replace(SPEC, label=label), SHAPE)
    assert re.fullmatch(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?", body["name"])
    assert all(re.fullmatch(r"[a-z0-9_-]{0,63}", value) for value in body["labels"].values())
    row = {**body, "zone": "https://x/zones/us-central1-a", "status": "RUNNING"}
    assert instance(row, read_table(), "gcp").label == label


def test_an_intent_has_one_name_and_one_request_id() -> None:
    assert instance_name("a") == instance_name("a") != instance_name("b")
    assert request_id("a", "insert") == request_id("a", "insert") != request_id("b", "insert")
    assert uuid.UUID(request_id("a", "insert")).int != 0
    assert google_label("Echo2:F:1") == "echo2-f-1"


def test_the_startup_script_exports_the_environment_and_runs_onstart(tmp_path: Path) -> None:
    (tmp_path / "curl").write_text("#!/bin/sh\necho 203.0.113.9\n")
    (tmp_path / "curl").chmod(0o755)
    onstart = 'echo "$ECHO2_NOTICES $ECHO2_JOIN_TOKEN $PUBLIC_IPADDR:$VAST_TCP_PORT_7070 $PWD"'
    text = script(replace(SPEC, onstart=onstart))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=10, check=True)
    assert done.stdout == f"gce it's 203.0.113.9:7070 {tmp_path}\n"


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, bid_micros_h=1), replace(SPEC, label=""), replace(SPEC, label="x" * 257),
        replace(SPEC, disk_gb=9.0), replace(SPEC, env={"A-B": "x"}), replace(SPEC, ports=(70_000,)),
        replace(SPEC, onstart="x" * 200_001),
    ],
)  # fmt: skip
async def test_an_order_that_google_would_misread_is_not_sent(spec: RentSpec) -> None:
    cloud = Cloud()
    gcp = adapter(cloud)
    with pytest.raises(base.BadRequest):
        await gcp.rent(await an_offer(gcp), spec)
    assert cloud.calls == []


@pytest.mark.parametrize("billing", [Billing.ON_DEMAND, Billing.SPOT_BID])
async def test_only_spot_at_the_markets_price(billing: Billing) -> None:
    cloud = Cloud()
    gcp = adapter(cloud)
    with pytest.raises(base.CapabilityError, match="spot_market"):
        await gcp.search(OfferQuery(billing))
    with pytest.raises(base.CapabilityError):
        await gcp.rent(replace(await an_offer(gcp), billing=billing), SPEC)
    assert cloud.calls == []


FULL = "The zone 'z' does not have enough resources available to fulfill the request."
QUOTA = "Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded.  Limit: 0.0 in region us-central1."


@pytest.mark.parametrize(
    ("status", "reason", "message", "kind"),
    [
        (400, "ZONE_RESOURCE_POOL_EXHAUSTED", FULL, base.NoCapacity),
        (400, "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "x", base.NoCapacity),
        (503, "", FULL, base.NoCapacity),
        (403, "quotaExceeded", QUOTA, base.QuotaError), (400, "QUOTA_EXCEEDED", QUOTA, base.QuotaError),
        (403, "", QUOTA, base.QuotaError),
        (403, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries'", base.RateLimited),
        (429, "", "slow", base.RateLimited),
        (401, "authError", "bad", base.AuthError), (403, "forbidden", "Required 'compute.x'", base.AuthError),
        (403, "accessNotConfigured", "API has not been used", base.AuthError),
        (403, "forbidden", "This API method requires billing to be enabled.", base.CreditError),
        (403, "BILLING_DISABLED", "x", base.CreditError),
        (404, "notFound", "The resource 'projects/p/zones/z/instances/echo2-a' was not found", base.InstanceNotFound),
        (404, "notFound", "The resource 'projects/p' was not found", base.MalformedAnswer),
        (404, "notFound", "The resource 'projects/p/zones/z/instances/echo2-ab' was not found", base.MalformedAnswer),
        (400, "invalid", "Invalid value", base.BadRequest), (409, "alreadyExists", "x", base.BadRequest),
        (400, "resourceNotReady", "x", base.Transient), (503, "backendError", "x", base.Transient),
        (None, "", "ConnectionError", base.Transient), (500, "", "<html>", base.Transient),
        (302, "", "moved", base.MalformedAnswer),
    ],
)  # fmt: skip
def test_refusals_are_told_apart(status: int | None, reason: str, message: str, kind: type[Exception]) -> None:
    assert type(classify("show", status, reason, message, name="echo2-a")) is kind


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (ComputeCallError(QUOTA, status=403, reason="quotaExceeded"), "refused"),
        (ComputeCallError("bad field", status=400, reason="invalid"), "refused"),
        (ComputeCallError("slow", status=429), "refused"),
        (ComputeCallError("ConnectTimeout", status=None, sent=False), "refused"),
        (ComputeCallError("ReadTimeout", status=None), "unknown"),
        (ComputeCallError("late", status=408), "unknown"),
        (ComputeCallError("boom", status=500), "unknown"),
    ],
)
async def test_what_a_failed_insert_proves(failure: ComputeCallError, outcome: str) -> None:
    cloud = Cloud(failures={"insert": [failure]})
    gcp = adapter(cloud)
    result = await gcp.rent(await an_offer(gcp), SPEC)
    assert (result.outcome, result.instance_id) == (outcome, None)
    assert len(cloud.inserts) == 1


async def test_the_outcome_is_waited_for_but_the_id_is_never_lost() -> None:
    cloud = Cloud(pending_polls=3)
    gcp = adapter(cloud)
    offer = await an_offer(gcp)
    assert (await gcp.rent(offer, SPEC)).outcome == "created"
    assert cloud.calls.count("operation") == 3
    cloud.pending_polls, cloud.stockouts = 3, [("ZONE_RESOURCE_POOL_EXHAUSTED", FULL)]
    late = await gcp.rent(offer, replace(SPEC, label="b"))
    assert (late.outcome, late.doomed_id) == ("refused", None)
    assert isinstance(late.error, base.NoCapacity)
    cloud.pending_polls = 100
    slow = await gcp.rent(offer, replace(SPEC, label="c"))
    assert (slow.outcome, slow.instance_id) == ("created", f"{offer.region}/{instance_name('c')}")
    cloud.failures["operation"] = [ComputeCallError("boom", status=500)]
    blind = await gcp.rent(offer, replace(SPEC, label="d"))
    assert (blind.outcome, blind.instance_id) == ("created", f"{offer.region}/{instance_name('d')}")


async def test_an_operation_that_failed_in_another_way_is_cleaned_up() -> None:
    cloud = Cloud(stockouts=[("SOMETHING_ELSE", "half made")])
    gcp = adapter(cloud)
    offer = await an_offer(gcp)
    result = await gcp.rent(offer, SPEC)
    assert (result.outcome, result.doomed_id) == ("refused", f"{offer.region}/{instance_name(SPEC.label)}")


async def test_a_name_that_is_taken_is_ours_only_if_it_says_so() -> None:
    cloud = Cloud()
    gcp = adapter(cloud)
    offer = await an_offer(gcp)
    await gcp.rent(offer, SPEC)
    cloud.done.clear()
    assert (await gcp.rent(offer, SPEC)).outcome == "created"
    assert len(cloud.instances) == 1
    row = next(iter(cloud.instances.values()))
    row["metadata"] = {"items": [{"key": "echo2-label", "value": "other"}]}
    cloud.done.clear()
    assert (await gcp.rent(offer, SPEC)).outcome == "refused"


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ("PROVISIONING", Phase.PENDING), ("STAGING", Phase.LOADING), ("RUNNING", Phase.RUNNING),
        ("STOPPING", Phase.TERMINATING), ("TERMINATED", Phase.PAUSED), ("SUSPENDED", Phase.PAUSED),
        ("REPAIRING", Phase.UNKNOWN), ("NEWSTATE", Phase.UNKNOWN),
    ],
)  # fmt: skip
def test_phases_and_a_rate_that_nobody_tells(status: str, phase: Phase) -> None:
    row = {"name": "a", "zone": "x/zones/us-east1-b", "status": status, "machineType": "x/a2-highgpu-1g"}
    found = instance(row, read_table(), "gcp")
    assert (found.phase, found.compute_micros_h, found.gpu_name) == (phase, None, "A100 SXM4")
    assert (found.instance_id, found.label, found.billing) == ("us-east1-b/a", "", None)
    assert "TERMINATED" in PHASES


async def test_a_list_has_all_pages_and_says_when_a_zone_was_not_asked() -> None:
    cloud = Cloud()
    gcp = adapter(cloud)
    offer = await an_offer(gcp)
    for at in range(5):
        await gcp.rent(offer, replace(SPEC, label=f"l{at}"))
    listing = await gcp.list()
    assert listing.complete
    assert {i.label for i in listing.instances} == {f"l{at}" for at in range(5)}
    assert cloud.calls.count("list") == 3
    cloud.holes = ["zones/us-east1-b"]
    assert not (await gcp.list()).complete


async def test_an_id_that_is_no_place_is_not_sent() -> None:
    cloud = Cloud()
    gcp = adapter(cloud)
    for wrong in ("web-1", "us-east1-b/", "us-east1-b/../x", "us-east1-b/A"):
        with pytest.raises(base.BadRequest):
            await gcp.release(wrong)
    assert cloud.calls == []


async def test_the_listed_prices_are_dated_and_old_ones_are_named(caplog: pytest.LogCaptureFixture) -> None:
    gcp = adapter(Cloud())
    assert "2025-03-06" in caplog.text
    offers = await gcp.search(OfferQuery(Billing.SPOT_MARKET))
    assert [o.compute_micros_h for o in offers] == sorted(o.compute_micros_h for o in offers)
    l4 = next(o for o in offers if o.offer_id == "us-central1-a/g2-standard-8")
    assert (l4.compute_micros_h, l4.upload_micros_gb, l4.download_micros_gb) == (336_764, 120_000, 0)
    assert all(o.raw_status.startswith("listed price of 20") for o in offers)
    assert {
        o.region for o in await adapter(Cloud(), zones=("us-east1-b",)).search(OfferQuery(Billing.SPOT_MARKET))
    } == {"us-east1-b"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("spot_usd_h = 0.336764", "spot_usd_h = 0"), ("spot_usd_h = 0.336764", 'spot_usd_h = "1"'),
        ("as_of = 2025-03-06", "as_of = 7"), ("num_gpus = 1", "num_gpus = 0"), ("[common]", "[other]"),
        ('zones = ["a", "b", "c"]', 'zones = ["a", "a"]'), ("[common]", "[common"),
    ],
)  # fmt: skip
def test_a_list_of_prices_that_can_t_be_is_refused(old: str, new: str) -> None:
    text = (Path(providers.gcp.__file__).parent / "prices.toml").read_text()
    assert old in text
    with pytest.raises(base.BadRequest):
        parse_table(text.replace(old, new, 1))
