from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from blake3 import blake3

from app.protocol import errors
from app.protocol.errors import BadInput, EchoError, Gone, IntegrityError, Refused, TooLarge, Unavailable
from app.protocol.node import AssetRef, JoinRequest, Leave
from app.protocol.work import CommitRequest, UploadSlot, WorkRequest
from app.rollout_agent.assets import fetch_assets
from app.rollout_agent.client import RETRIES, NodeClient
from app.rollout_agent.reach import BACKOFF_MAX_S, backoff

Handler = Callable[[httpx.Request], httpx.Response]
JOINED: dict[str, Any] = {
    "node_id": "n1",
    "node_token": "node-token",
    "job_id": "j",
    "task": {"name": "t"},
    "sampling": {},
    "group_size": 2,
    "seed": 0,
    "assets": [],
    "manifest_public_key": "00" * 32,
    "relay_token": "r",
    "uplink_bytes_per_s": None,
    "max_upload_bytes": 1000,
    "directives": {
        "upstreams": [],
        "target_version": None,
        "lease_expires_in_s": 60,
        "heartbeat_interval_s": 5,
    },
    "a_field_of_a_later_version": 1,
}
JOIN = JoinRequest(agent_version="1", engine="transformers")
COMMIT = CommitRequest(key="k", size=1, blake3="0" * 64, work_items=["w"])


class Network:
    """Hands requests to a handler; remembers them and the pauses between."""

    def __init__(self, handler: Handler) -> None:
        self.requests: list[httpx.Request] = []
        self.pauses: list[float] = []
        self._handler = handler

        def handle(request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            return handler(request)

        self.http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        self.client = NodeClient("http://control", self.http, sleep=self._sleep, jitter=lambda: 1.0)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


def problem(code: str, status: int, **more: Any) -> httpx.Response:
    body = {"type": f"https://errors.example/{code}", "title": "T", "status": status, "detail": "why", **more}
    return httpx.Response(status, content=json.dumps(body), headers={"Content-Type": "application/problem+json"})


def refuse_connection(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def lose_answer(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("timeout", request=request)


async def test_join_trades_the_tokens() -> None:
    network = Network(
        lambda r: httpx.Response(200, json=JOINED) if r.url.path.endswith("/join") else httpx.Response(204)
    )
    await network.client.join(JOIN, "join-token")
    await network.client.leave(Leave(reason="done"))
    first, second = network.requests
    assert first.headers["authorization"] == "Bearer join-token"
    assert second.url == "http://control/v1/nodes/n1/leave"
    assert second.headers["authorization"] == "Bearer node-token"
    assert network.client.bytes_up == len(first.content) + len(second.content)
    assert network.client.bytes_down > 0


async def test_join_is_repeated_only_if_it_was_certainly_not_seen() -> None:
    network = Network(refuse_connection)
    with pytest.raises(Unavailable):
        await network.client.join(JOIN, "join-token")
    assert len(network.requests) == RETRIES + 1
    lost = Network(lose_answer)
    with pytest.raises(Unavailable):
        await lost.client.join(JOIN, "join-token")
    assert len(lost.requests) == 1


async def test_commit_is_repeated_with_growing_pauses() -> None:
    answers = iter([503, 500, 502])

    def handler(request: httpx.Request) -> httpx.Response:
        status = next(answers, 200)
        return httpx.Response(status, json={"accepted": ["w"]})

    network = Network(handler)
    answer = await network.client.commit(COMMIT)
    assert answer.accepted == ["w"]
    assert network.pauses == [0.25, 0.5, 1.0]


async def test_work_is_not_asked_twice() -> None:
    network = Network(lose_answer)
    with pytest.raises(Unavailable):
        await network.client.work(WorkRequest(max_items=1, policy_version=0))
    assert len(network.requests) == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (problem("gone", 410), Gone),
        (problem("conflict", 409), errors.Conflict),
        (problem("unauthorized", 401), errors.Unauthorized),
        (httpx.Response(410, text="gone"), Gone),
        (httpx.Response(404), errors.NotFound),
        (problem("about:blank", 403), errors.Forbidden),
        (problem("invalid_request", 422, errors=[{"pointer": "/key", "detail": "no"}]), BadInput),
        (httpx.Response(418), BadInput),
    ],
)
async def test_problems_become_errors(answer: httpx.Response, expected: type[EchoError]) -> None:
    network = Network(lambda _: answer)
    with pytest.raises(expected) as caught:
        await network.client.commit(COMMIT)
    assert type(caught.value) is expected
    assert len(network.requests) == 1, "an answer that says no is not asked for again"


async def test_a_refusal_keeps_its_reason() -> None:
    network = Network(lambda _: problem("trajectory_refused", 422, reason="logprobs"))
    with pytest.raises(Refused) as caught:
        await network.client.commit(COMMIT)
    assert caught.value.reason == "logprobs"


async def test_an_answer_that_is_not_the_protocols_is_unavailable() -> None:
    network = Network(lambda _: httpx.Response(200, text="<html>login</html>"))
    with pytest.raises(Unavailable, match="CommitAnswer"):
        await network.client.commit(COMMIT)


async def test_no_message_holds_a_presigned_url() -> None:
    network = Network(refuse_connection)
    slot = UploadSlot(key="k", url="http://store/bucket/k?X-Signature=s3cret")
    with pytest.raises(Unavailable) as caught:
        await network.client.put(slot, b"data")
    assert "s3cret" not in caught.value.detail
    assert "bucket" not in caught.value.detail


async def test_a_put_sends_the_slots_headers() -> None:
    network = Network(lambda _: httpx.Response(200))
    await network.client.put(UploadSlot(key="k", url="http://store/k", headers={"X-Max": "9"}), b"data")
    [request] = network.requests
    assert request.method == "PUT"
    assert request.headers["x-max"] == "9"
    assert "authorization" not in request.headers, "the store must not see the node token"
    assert request.content == b"data"
    assert network.client.bytes_up == 4


async def test_a_download_stops_at_its_announced_size() -> None:
    network = Network(lambda _: httpx.Response(200, content=b"x" * 11))
    with pytest.raises(TooLarge):
        await network.client.download("http://store/a", 10)
    assert await network.client.download("http://store/a", 11) == b"x" * 11


async def test_assets_are_checked_before_they_are_kept(tmp_path: Path) -> None:
    def asset(content: bytes) -> AssetRef:
        return AssetRef(path="config.json", size=3, blake3=blake3(content).hexdigest(), url="http://store/config.json")

    network = Network(lambda _: httpx.Response(200, content=b"abc"))
    await fetch_assets(network.client, [asset(b"abc")], tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == b"abc"
    with pytest.raises(IntegrityError, match=r"config\.json"):
        await fetch_assets(network.client, [asset(b"abd")], tmp_path / "other")
    assert not (tmp_path / "other" / "config.json").exists()


async def test_weights_come_as_a_file_and_are_kept_only_if_they_are_the_announced_ones(tmp_path: Path) -> None:
    def asset(content: bytes, size: int = 3) -> AssetRef:
        return AssetRef(
            path="model.safetensors",
            size=size,
            blake3=blake3(content).hexdigest(),
            url="http://store/model.safetensors",
        )

    network = Network(lambda _: httpx.Response(200, content=b"abc"))
    await fetch_assets(network.client, [asset(b"abc")], tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"abc"
    for wrong, error in ((asset(b"abd"), IntegrityError), (asset(b"abc", size=2), TooLarge)):
        with pytest.raises(error):
            await fetch_assets(network.client, [wrong], tmp_path / "other")
        assert not (tmp_path / "other" / "model.safetensors").exists()


def test_backoff_grows_to_a_limit_and_is_jittered() -> None:
    assert [backoff(n, 1.0) for n in range(6)] == [0.25, 0.5, 1.0, 2.0, 4.0, BACKOFF_MAX_S]
    assert backoff(3, 0.0) == 1.0
    assert backoff(10_000, 1.0) == BACKOFF_MAX_S


async def test_a_join_answer_with_a_floating_revision_is_refused() -> None:
    asset = {"path": "m.safetensors", "size": 1, "blake3": "0" * 64, "url": "http://store/m"}
    moving = {**asset, "hub": {"repo": "org/m", "revision": "main"}}
    network = Network(lambda _: httpx.Response(200, json={**JOINED, "assets": [asset, moving]}))
    with pytest.raises(Unavailable, match=r"assets\.1\.hub\.revision"):
        await network.client.join(JOIN, "join-token")
    assert len(network.requests) == 1
