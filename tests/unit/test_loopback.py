"""Calls to this computer go past a proxy; all others take it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from app.learner.client import ControlClient
from app.loopback import PAST_PROXIES


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_this_computer_is_asked_directly(port: int, host: str) -> None:
    url = f"http://{host}:{port}/"
    with httpx.Client(mounts=PAST_PROXIES) as http:
        assert (await asyncio.to_thread(http.get, url, timeout=10)).status_code == 204
    with httpx.Client() as http, pytest.raises(httpx.ConnectError):
        await asyncio.to_thread(http.get, url, timeout=10)


def test_others_are_asked_through_the_proxy() -> None:
    with httpx.Client(mounts=PAST_PROXIES) as http, pytest.raises(httpx.ConnectError):
        http.get("http://192.0.2.1/", timeout=10)


@pytest.mark.parametrize(("url", "proxied"), [("http://127.0.0.1:8080", False), ("http://echo2.example.org", True)])
def test_a_learner_asks_a_service_on_its_own_computer_directly(url: str, proxied: bool) -> None:
    client = ControlClient(url, "job_1", "token")
    used = client._http._transport_for_url(httpx.URL(url))
    assert (used is not client._http._transport) is proxied
    client.close()
