"""The live view of a job, while the service is away for a while."""

from __future__ import annotations

import io
from typing import Any

import httpx
import pytest
from rich.console import Console, RenderableType

from app.protocol.errors import Unavailable
from app.watch import SILENCE_S, Feed, follow

JOB: dict[str, Any] = {
    "id": "job_1", "name": "spell", "status": "running", "status_reason": "", "step": 3, "stop": {"steps": 10},
    "published_version": 2, "reward": {"train": 0.5, "eval": None, "eval_initial": None},
    "learner": {"t_train": 1.0, "t_bcast": None, "bubble_ratio": None, "dropped_ratio": None},
    "capacity": {"mu_pool": 1.0, "mu_steered": 1.0, "mu_target": 1.0},
    "cost": {"spent_usd": "0.1", "committed_usd": "0.2", "budget_usd": "1", "usd_per_step": None},
}  # fmt: skip


class Service:
    """Answers, or does not: `away` says which calls find nobody."""

    def __init__(self, away: range, ends_at: int = 10**9) -> None:
        self.away, self.ends_at, self.reads = away, ends_at, -1
        self.now = 0.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/fleet"):
            return httpx.Response(200, json={"nodes": []})
        if path.endswith("/events"):
            return httpx.Response(200, json={"items": [], "next_cursor": None})
        self.reads += 1
        if self.reads in self.away:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, json={**JOB, "status": "succeeded" if self.reads >= self.ends_at else "running"})

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run(service: Service) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    http = httpx.Client(transport=httpx.MockTransport(service), base_url="http://service")

    def show(screen: RenderableType) -> None:
        console.print(screen)

    status = follow(Feed(http, "job_1"), show, service.sleep, lambda: service.now)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def test_a_service_that_is_started_again_does_not_end_the_view() -> None:
    status, shown = run(Service(range(2, 6), ends_at=8))
    assert status == 0
    assert "trying again" in shown


def test_a_service_that_stays_away_ends_it_in_the_end() -> None:
    service = Service(range(2, 10**9))
    with pytest.raises(Unavailable, match="is `echo2 serve` running"):
        run(service)
    assert SILENCE_S <= service.now <= SILENCE_S + 10


def test_a_service_that_never_answered_is_told_at_once() -> None:
    service = Service(range(10**9))
    with pytest.raises(Unavailable):
        run(service)
    assert service.now == 0
