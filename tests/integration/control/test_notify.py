"""Notifications: what happens to a job is told to the address its owner named: signed, in order, until it is taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from standardwebhooks import Webhook

from app.fleet.notify import KEEP_S, LONGEST_WAIT_S, Notifier, wait_s
from app.fleet.outward import Outward
from app.storage.models import Outbox
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import WEBHOOK_SECRET, World, job_body

URL = "https://hooks.example.org/echo2?key=hunter2"
OTHER = "https://other.example.org/"
OWN_SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVoxMjM0"
Open = Callable[..., AbstractAsyncContextManager[World]]


class Inbox:
    """The other side: verifies as a receiver would, and answers what it is told to."""

    def __init__(self, secret: str = WEBHOOK_SECRET) -> None:
        self.secret = secret
        self.status: dict[str, int] = {}
        self.taken: list[tuple[str, str, dict[str, Any]]] = []
        """(host, webhook-id, body) of what was answered 200."""
        self.tries = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        return ["8.8.8.8"]

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.tries += 1
        host = request.headers["host"]
        expected = Webhook(self.secret).sign(
            msg_id=request.headers["webhook-id"],
            timestamp=_moment(request.headers["webhook-timestamp"]),
            data=request.content.decode(),
        )
        assert request.headers["webhook-signature"] == expected
        status = self.status.get(host, 200)
        if status == 0:
            raise httpx.ConnectError("no route")
        if status == 200:
            self.taken.append((host, request.headers["webhook-id"], json.loads(request.content)))
        return httpx.Response(status)

    def attach(self, control: World) -> Notifier:
        outward = Outward(allow_private=False, resolver=self.resolve, transport=httpx.MockTransport(self.handle))
        control.svc.notifier = Notifier(control.svc.core, outward, chance=lambda: 0.5)
        return control.svc.notifier

    def kinds(self) -> list[str]:
        return [body["type"] for _, _, body in self.taken]


def _moment(text: str) -> Any:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(int(text), UTC)


async def row(control: World, job_id: str) -> Outbox:
    async with control.svc.core.db.read() as session:
        return (await session.scalars(select(Outbox).where(Outbox.job_id == job_id))).one()


@BOTH
async def test_what_happens_is_told_in_order_and_once(control: World) -> None:
    inbox = Inbox()
    notifier = inbox.attach(control)
    job_id = await control.create(notify_url=URL)
    silent = await control.create()
    await control.running(job_id)
    await notifier.sweep()
    assert inbox.kinds()[:2] == ["job_created", "job_provisioning"]
    assert {body["data"]["job_id"] for _, _, body in inbox.taken} == {job_id}
    answer = await control.http.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code == 202
    await notifier.sweep()
    await notifier.sweep()
    _, message_id, body = inbox.taken[-1]
    assert body["type"] == "job_draining"
    assert set(body) == {"type", "timestamp", "data"}
    event = next(e for e in await control.events(job_id) if e.kind == "job_draining")
    assert body["data"] == {"job_id": job_id, "event_id": event.id, "message": event.message, "details": {}}
    assert message_id == f"msg_{job_id}_{event.id}"
    ids = [body["data"]["event_id"] for _, _, body in inbox.taken]
    assert ids == sorted(set(ids))
    assert "lease_intent" not in inbox.kinds()
    assert silent not in {body["data"]["job_id"] for _, _, body in inbox.taken}


@pytest.mark.parametrize("status", [0, 307, 400, 503])
async def test_what_is_not_taken_is_tried_again_later_and_before_anything_newer(control: World, status: int) -> None:
    inbox = Inbox()
    notifier = inbox.attach(control)
    inbox.status = {"hooks.example.org": status}
    job_id = await control.create(notify_url=URL)
    other = await control.create(notify_url=OTHER)
    await notifier.sweep()
    assert [host for host, _, _ in inbox.taken] == ["other.example.org"], other
    await notifier.sweep()
    assert inbox.tries == 2, "not before its time"
    control.clock.advance(wait_s(1, 0.5))
    await notifier.sweep()
    assert (await row(control, job_id)).attempts == 2
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    inbox.status = {}
    await notifier.sweep()
    assert (await row(control, job_id)).event_id == 0
    control.clock.advance(wait_s(2, 0.5))
    await notifier.sweep()
    mine = [body["type"] for host, _, body in inbox.taken if host == "hooks.example.org"]
    assert mine == ["job_created", "job_draining"]
    assert (await row(control, job_id)).attempts == 0


async def test_after_a_day_it_is_dropped_with_an_event_that_keeps_the_address_to_itself(control: World) -> None:
    inbox = Inbox()
    notifier = inbox.attach(control)
    inbox.status = {"hooks.example.org": 500}
    job_id = await control.create(notify_url=URL)
    await notifier.sweep()
    control.clock.advance(KEEP_S - 1)
    await notifier.sweep()
    assert "notification_dropped" not in await control.kinds(job_id)
    control.clock.advance(LONGEST_WAIT_S * 2)
    await notifier.sweep()
    dropped = [e for e in await control.events(job_id) if e.kind == "notification_dropped"]
    assert len(dropped) == 1
    assert "job_created" in dropped[0].message
    assert "hunter2" not in dropped[0].message
    assert "500" in dropped[0].message
    # The end of the message about the end is no news.
    control.clock.advance(KEEP_S + LONGEST_WAIT_S)
    await notifier.sweep()
    await notifier.sweep()
    assert (await control.kinds(job_id)).count("notification_dropped") == 1
    inbox.status = {}
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    control.clock.advance(LONGEST_WAIT_S * 2)
    await notifier.sweep()
    assert inbox.kinds() == ["job_draining"]


async def test_a_message_outlives_the_service_with_its_id(control: World) -> None:
    inbox = Inbox()
    notifier = inbox.attach(control)
    inbox.status = {"hooks.example.org": 503}
    job_id = await control.create(notify_url=URL)
    await notifier.sweep()
    await control.restart()
    notifier = inbox.attach(control)
    await notifier.sweep()
    assert inbox.tries == 1, "the wait outlives it too"
    inbox.status = {}
    control.clock.advance(wait_s(1, 0.5))
    await notifier.sweep()
    event = next(e for e in await control.events(job_id) if e.kind == "job_created")
    assert [m for _, m, _ in inbox.taken] == [f"msg_{job_id}_{event.id}"]


async def test_the_secret_of_notifications_wins(open_world: Open) -> None:
    async with open_world(notify_secret=OWN_SECRET) as control:
        inbox = Inbox(OWN_SECRET)
        notifier = inbox.attach(control)
        await control.create(notify_url=URL)
        await notifier.sweep()
        assert inbox.kinds() == ["job_created"]


async def test_without_any_secret_a_job_with_an_address_is_refused(open_world: Open) -> None:
    async with open_world(webhook_secret=None) as control:
        answer = await control.http.post("/v1/jobs", json=job_body(notify_url=URL))
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["pointer"] == "/notify_url"
        assert "ECHO2_NOTIFY_SECRET" in error["detail"]
        assert (await control.http.post("/v1/jobs", json=job_body())).status_code == 201


@pytest.mark.parametrize("url", ["ftp://example.org/", "http://127.0.0.1/", "http://[::1]:1/", "http://u:p@a.org/"])
async def test_an_address_that_would_never_be_asked_is_refused_at_once(control: World, url: str) -> None:
    answer = await control.http.post("/v1/jobs", json=job_body(notify_url=url))
    assert answer.status_code == 422
    assert [e["pointer"] for e in answer.json()["errors"]] == ["/notify_url"]


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A real server on loopback that takes everything."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        requests.append(head + await reader.readexactly(size))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/in", requests


async def test_the_service_s_own_sender_reaches_a_loopback_address_that_the_setting_allows(open_world: Open) -> None:
    async with open_world(notify_allow_private=True) as control, receiver() as (url, requests):
        await control.create(notify_url=url)
        await control.svc.notifier.sweep()
        assert len(requests) == 1
        head, _, body = requests[0].partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:])
        assert headers["host"] == url.split("/")[2]
        signed = {k: v for k, v in headers.items() if k.startswith("webhook-")}
        signature = next(x for x in head.decode().split("\r\n") if x.lower().startswith("webhook-signature"))
        message_id = next(x for x in head.decode().split("\r\n") if x.lower().startswith("webhook-id")).split(": ")[1]
        expected = Webhook(WEBHOOK_SECRET).sign(
            msg_id=message_id, timestamp=_moment(signed["webhook-timestamp"]), data=body.decode()
        )
        assert signature.split(": ")[1] == expected
        assert json.loads(body)["type"] == "job_created"


def test_waits_grow_to_an_hour_and_differ() -> None:
    assert [wait_s(n, 0.5) for n in (1, 2, 3, 4)] == [5, 10, 20, 40]
    assert wait_s(1, 0.0) == 2.5
    assert wait_s(60, 1.0) == LONGEST_WAIT_S * 1.5


async def test_events_that_are_not_told_are_passed_over_and_the_next_that_is_is_not(control: World) -> None:
    inbox = Inbox()
    notifier = inbox.attach(control)
    job_id = await control.create(notify_url=URL)
    await notifier.sweep()
    assert inbox.kinds() == ["job_created"]

    async def happen(kind: str, times: int) -> None:
        async with control.svc.core.db.write() as session:
            for _ in range(times):
                control.svc.core.emit(session, job_id, kind, "")

    await happen("lease_intent", 150)
    before = (await row(control, job_id)).event_id
    await notifier.pass_over()
    assert (await row(control, job_id)).event_id == before, "few are no burden"
    await happen("lease_intent", 150)
    await notifier.pass_over()
    assert (await row(control, job_id)).event_id >= before + 300
    await happen("preempted", 1)
    await happen("lease_intent", 300)
    await notifier.pass_over()
    await notifier.sweep()
    assert inbox.kinds() == ["job_created", "preempted"]
