"""A rented machine belongs to a stranger: one takes its join token and serves altered weights to the next node."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.stage import Stage, wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
FLIPPED = 2000
"""Offset in a stream of the byte that the stranger changes."""


class LyingRelay:
    """Passes on what the learner's relay says, but for one bit of each stream of weights."""

    def __init__(self) -> None:
        self.origin = ""
        self.lies = 0
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with contextlib.suppress(OSError, httpx.HTTPError):
                    relay.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """One request, passed on."""
        headers = {"Authorization": request.headers["Authorization"]}
        with httpx.stream(
            "GET", self.origin + request.path, headers=headers, timeout=60.0, trust_env=False
        ) as response:
            request.send_response(response.status_code)
            request.end_headers()
            at, stream = 0, "/stream" in request.path and response.status_code == 200
            for data in response.iter_raw():
                if stream and at <= FLIPPED < at + len(data):
                    data = data[: FLIPPED - at] + bytes([data[FLIPPED - at] ^ 1]) + data[FLIPPED - at + 1 :]
                    self.lies += 1
                at += len(data)
                request.wfile.write(data)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Answer for as long as the block runs."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()


class Stranger:
    """Speaks for a machine whose own agent it has stopped."""

    def __init__(self, stage: Stage, join_token: str, relay_url: str) -> None:
        self._http = httpx.Client(base_url=f"{stage.control_url}/v1/nodes", timeout=30.0, trust_env=False)
        request = {"agent_version": "0", "engine": "transformers", "relay_url": relay_url}
        answer = self._http.post("/join", json=request, headers={"Authorization": f"Bearer {join_token}"})
        assert answer.status_code == 200, answer.text
        self.joined = answer.json()
        self.directives: dict[str, Any] = self.joined["directives"]
        self._stop = threading.Event()

    def upstream(self) -> str:
        """The address of the learner's relay."""
        return next(str(u["url"]) for u in self.directives["upstreams"] if u["kind"] == "learner")

    def beat(self) -> None:
        """Claim to work, slowly enough that a second node is wanted."""
        body = {"state": "active", "policy_version": 0, "rollouts_per_s": 0.5}
        headers = {"Authorization": f"Bearer {self.joined['node_token']}"}
        answer = self._http.post(f"/{self.joined['node_id']}/heartbeat", json=body, headers=headers)
        self.directives = answer.raise_for_status().json()

    def _beat_on(self) -> None:
        while not self._stop.wait(0.5) and not self.directives["shutdown"]:
            self.beat()

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Heartbeats until the block ends or the service has enough of it."""
        thread = threading.Thread(target=self._beat_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(60)
            self._http.close()


def take_over(stage: Stage, job_id: str) -> str:
    """Stop the first machine of the job before its agent has joined; its join token."""
    machine = wait(lambda: [i for i in stage.instances(job_id).values() if i["pid"]], "a machine runs")[0]
    os.killpg(machine["pid"], signal.SIGSTOP)
    environment = Path(f"/proc/{machine['pid']}/environ").read_bytes().split(b"\0")
    return next(line for line in environment if line.startswith(b"ECHO2_JOIN_TOKEN=")).decode().partition("=")[2]


def test_a_node_that_serves_altered_weights_is_found_out_and_given_up(stage: Stage) -> None:
    relay = LyingRelay()
    job_id = stage.submit(name="liar", budget_usd="5.00", stop={"steps": 12}, fleet={"gpu_names": ["RTX 5090"]})
    with relay.serving():
        stranger = Stranger(stage, take_over(stage, job_id), relay.url)
        relay.origin = stranger.upstream()
        liar = stranger.joined["node_id"]
        with stranger.alive():
            wait(lambda: stranger.directives["shutdown"], "the liar is told to go")
        job = stage.ended(job_id)
    assert (job["status"], job["step"]) == ("succeeded", 12), job["status_reason"]
    assert relay.lies >= 2

    reports = stage.events(job_id, "upstream_lied")
    assert len(reports) >= 2
    assert {e["data"]["subject"] for e in reports} == {liar}
    assert liar not in {e["data"]["node"] for e in reports}
    assert stage.events(job_id, "engine_error") == [], "altered weights were never installed"
    [lease] = stage.rows("SELECT * FROM leases WHERE id = (SELECT lease_id FROM nodes WHERE id = ?)", liar)
    assert (lease["state"], lease["reason"]) == ("released", "served bytes that do not match their hash, 2 times")
    since = stage.rows("SELECT * FROM leases WHERE job_id = ? AND created_at > ?", job_id, lease["ended_at"])
    assert lease["machine_id"] not in {x["machine_id"] for x in since}, "it is left alone for a while"
    others = stage.rows("SELECT * FROM nodes WHERE job_id = ? AND id != ?", job_id, liar)
    assert sum(n["rollouts_accepted"] for n in others) >= 12 * 32
