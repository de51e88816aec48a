"""What a careful user gets wrong, or asks twice: what the answer is, and that it says what to change."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from sqlalchemy import delete

from app.storage.models import IdempotencyRecord
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import World, job_body


async def test_requests_with_one_key_at_once_all_get_the_one_answer(control: World) -> None:
    async def post() -> httpx.Response:
        return await control.http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k"})

    answers = await asyncio.gather(*(post() for _ in range(4)))
    assert [a.status_code for a in answers] == [201] * 4
    assert len({a.text for a in answers}) == 1
    assert len((await control.get("/v1/jobs"))["items"]) == 1


async def test_a_key_whose_answer_was_forgotten_still_makes_no_other_job(control: World) -> None:
    async def forget() -> None:
        async with control.svc.core.db.write() as session:
            await session.execute(delete(IdempotencyRecord))

    first = await control.http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k"})
    await forget()
    again = await control.http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
    await forget()
    other = await control.http.post("/v1/jobs", json=job_body(name="other"), headers={"Idempotency-Key": "k"})
    assert other.status_code == 409


async def test_resuming_twice_is_fine_when_the_job_runs_again_at_once(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    await learner.train(await node.produce(2))
    await control.round()
    assert (await control.http.post(f"/v1/jobs/{job_id}/pause")).status_code == 202
    for _ in range(2):
        assert (await control.http.post(f"/v1/jobs/{job_id}/resume")).status_code == 202
        await control.round()
    assert (await control.job(job_id))["status"] == "running"


async def test_offers_come_in_pages_that_together_are_the_whole_ranking(control: World) -> None:
    whole = (await control.get("/v1/offers"))["items"]
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await control.get("/v1/offers", limit=2, **({"cursor": cursor} if cursor else {}))
        assert 1 <= len(page["items"]) <= 2
        found += page["items"]
        cursor = page["next_cursor"]
    assert [o["offer_id"] for o in found] == [o["offer_id"] for o in whole]
    assert len(whole) > 2


async def test_a_fleet_without_jobs_has_the_same_fields(control: World) -> None:
    view = await control.get("/v1/fleet")
    assert view["nodes"] == []
    assert set(view["capacity"]) >= {"mu_min", "mu_target", "mu_pool", "feasible"}


async def test_keys_are_a_table_too(control: World) -> None:
    answer = await control.http.get("/v1/keys", headers={"Accept": "text/plain"})
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.split()[:4] == ["ID", "NAME", "ADMIN", "REVOKED"]


async def test_all_methods_of_a_path_are_told(control: World) -> None:
    answer = await control.http.put("/v1/jobs")
    assert answer.status_code == 405
    assert {m.strip() for m in answer.headers["allow"].split(",")} >= {"GET", "POST"}
    assert "GET" in answer.json()["detail"]
    job = await control.http.delete("/v1/jobs/job_x")
    assert "PATCH" in job.headers["allow"]


async def test_a_body_that_says_it_is_a_form_is_told_what_it_should_say(control: World) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = await control.http.post("/v1/jobs", content='{"model": "tiny"}', headers=headers)
    assert answer.status_code == 422
    assert "Content-Type: application/json" in answer.json()["detail"]


@BOTH
async def test_what_no_database_or_log_can_hold_is_refused(control: World) -> None:
    for name in ("a\0b", "two\nlines", "\x1b[31m"):
        answer = await control.http.post("/v1/jobs", json=job_body(name=name))
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/name")
        assert (await control.http.post("/v1/keys", json={"name": name})).status_code == 422
    for path in ("/v1/jobs/%00", "/v1/jobs/job%00/cost", "/v1/offers?job_id=%00"):
        assert (await control.http.get(path)).status_code == 400
    assert (await control.http.post("/v1/jobs", json=job_body(name="größe 名 🚀"))).status_code == 201
