"""What the demo promises: each promise that is broken is named, and only that."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, get_type_hints

import httpx
import pytest

from app.cli import demo
from app.demo import STEPS, job_spec
from app.demo.incidents import Incidents
from app.demo.report import verdict
from app.demo.stage import Stage
from app.protocol.job import JobSpec

KEPT: dict[str, Any] = {
    "status": "succeeded", "eval_initial": 0.27, "eval_final": 0.61, "budget_usd": "2.000000",
    "spent_usd": "0.030000", "marketplace_bill_usd": "0.030100", "leases_open": 0, "machines_running": 0,
    "nodes_peak": 4, "spent_own_count_usd": "0.030050",
}  # fmt: skip


def test_a_run_that_kept_everything_passes() -> None:
    assert verdict(KEPT) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": "failed"}, "not succeeded"),
        ({"eval_final": 0.41}, "less than 0.15"),
        ({"eval_final": None}, "less than 0.15"),
        (
            {"spent_usd": "2.000001", "spent_own_count_usd": "2.000001", "marketplace_bill_usd": "2.000001"},
            "spent $2.000001",
        ),
        ({"spent_usd": "0.030500"}, "our ledger says $0.030500"),
        ({"spent_own_count_usd": "0.029000"}, "before the bill corrected it"),
        ({"leases_open": 1}, "leases are open"),
        ({"machines_running": 2}, "machines are running"),
        ({"nodes_peak": 2}, "fewer than 3"),
    ],
)
def test_a_broken_promise_is_named(change: dict[str, Any], words: str) -> None:
    (fault,) = verdict({**KEPT, **change})
    assert words in fault


def test_its_job_is_a_valid_one() -> None:
    spec = JobSpec.model_validate(job_spec(150))
    assert spec.kappa == 5
    assert spec.rollouts_per_step == 256


def test_without_a_bill_nothing_agrees() -> None:
    zero = {"spent_usd": "0.000000", "spent_own_count_usd": "0.000000", "marketplace_bill_usd": "0.000000"}
    assert len(verdict({**KEPT, **zero})) == 2


def test_the_help_tells_how_many_steps_it_takes() -> None:
    (option,) = get_type_hints(demo, include_extras=True)["steps"].__metadata__
    assert f"[default: {STEPS['transformers']}, vllm {STEPS['vllm']}]" in option.help


class Hook(BaseHTTPRequestHandler):
    """The service, as far as a webhook goes."""

    def do_POST(self) -> None:
        """Takes it."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(202)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_its_webhook_goes_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    told: list[Any] = []

    def market(request: httpx.Request) -> httpx.Response:
        told.append(json.loads(request.content))
        return httpx.Response(200, json={})

    nodes = [
        {"id": f"n{i}", "state": "active", "machine_id": str(i), "chain_position": i, "rho": i, "gpu_name": f"GPU {i}",
         "price_per_hour": "0.100000"} for i in range(2)
    ]  # fmt: skip
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stage = Stage(server.server_address[1], 0)
        incidents = Incidents(stage, httpx.Client(base_url="http://market", transport=httpx.MockTransport(market)), 4)
        incidents.killed = "1"
        incidents.update({"step": 2}, {"nodes": nodes})
        server.shutdown()
    assert incidents.priced == "GPU 0"
    assert told == [{"selector": {"gpu_name": "GPU 0"}, "min_bid": "0.400000", "dph_base": "0.400000"}]
