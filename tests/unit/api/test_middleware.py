"""The limit on bodies and the request id, in process and over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from app.api import middleware, problems
from app.api.middleware import BodyLimitMiddleware, RequestIdMiddleware


def limit_for(method: str, path: str) -> int | None:
    return 5000 if (method, path) == ("PUT", "/large") else None


def make_app() -> FastAPI:
    app = FastAPI()
    problems.install(app)
    middleware.install(app, max_bytes=1000, limit_for=limit_for)
    app.state.read = 0

    @app.post("/json")
    async def json(value: dict[str, str]) -> int:
        return len(value)

    @app.put("/large")
    @app.put("/raw")
    async def raw(request: Request) -> int:
        total = 0
        async for chunk in request.stream():
            total += len(chunk)
            request.app.state.read = total
        return total

    @app.get("/id")
    async def show(request: Request) -> str:
        return str(request.state.request_id)

    return app


@pytest.fixture
def app() -> FastAPI:
    return make_app()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as opened:
        yield opened


async def chunks(count: int, size: int = 100) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * size


def check_refused(answer: httpx.Response, limit: int) -> None:
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"]
    assert answer.json()["code"] == "too_large"
    assert f"{limit} bytes" in answer.json()["detail"]


async def test_a_body_at_the_limit_passes_and_one_byte_more_does_not(client: httpx.AsyncClient) -> None:
    assert (await client.put("/raw", content=b"x" * 1000)).json() == 1000
    check_refused(await client.put("/raw", content=b"x" * 1001), 1000)


async def test_a_body_without_length_is_counted(client: httpx.AsyncClient, app: FastAPI) -> None:
    assert (await client.put("/raw", content=chunks(10))).json() == 1000
    check_refused(await client.put("/raw", content=chunks(11)), 1000)
    check_refused(await client.put("/raw", content=chunks(1, 1001)), 1000)
    assert app.state.read == 1000, "the handler saw nothing beyond the limit"


async def test_the_framework_cannot_turn_it_into_another_error(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    check_refused(await client.post("/json", content=chunks(11), headers=headers), 1000)
    assert (await client.post("/json", json={"a": "b"})).json() == 1


async def test_a_path_can_have_its_own_limit(client: httpx.AsyncClient) -> None:
    assert (await client.put("/large", content=b"x" * 5000)).json() == 5000
    check_refused(await client.put("/large", content=chunks(51)), 5000)


async def test_the_request_id_is_kept_if_sane_else_made(client: httpx.AsyncClient) -> None:
    kept = await client.get("/id", headers={"X-Request-Id": "abc-1.2_3"})
    assert kept.headers["x-request-id"] == kept.json() == "abc-1.2_3"
    for bad in ("", "a b", "x" * 65, "a;b"):
        made = await client.get("/id", headers={"X-Request-Id": bad})
        assert made.headers["x-request-id"] == made.json() != bad
        assert len(made.json()) == 32
    first, second = await client.get("/id"), await client.get("/id")
    assert first.json() != second.json()


async def test_other_scopes_pass_untouched() -> None:
    seen = []

    async def inner(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        seen.append((scope, receive, send))

    scope = {"type": "lifespan"}
    for outer in (BodyLimitMiddleware(inner), RequestIdMiddleware(inner)):
        await outer(scope, None, None)  # type: ignore[arg-type]
    assert seen == [(scope, None, None)] * 2


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(), log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()
    server.should_exit = True
    await asyncio.wait_for(task, 10)
    listener.close()


async def test_a_client_on_a_socket_gets_the_answer_while_it_still_sends(address: tuple[str, int]) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", timeout=20) as client:
        check_refused(await client.put("/raw", content=b"x" * (8 << 20)), 1000)
        check_refused(await client.put("/raw", content=chunks(100, 1 << 16)), 1000)
        check_refused(await client.put("/raw", content=chunks(11)), 1000)
        assert (await client.put("/raw", content=b"x")).json() == 1


async def test_a_client_that_asks_first_is_told_without_sending(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"PUT /raw HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\nExpect: 100-continue\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_has_ended_is_not_waited_for() -> None:
    messages = [{"type": "http.request", "body": b"x" * 11, "more_body": False}]
    sent = []

    async def receive() -> dict[str, object]:
        return messages.pop()

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async def inner(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await receive()

    scope = {"type": "http", "method": "PUT", "path": "/", "headers": []}
    await BodyLimitMiddleware(inner, max_bytes=10)(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 413


@pytest.mark.parametrize("stopping", [True, False])
async def test_what_the_end_of_the_service_cuts_off_is_answered(
    app: FastAPI, client: httpx.AsyncClient, stopping: bool
) -> None:
    polled, cut = asyncio.Event(), asyncio.Event()

    @app.get("/poll")
    async def poll() -> None:
        polled.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()

    app.state.stopping = stopping
    call = asyncio.create_task(client.get("/poll"))
    await asyncio.wait_for(polled.wait(), 5)
    call.cancel()
    if stopping:
        answer = await asyncio.wait_for(call, 5)
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert answer.headers["connection"] == "close"
        assert answer.headers["x-request-id"]
    else:
        with pytest.raises(asyncio.CancelledError):
            await call
    assert cut.is_set()
