"""What a careful user gets wrong, or asks twice: what the answer is, and that it says what to change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from sqlalchemy import delete

from app.protocol.errors import Unavailable
from app.storage.models import IdempotencyRecord, Job
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


async def test_a_request_that_takes_long_is_not_done_twice_at_a_time(
    control: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, create = asyncio.Semaphore(0), asyncio.Event(), control.svc.jobs.create
    times = 0

    async def slow(*args: Any) -> Job:
        nonlocal times
        times += 1
        begun.release()
        await go_on.wait()
        return await create(*args)

    async def post(**changes: Any) -> httpx.Response:
        return await control.http.post("/v1/jobs", json=job_body(**changes), headers={"Idempotency-Key": "k"})

    monkeypatch.setattr(control.svc.jobs, "create", slow)
    first = asyncio.create_task(post())
    await asyncio.wait_for(begun.acquire(), 10)
    # A task may take minutes to load.
    control.clock.advance(300)
    assert (await post(name="another")).status_code == 409
    second = asyncio.create_task(post())
    done, _ = await asyncio.wait({first, second}, timeout=0.3)
    assert (done, times) == (set(), 1)
    monkeypatch.setattr("app.api.idempotency.WAIT_S", 0.05)
    patient = await post()
    assert (patient.status_code, patient.json()["detail"]) == (
        409, "a request with this Idempotency-Key is being worked on; try again",
    )  # fmt: skip
    go_on.set()
    answers = [await first, await second]
    assert ([a.status_code for a in answers], answers[0].text) == ([201, 201], answers[1].text)
    assert times == 1
    assert control.svc.answering == {}


async def test_a_request_that_fails_lets_the_next_one_with_its_key_try(
    control: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, create = 0, asyncio.Event(), control.svc.jobs.create

    async def fails_first(*args: Any) -> Job:
        nonlocal begun
        begun += 1
        if begun == 1:
            await go_on.wait()
            raise Unavailable("try again in a minute")
        return await create(*args)

    monkeypatch.setattr(control.svc.jobs, "create", fails_first)
    post = partial(control.http.post, "/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k"})
    first = asyncio.create_task(post())
    second = asyncio.create_task(post())
    await asyncio.wait({first, second}, timeout=0.2)
    go_on.set()
    assert sorted([(await first).status_code, (await second).status_code]) == [201, 503]
    assert (await post()).status_code == 201
    assert len((await control.get("/v1/jobs"))["items"]) == 1


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


async def test_a_table_tells_how_to_go_on_when_there_is_more(control: World) -> None:
    made = [await control.create() for _ in range(3)]
    seen: list[str] = []
    path: str | None = "/v1/jobs?format=text&limit=2"
    while path is not None:
        answer = (await control.http.get(path)).text
        seen += [job_id for job_id in made if job_id in answer]
        *_, last = answer.splitlines()
        path = f"/v1/jobs?format=text&limit=2&{last.removeprefix('more: ')}" if last.startswith("more: ") else None
    assert sorted(seen) == sorted(made)
    await control.http.patch(f"/v1/jobs/{made[0]}", json={"budget_usd": "60"})
    for path in (f"/v1/jobs/{made[0]}/events", "/v1/offers"):
        assert "\nmore: cursor=" in (await control.http.get(f"{path}?format=text&limit=1")).text
        assert "more:" not in (await control.http.get(f"{path}?format=text")).text


async def test_a_header_that_looks_like_a_number_is_none(control: World) -> None:
    job_id = await control.create()
    headers = {b"last-event-id": "²".encode("latin-1"), b"accept": b"text/event-stream"}
    answer = await control.http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/Last-Event-ID")
    token = control.svc.core.secrets.learner_token(job_id)
    headers = {b"authorization": f"Bearer {token}".encode(), b"echo2-epoch": "²".encode("latin-1")}
    answer = await control.http.post(f"/v1/jobs/{job_id}/learner/heartbeat", json={}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_request")


async def test_a_database_that_hangs_is_not_ready(control: World, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def hangs() -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(control.svc.core.db, "connection", hangs)
    monkeypatch.setattr("app.api.health.ANSWER_S", 0.05)
    answer = await asyncio.wait_for(control.http.get("/readyz"), 10)
    assert (answer.status_code, answer.json()["trouble"]) == (503, {"database": "TimeoutError"})


async def test_what_is_no_text_is_pointed_at_without_falling_over_it(control: World) -> None:
    for body in (
        b'{"\\ud800": 1}',
        b'{"model": "\\ud800"}',
        b'{"task": {"name": "x", "params": {"\\ud800": "\\ud800"}}}',
    ):
        answer = await control.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), body


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
