"""Jobs that can't be: they end with a reason, before a machine is rented."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.e2e.stage import Stage, small_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_jobs_that_can_not_be_end_with_a_reason_and_rent_nothing(stage: Stage) -> None:
    creates = stage.asked()["calls"].get("create", 0)
    poor = stage.submit(name="poor", budget_usd="0.000100")
    unknown = stage.submit(name="unknown", model="nobody/nothing")
    job = stage.ended(poor)
    assert job["status"] == "failed"
    assert job["status_reason"].startswith("the budget can't pay a node: $0.000100 is left, and ")
    assert job["status_reason"].endswith(" to start, work and be given back")
    assert job["cost"]["spent_usd"] == "0.000000"
    job = stage.ended(unknown)
    assert job["status"] == "failed"
    assert "nobody/nothing" in job["status_reason"]
    assert stage.asked()["calls"].get("create", 0) == creates
    assert stage.rows("SELECT id FROM leases WHERE job_id IN (?, ?)", poor, unknown) == []


def test_what_is_wrong_with_a_posted_job_is_pointed_at(stage: Stage) -> None:
    spec = small_job(model="./no/such/folder", colour="blue")
    answer = stage.http.post("/v1/jobs", json=spec)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert [e["pointer"] for e in answer.json()["errors"]] == ["/colour"]
    answer = stage.http.post("/v1/jobs", json=small_job(model="./no/such/folder"))
    assert answer.status_code == 422
    assert [e["pointer"] for e in answer.json()["errors"]] == ["/model"]


@pytest.mark.parametrize("key", ["", "Bearer ek_not-one-of-ours", "Basic YWRtaW46YWRtaW4="])
def test_without_a_key_nothing_is_shown(stage: Stage, key: str) -> None:
    headers = {"Authorization": key} if key else {}
    for path in ("/v1/jobs", "/v1/fleet", "/v1/cost", "/v1/offers"):
        answer = httpx.get(stage.control_url + path, headers=headers, timeout=10.0, trust_env=False)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["status"] == 401


def test_a_webhook_that_can_not_be_trusted_is_refused(stage: Stage) -> None:
    message = {
        "provider": "marketplace",
        "selector": {},
        "price_per_hour": "0.41",
        "effective_at": "2026-12-01T10:00:00Z",
    }
    before = stage.rows("SELECT count(*) AS n FROM spot_prices")
    assert stage.hook(message, webhook_signature="v1," + "A" * 43 + "=").status_code == 401
    assert stage.hook(message, webhook_signature="").status_code == 400
    assert stage.hook(message, at=f"{time.time() - 600:.0f}").status_code == 400
    assert stage.hook({**message, "price_per_hour": "free"}).status_code == 422
    assert stage.hook({**message, "padding": "x" * (300 << 10)}).status_code == 413
    assert stage.rows("SELECT count(*) AS n FROM spot_prices") == before


def test_a_body_that_is_too_large_is_refused(stage: Stage) -> None:
    answer = stage.http.post("/v1/jobs", content=b" " * (2 << 20), headers={"content-type": "application/json"})
    assert answer.status_code == 413
