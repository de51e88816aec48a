"""Requests to the engine side by side: each has a connection for itself, which the next one uses again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from app.rollout_agent.engines.vllm_http import EngineHttp
from app.rollout_agent.engines.vllm_lanes import Lanes


class Server:
    """Answers once it is let go on; counts connections."""

    def __init__(self) -> None:
        self.connections = self.under_way = 0
        self.go, self.arrived = asyncio.Event(), asyncio.Condition()
        self.port = 0
        self.hang_up = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                async with self.arrived:
                    self.under_way += 1
                    self.arrived.notify_all()
                await self.go.wait()
                self.under_way -= 1
                if self.hang_up:
                    break
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def wait_for(self, requests: int) -> None:
        async with self.arrived, asyncio.timeout(10):
            await self.arrived.wait_for(lambda: self.under_way == requests)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    yield made
    made.go.set()
    listening.close()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", transport=Lanes(), timeout=10
    ) as client:  # fmt: skip
        yield client


async def test_requests_at_the_same_time_wait_for_no_connection(server: Server, http: httpx.AsyncClient) -> None:
    asked = [asyncio.create_task(http.get("/")) for _ in range(40)]
    await server.wait_for(40)
    server.go.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert server.connections == 40


async def test_a_connection_serves_one_request_after_the_other(server: Server, http: httpx.AsyncClient) -> None:
    server.go.set()
    for _ in range(5):
        await http.get("/")
    assert server.connections == 1
    await asyncio.gather(*(http.get("/") for _ in range(3)))
    await asyncio.gather(*(http.get("/") for _ in range(3)))
    assert server.connections == 3


async def test_after_a_failure_the_next_request_is_served(server: Server, http: httpx.AsyncClient) -> None:
    server.hang_up = True
    server.go.set()
    with pytest.raises(httpx.RemoteProtocolError):
        await http.get("/")
    server.hang_up = False
    assert (await http.get("/")).status_code == 200


async def test_a_request_that_is_given_up_leaves_no_answer_to_the_next_one(
    server: Server, http: httpx.AsyncClient
) -> None:
    given_up = asyncio.create_task(http.get("/"))
    await server.wait_for(1)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    server.go.set()
    assert (await http.get("/")).status_code == 200
    assert server.connections == 2  # the first one's answer was still to come over the other


@pytest.mark.parametrize("turns", range(16))
async def test_whenever_a_request_is_given_up_the_next_ones_are_served(
    server: Server, http: httpx.AsyncClient, turns: int
) -> None:
    server.go.set()
    given_up = [asyncio.create_task(http.get("/")) for _ in range(4)]
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*(http.get("/") for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}


class Counted(httpx.AsyncBaseTransport):
    """A lane that tells when it is closed; its answers are read by whoever asked."""

    def __init__(self) -> None:
        self.busy = self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert not self.busy, "two requests over one connection"
        self.busy = True
        if request.url.path == "/fails":
            self.busy = False
            raise httpx.ReadError("gone")

        async def body() -> AsyncIterator[bytes]:
            yield b"{}"
            self.busy = False

        return httpx.Response(200, content=body())

    async def aclose(self) -> None:
        self.closed = True


async def test_a_connection_is_taken_until_its_answer_is_read_and_given_up_if_it_fails() -> None:
    lanes: list[Counted] = []

    def make() -> Counted:
        lanes.append(Counted())
        return lanes[-1]

    async with httpx.AsyncClient(base_url="http://engine", transport=Lanes(make)) as client:
        async with client.stream("GET", "/") as answer:
            await client.get("/")
            assert len(lanes) == 2
            await answer.aread()
        await client.get("/")
        assert len(lanes) == 2
        with pytest.raises(httpx.ReadError):
            await client.get("/fails")
        assert sum(lane.closed for lane in lanes) == 1, "it is not trusted any more"
        async with client.stream("GET", "/"), client.stream("GET", "/"):
            assert len(lanes) == 3
    assert all(lane.closed for lane in lanes)


async def test_an_engine_is_asked_over_lanes_of_its_own(server: Server) -> None:
    engine = EngineHttp(server.port, "key")
    asked = [asyncio.create_task(engine.resume()) for _ in range(3)]
    await server.wait_for(3)
    server.go.set()
    await asyncio.gather(*asked)
    await asyncio.gather(*(engine.resume() for _ in range(3)))
    assert server.connections == 3
    await engine.aclose()
