"""The live view of a job, while the service is away for a while."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import httpx
import pytest
from rich.console import Console, RenderableType

from app.client import Problem
from app.protocol.errors import Unavailable
from app.protocol.paging import decode, encode
from app.watch import SHOWN_EVENTS, SILENCE_S, Feed, follow, view

JOB: dict[str, Any] = {
    "id": "job_1", "name": "spell", "status": "running", "status_reason": "", "step": 3, "stop": {"steps": 10},
    "published_version": 2, "reward": {"train": 0.5, "eval": None, "eval_initial": None},
    "learner": {"t_train": 1.0, "t_bcast": None, "bubble_ratio": None, "dropped_ratio": None},
    "capacity": {"mu_pool": 1.0, "mu_steered": 1.0, "mu_target": 1.0},
    "cost": {"spent_usd": "0.1", "committed_usd": "0.2", "budget_usd": "1", "usd_per_step": None},
}  # fmt: skip


class Service:
    """Answers, or does not: `away` says which calls find nobody, or a proxy that answers so."""

    def __init__(self, away: range, ends_at: int = 10**9, proxy: int | None = None) -> None:
        self.away, self.ends_at, self.reads, self.proxy = away, ends_at, -1, proxy
        self.now = 0.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/fleet"):
            return httpx.Response(200, json={"nodes": []})
        if path.endswith("/events"):
            return httpx.Response(200, json={"items": [], "next_cursor": None})
        self.reads += 1
        if self.reads in self.away:
            if self.proxy is not None:
                return httpx.Response(self.proxy, html="<h1>Oh</h1>")
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


@pytest.mark.parametrize("proxy", [502, 503, 504])
def test_a_proxy_that_finds_nobody_does_not_end_the_view(proxy: int) -> None:
    status, shown = run(Service(range(2, 6), ends_at=8, proxy=proxy))
    assert status == 0
    assert f"HTTP {proxy}; trying again" in shown
    stays_away = Service(range(2, 10**9), proxy=proxy)
    with pytest.raises(Problem, match=f"HTTP {proxy}"):
        run(stays_away)
    assert SILENCE_S <= stays_away.now <= SILENCE_S + 10


def test_what_the_service_refuses_ends_it_at_once() -> None:
    service = Service(range(2, 10**9), proxy=404)
    with pytest.raises(Problem):
        run(service)
    assert service.now < 5


def text(job: dict[str, Any], nodes: list[dict[str, Any]], events: list[dict[str, Any]]) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(view(job, {"nodes": nodes}, events))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("said", ["lost [/tmp/x] for ever", "[rank0]: boom", "[bold]", "\\[x]"])
def test_what_others_wrote_is_no_markup(said: str) -> None:
    node = {
        "machine_id": said, "gpu_name": said, "state": "active", "price_per_hour": "0.1", "rho": None,
        "mu_measured": None, "policy_version": None, "chain": None, "chain_position": None, "upstream": None,
        "rollouts_accepted": 0,
    }  # fmt: skip
    shown = text(
        {**JOB, "name": said, "status_reason": said},
        [node],
        [{"at": "2026-12-01T10:00:00Z", "kind": "k", "message": said}],
    )
    assert shown.count(said) == 5


def test_what_others_wrote_does_not_drive_the_terminal() -> None:
    said = "\x1b[2J\x1b]0;gone\x07 a\rb\u202ec\nd"
    shown = text({**JOB, "status_reason": said}, [], [{"at": "2026-12-01T10:00:00Z", "kind": "k", "message": said}])
    assert shown.count("?[2J?]0;gone? a?b?c?d") == 2
    assert not [c for c in shown if not c.isprintable() and c != "\n"]


def test_the_newest_events_are_shown_at_once_and_the_old_ones_not_kept() -> None:
    count = 2500

    def answer(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            over = {**JOB, "status": "succeeded"}
            return httpx.Response(200, json={"nodes": []} if request.url.path.endswith("/fleet") else over)
        after, limit = decode(request.url.params.get("cursor")) or 0, int(request.url.params["limit"])
        ids = range(after + 1, min(count, after + limit) + 1)
        rows = [{"id": i, "at": "2026-12-01T10:00:00Z", "kind": "k", "message": f"event {i}."} for i in ids]
        more = encode(ids[-1]) if ids and ids[-1] < count else None
        return httpx.Response(200, json={"items": rows, "next_cursor": more})

    console = Console(file=io.StringIO(), width=200)
    feed = Feed(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://service"), "job_1")
    assert follow(feed, console.print) == 0
    assert isinstance(console.file, io.StringIO)
    assert "event 2500." in console.file.getvalue()
    assert [e["id"] for e in feed.events] == [*range(count - SHOWN_EVENTS + 1, count + 1)]


def test_it_needs_nothing_of_the_control_service() -> None:
    """The command line comes without the packages of the service."""
    absent = "sys.modules.update(dict.fromkeys(('fastapi', 'sqlalchemy', 'boto3', 'tabulate')))"
    ended = subprocess.run([sys.executable, "-c", f"import sys; {absent}; import app.watch"], check=False, timeout=60)
    assert ended.returncode == 0
