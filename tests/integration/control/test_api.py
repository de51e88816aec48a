"""What users of the REST interface rely on: errors, idempotency, keys, pages, tables, streams."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import URL, Node_, World, job_body

TASK: dict[str, Any] = {"name": "reasoning_gym", "params": {"dataset": "spell_backward"}}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "/model"),
    ({"model": "../../etc"}, "/model"),
    ({"model": "/nowhere/at/all"}, "/model"),
    ({"budget_usd": "0"}, "/budget_usd"),
    ({"budget_usd": "-3"}, "/budget_usd"),
    ({"budget_usd": "NaN"}, "/budget_usd"),
    ({"budget_usd": "much"}, "/budget_usd"),
    ({"staleness_budget": 0}, "/staleness_budget"),
    ({"publish_period": 3}, "/publish_period"),
    ({"safety_factor": 0.5}, "/safety_factor"),
    ({"sampling": {"top_p": 0.9}}, "/sampling/top_p"),
    ({"batch": {"group_size": 1}}, "/batch/group_size"),
    ({"stop": {"steps": None}}, "/stop"),
    ({"fleet": {"providers": ["nowhere"]}}, "/fleet/providers/0"),
    ({"fleet": {"max_nodes": 0}}, "/fleet/max_nodes"),
    ({"task": {"name": "chess"}}, "/task/name"),
    ({"task": {"name": "reasoning_gym", "params": {"dataset": "spell_forward"}}}, "/task/params/dataset"),
    ({"task": {"name": "reasoning_gym", "params": {**TASK["params"], "colour": 1}}}, "/task/params/colour"),
    ({"notify_url": "ftp://example.org"}, "/notify_url"),
    ({"bugdet": 1}, "/bugdet"),
    ({"fleet": {"max_node": 1}}, "/fleet/max_node"),
]


async def test_bad_job_is_refused_with_a_pointer_and_rents_nothing(control: World, provider: FakeProvider) -> None:
    for change, pointer in BAD:
        answer = await control.http.post("/v1/jobs", json=job_body(**change))
        assert answer.status_code == 422, (change, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
        assert pointer in [e["pointer"] for e in answer.json()["errors"]], (change, answer.text)
    await control.round()
    assert (await control.get("/v1/jobs"))["items"] == []
    assert provider.creates.total() == 0


async def test_job_that_only_loading_shows_to_be_wrong_fails_before_anything_is_rented(
    control: World, provider: FakeProvider
) -> None:
    from tests.integration.control.rig import Learner

    job_id = await control.create()
    await control.round()
    learner = Learner(control, job_id)
    await learner.start()
    await learner.done("failed", "the model org/x has no tokenizer")
    await control.round(10)
    await control.round(10)
    job = await control.job(job_id)
    assert (job["status"], job["status_reason"]) == ("failed", "the model org/x has no tokenizer")
    assert await control.leases() == []
    assert provider.creates.total() == 0


async def test_learner_that_dies_again_and_again_fails_the_job_and_gives_everything_back(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    await learner.train(await node.produce(2))
    for _ in range(12):
        control.supervisor.running.clear()
        await control.rounds(3, 10, node)
    job = await control.job(job_id)
    assert job["status"] == "failed"
    assert "the learner ended" in job["status_reason"]
    assert len(control.supervisor.started) <= 6
    assert provider.live() == []


@BOTH
async def test_idempotency_key_makes_one_job_and_one_answer(control: World) -> None:
    headers = {"Idempotency-Key": "first"}
    first = await control.http.post("/v1/jobs", json=job_body(), headers=headers)
    await control.round()
    again = await control.http.post("/v1/jobs", json=job_body(), headers=headers)
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json()
    assert first.headers["location"] == again.headers["location"] == f"/v1/jobs/{first.json()['id']}"
    other = await control.http.post("/v1/jobs", json=job_body(seed=1), headers=headers)
    assert other.status_code == 409
    assert len((await control.get("/v1/jobs"))["items"]) == 1


@BOTH
async def test_same_key_at_the_same_time_makes_one_job(control: World) -> None:
    answers = await asyncio.gather(
        *(control.http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k"}) for _ in range(8))
    )
    assert {a.status_code for a in answers} <= {201, 409}
    assert len({a.json()["id"] for a in answers if a.status_code == 201}) == 1
    assert len((await control.get("/v1/jobs"))["items"]) == 1


async def test_key_of_a_refused_request_may_be_used_for_the_corrected_one(control: World) -> None:
    headers = {"Idempotency-Key": "k"}
    bad = job_body(fleet={"providers": ["nowhere"]})
    assert (await control.http.post("/v1/jobs", json=bad, headers=headers)).status_code == 422
    assert (await control.http.post("/v1/jobs", json=job_body(), headers=headers)).status_code == 201
    assert (await control.http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": ""})).status_code == 400


async def test_same_key_of_two_owners_makes_two_jobs(control: World) -> None:
    made = (await control.http.post("/v1/keys", json={"name": "second"})).json()
    mine = await control.http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k"})
    theirs = await control.http.post(
        "/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k", "Authorization": f"Bearer {made['key']}"}
    )
    assert mine.status_code == theirs.status_code == 201
    assert mine.json()["id"] != theirs.json()["id"]


@pytest.mark.parametrize("header", [None, "Bearer ek_wrong", "Basic abc", "Bearer "])
async def test_no_key_or_a_wrong_one_opens_nothing(control: World, header: str | None) -> None:
    del control.http.headers["authorization"]
    for path in ("/v1/jobs", "/v1/jobs/x", "/v1/fleet", "/v1/cost", "/v1/offers", "/v1/keys"):
        answer = await control.http.get(path, headers={"Authorization": header} if header is not None else {})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["content-type"] == "application/problem+json"


async def test_keys_are_shown_once_revoked_and_managed_by_admins_only(control: World) -> None:
    made = (await control.http.post("/v1/keys", json={"name": "ci"})).json()
    mine = {"Authorization": f"Bearer {made['key']}"}
    assert (await control.http.get("/v1/jobs", headers=mine)).status_code == 200
    assert (await control.http.post("/v1/keys", json={"name": "x"}, headers=mine)).status_code == 403
    assert made["key"] not in (await control.http.get("/v1/keys")).text
    assert (await control.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
    assert (await control.http.get("/v1/jobs", headers=mine)).status_code == 401
    assert (await control.http.delete("/v1/keys/key_none")).status_code == 404


async def test_node_tokens_open_their_own_node_and_nothing_else(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    body = {"state": "active", "policy_version": 0}
    mine = {"Authorization": f"Bearer {one.token}"}
    for call, content in (
        ("heartbeat", body),
        ("work", {"max_items": 1, "policy_version": 0, "wait_s": 0}),
        ("leave", {"reason": "x"}),
    ):
        answer = await control.http.post(f"/v1/nodes/{two.id}/{call}", json=content, headers=mine)
        assert answer.status_code == 403
    assert (await control.http.get("/v1/jobs", headers=mine)).status_code == 401
    assert (await control.http.get(f"/v1/jobs/{job_id}/cost", headers=mine)).status_code == 401
    assert (await control.http.post(f"/v1/nodes/{one.id}/heartbeat", json=body)).status_code == 401
    wrong = {"Authorization": "Bearer nt_wrong"}
    assert (await control.http.post(f"/v1/nodes/{one.id}/heartbeat", json=body, headers=wrong)).status_code == 401
    assert (await learner.post("heartbeat", {"step": 0, "state": "waiting"})).status_code == 200
    stolen = {**mine, "Echo2-Epoch": "1"}
    answer = await control.http.post(
        f"/v1/jobs/{job_id}/learner/heartbeat", json={"step": 0, "state": "waiting"}, headers=stolen
    )
    assert answer.status_code == 401
    assert one.token not in repr(await control.node_row(one.id)) + json.dumps(await control.get("/v1/fleet"))


async def test_join_token_works_once(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    await control.running(job_id)
    (rented,) = provider.live()
    again = Node_(control, rented.env["ECHO2_JOIN_TOKEN"])
    assert (await again.try_join()).status_code == 410
    assert (await Node_(control, "jt_wrong").try_join()).status_code == 401
    assert set(rented.env) == {"ECHO2_CONTROL_URL", "ECHO2_JOIN_TOKEN", "ECHO2_ENGINE"}


async def test_join_of_a_machine_that_was_given_back_is_gone(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    (rented,) = provider.live()
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await control.round(1)
    assert (await Node_(control, rented.env["ECHO2_JOIN_TOKEN"]).try_join()).status_code == 410


async def test_lists_come_in_pages(control: World) -> None:
    made = [await control.create(name=f"job {i}") for i in range(5)]
    seen: list[str] = []
    cursor = None
    sizes = []
    for _ in range(3):
        page = await control.get("/v1/jobs", limit=2, **({"cursor": cursor} if cursor else {}))
        seen += [j["id"] for j in page["items"]]
        sizes.append(len(page["items"]))
        cursor = page["next_cursor"]
    assert (sizes, cursor) == ([2, 2, 1], None)
    assert seen == made[::-1]
    assert (await control.http.get("/v1/jobs?cursor=zzz")).status_code == 422
    beyond = base64.urlsafe_b64encode(b"v1:" + b"9" * 40).decode()
    assert (await control.http.get("/v1/jobs", params={"cursor": beyond})).status_code == 422
    assert (await control.http.get("/v1/jobs?limit=0")).status_code == 422
    assert [j["id"] for j in (await control.get("/v1/jobs", status="pending"))["items"]] == made[::-1]
    assert (await control.get("/v1/jobs", status="failed"))["items"] == []


async def test_steps_and_events_come_in_pages(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    for _ in range(3):
        await learner.train(await node.produce(2))
    first = await control.get(f"/v1/jobs/{job_id}/steps", limit=2)
    second = await control.get(f"/v1/jobs/{job_id}/steps", limit=2, cursor=first["next_cursor"])
    assert [s["step"] for s in first["items"] + second["items"]] == [1, 2, 3]
    assert second["next_cursor"] is None
    events = await control.get(f"/v1/jobs/{job_id}/events", limit=3)
    more = await control.get(f"/v1/jobs/{job_id}/events", cursor=events["next_cursor"])
    ids = [e["id"] for e in events["items"] + more["items"]]
    assert ids == [e.id for e in await control.events(job_id)]


async def test_keys_come_in_pages(control: World) -> None:
    for name in ("a", "b", "c"):
        assert (await control.http.post("/v1/keys", json={"name": name})).status_code == 201
    whole = [k["id"] for k in (await control.get("/v1/keys"))["items"]]
    first = await control.get("/v1/keys", limit=2)
    assert len(first["items"]) == 2
    second = await control.get("/v1/keys", limit=len(whole), cursor=first["next_cursor"])
    assert [k["id"] for k in first["items"] + second["items"]] == whole
    assert second["next_cursor"] is None
    assert "more: cursor=" in (await control.http.get("/v1/keys?limit=1&format=text")).text
    for wrong in ("limit=0", "limit=1001", "cursor=zzz"):
        assert (await control.http.get(f"/v1/keys?{wrong}")).status_code == 422


async def test_a_format_that_is_not_there_is_named(control: World) -> None:
    for path, formats in (("/v1/jobs", "text or json"), ("/v1/ledger", "text, json or csv")):
        answer = await control.http.get(f"{path}?format=xml")
        assert answer.status_code == 422
        assert answer.json()["errors"] == [{"pointer": "/format", "detail": f"must be {formats}"}]


async def test_reads_give_tables_for_curl(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    await learner.train(await node.produce(2))
    for path, word in (
        ("/v1/jobs", job_id),
        (f"/v1/jobs/{job_id}", job_id),
        (f"/v1/jobs/{job_id}/fleet", node.id),
        (f"/v1/jobs/{job_id}/cost", "SPENT_USD"),
        (f"/v1/jobs/{job_id}/steps", "REWARD"),
        (f"/v1/jobs/{job_id}/events", "job_created"),
        ("/v1/fleet", "marketplace"),
        ("/v1/cost", "BUDGET_USD"),
        (f"/v1/offers?job_id={job_id}", "RTX 4090"),
        ("/v1/offers", "RTX 4090"),
    ):
        answer = await control.http.get(path, headers={"Accept": "text/plain"})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        assert word in answer.text
        assert (await control.http.get(path)).headers["content-type"] == "application/json"


async def test_nothing_at_an_unknown_id(control: World) -> None:
    for path in ("", "/fleet", "/cost", "/steps", "/events"):
        answer = await control.http.get(f"/v1/jobs/job_none{path}")
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
    assert (await control.http.post("/v1/jobs/job_none/cancel")).status_code == 404
    assert (await control.http.get("/v1/offers?job_id=job_none")).status_code == 404


async def test_open_paths_need_no_key(control: World) -> None:
    del control.http.headers["authorization"]
    await control.round()
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"):
        assert (await control.http.get(path)).status_code == 200
    text = (await control.http.get("/metrics")).text
    for name in ("mu_pool", "mu_target", "bubble_ratio", "dropped_rollouts_total", "spent_usd_total", "leases"):
        assert f"echo2_{name}" in text
    control.clock.advance(120)
    assert (await control.http.get("/readyz")).status_code == 503


class Stream:
    """A reader of server-sent events on the application itself: httpx would wait for the end."""

    def __init__(self, control: World, path: str, last_event_id: str | None = None) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.gone = asyncio.Event()
        headers = {**control.http.headers, "accept": "text/event-stream"}
        if last_event_id is not None:
            headers["last-event-id"] = last_event_id
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "client": ("127.0.0.1", 1), "server": (URL.removeprefix("http://"), 80),
        }  # fmt: skip
        self.asked = False
        self.task = asyncio.create_task(control.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        for line in bytes(message.get("body", b"")).decode().splitlines():
            self.lines.put_nowait(line)

    async def event(self) -> dict[str, Any]:
        """The next event's data; its id must be that of the line before."""
        number = ""
        while True:
            line = await asyncio.wait_for(self.lines.get(), 10)
            if line.startswith("id:"):
                number = line.removeprefix("id:").strip()
            if line.startswith("data:"):
                data: dict[str, Any] = json.loads(line.removeprefix("data:"))
                assert str(data["id"]) == number
                return data

    async def close(self) -> None:
        """The client goes away."""
        self.gone.set()
        await asyncio.wait_for(self.task, 10)


async def test_events_are_streamed_live_and_go_on_after_the_last_seen(control: World) -> None:
    job_id = await control.create()
    stream = Stream(control, f"/v1/jobs/{job_id}/events")
    first = await stream.event()
    assert first["kind"] == "job_created"
    await control.http.patch(f"/v1/jobs/{job_id}", json={"budget_usd": "60"})
    second = await stream.event()
    assert second["kind"] == "job_changed"
    await stream.close()
    await control.http.patch(f"/v1/jobs/{job_id}", json={"budget_usd": "70"})
    later = Stream(control, f"/v1/jobs/{job_id}/events", last_event_id=str(second["id"]))
    assert "70" in (await later.event())["message"]
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await control.round()
    kinds = [(await later.event())["kind"] for _ in range(2)]
    assert kinds == ["job_draining", "job_cancelled"]
    await asyncio.wait_for(later.task, 10)
    bad = await control.http.get(
        f"/v1/jobs/{job_id}/events", headers={"Accept": "text/event-stream", "Last-Event-ID": "x"}
    )
    assert bad.status_code == 422


async def test_a_key_that_is_asked_for_twice_is_one_key_and_kept_by_its_hash_alone(control: World) -> None:
    async def ask(name: str, again: str) -> Any:
        return await control.http.post("/v1/keys", json={"name": name}, headers={"Idempotency-Key": again})

    first, second, other = await ask("ci", "one"), await ask("ci", "one"), await ask("ci", "two")
    assert first.status_code == second.status_code == 201
    assert first.json() == second.json()
    assert other.json()["key"] != first.json()["key"]
    assert (await ask("somebody else's", "one")).status_code == 409
    names = [k["name"] for k in (await control.get("/v1/keys"))["items"]]
    assert names.count("ci") == 2
    headers = {"Authorization": f"Bearer {first.json()['key']}"}
    assert (await control.http.get("/v1/jobs", headers=headers)).status_code == 200
    database = Path(control.database_url.partition(":///")[2])
    assert first.json()["key"].encode() not in await asyncio.to_thread(database.read_bytes)


async def test_a_revoked_key_is_not_told_again_as_if_it_were_good(control: World) -> None:
    async def ask(again: str) -> Any:
        return await control.http.post("/v1/keys", json={"name": "ci"}, headers={"Idempotency-Key": again})

    made = (await ask("one")).json()
    assert (await control.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
    refused = await ask("one")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert "is revoked; use a new one" in refused.json()["detail"]
    assert "key" not in refused.json()
    anew = (await ask("two")).json()
    headers = {"Authorization": f"Bearer {anew['key']}"}
    assert (await control.http.get("/v1/jobs", headers=headers)).status_code == 200
