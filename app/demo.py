"""`echo2 demo`: a whole job on this machine, with a machine that dies and a price that moves.

Invariant: it uses what every user has (the REST API, a signed webhook) and the marketplace's control side, nothing
inside; every number of its summary is read from the service or from the marketplace's own books.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from app.client import client, unwrap
from app.protocol.base import micros, usd
from app.protocol.errors import Unavailable
from app.protocol.job import FINAL_STATUSES
from app.watch import Feed, view

FOLDER = Path(".demo")
DEADLINE_S = 900.0
BUDGET = "2.00"


def job_spec(steps: int) -> dict[str, Any]:
    """The demo's job."""
    return {
        "name": "spell-backward",
        "model": "tiny",
        "task": {
            "name": "reasoning_gym",
            "params": {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5},
        },
        "budget_usd": BUDGET,
        "stop": {"steps": steps},
        "staleness_budget": 3,
        "batch": {"prompts": 32, "group_size": 8},
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8},
        "learner": {"placement": "local", "learning_rate": 6e-4, "eval_every": 50, "eval_prompts": 1024},
        "fleet": {"providers": ["marketplace"], "min_reliability": 0.9, "interruptible": True, "max_nodes": 5},
        "seed": 0,
    }


@dataclass
class Stage:
    """Addresses and keys of one run."""

    control_port: int
    market_port: int
    admin_key: str = field(default_factory=lambda: "ek_" + secrets.token_urlsafe(32), repr=False)
    market_key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    webhook_secret: str = field(default_factory=lambda: _webhook_secret(), repr=False)

    @property
    def control_url(self) -> str:
        """The control service."""
        return f"http://127.0.0.1:{self.control_port}"

    @property
    def market_url(self) -> str:
        """The marketplace."""
        return f"http://127.0.0.1:{self.market_port}"

    def environment(self) -> dict[str, str]:
        """Settings of the service: as by default, but for a clock that suits minutes in place of days."""
        own = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")}
        return {
            **own,
            "ECHO2_PORT": str(self.control_port),
            "ECHO2_STATE_DIR": str((FOLDER / "state").absolute()),
            "ECHO2_CACHE_DIR": str((FOLDER / "cache").absolute()),
            "ECHO2_MARKETPLACE_URL": self.market_url,
            "ECHO2_MARKETPLACE_API_KEY": self.market_key,
            "ECHO2_MARKETPLACE_CONTROL": "true",
            "ECHO2_ADMIN_KEY": self.admin_key,
            "ECHO2_WEBHOOK_SECRET": self.webhook_secret,
            "ECHO2_TICK_SECONDS": "1",
            "ECHO2_RECONCILE_SECONDS": "1",
            "ECHO2_OFFER_REFRESH_SECONDS": "2",
            "ECHO2_HEARTBEAT_SECONDS": "1",
            "ECHO2_HEARTBEAT_TIMEOUT_SECONDS": "20",
            "ECHO2_JOIN_TIMEOUT_SECONDS": "120",
            "ECHO2_MIN_LEASE_SECONDS": "20",
            "ECHO2_WIND_DOWN_SECONDS": "20",
            "ECHO2_SETTLE_SECONDS": "10",
            # One chain: as much uplink as one machine can take.
            "ECHO2_LEARNER_UPLINK_MBPS": "100",
        }


def _webhook_secret() -> str:
    import base64

    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def service(stage: Stage) -> Iterator[subprocess.Popen[bytes]]:
    """`echo2 serve` for as long as the block runs."""
    FOLDER.mkdir(exist_ok=True)
    shutil.rmtree(FOLDER / "state", ignore_errors=True)
    with (FOLDER / "serve.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "serve"],
            env=stage.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait_ready(stage, process)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_ready(stage: Stage, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{stage.control_url}/readyz", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    tail = (FOLDER / "serve.log").read_text(errors="replace")[-1500:]
    raise Unavailable(f"the control service did not start; {FOLDER}/serve.log ends with:\n{tail}")


class Incidents:
    """What happens to the job: a machine dies at a quarter of the steps, a price rises at the half."""

    def __init__(self, stage: Stage, market: httpx.Client, steps: int) -> None:
        self.stage = stage
        self.market = market
        self.kill_at = steps // 4
        self.price_at = steps // 2
        self.killed: str | None = None
        self.priced: str | None = None
        self.answered_at: datetime | None = None

    def update(self, job: dict[str, Any], fleet: dict[str, Any]) -> None:
        """Cause what is due."""
        active = [n for n in fleet["nodes"] if n["state"] == "active"]
        if self.killed is None and job["step"] >= self.kill_at and len(active) >= 2:
            # The head of a chain: those behind it must find another upstream.
            victim = min(active, key=lambda n: (n["chain_position"], n["id"]))
            unwrap(self.market.post(f"/_market/machines/{victim['machine_id']}/kill"))
            self.killed = victim["machine_id"]
        elif self.priced is None and self.killed is not None and job["step"] >= self.price_at and len(active) >= 2:
            self._raise_price(min(active, key=lambda n: n["rho"]))

    def _raise_price(self, node: dict[str, Any]) -> None:
        """Tell the service by webhook, then let the marketplace do it."""
        gpu_name = node["gpu_name"]
        price = usd(micros(node["price_per_hour"]) * 4)
        message = {
            "provider": "marketplace",
            "selector": {"gpu_name": gpu_name},
            "price_per_hour": price,
            "effective_at": datetime.now(UTC).isoformat(),
        }
        body = json.dumps(message)
        headers = self._sign(body)
        response = httpx.post(
            f"{self.stage.control_url}/v1/hooks/spot-price", content=body, headers=headers, timeout=10
        )
        unwrap(response)
        self.answered_at = datetime.now(UTC)
        self.priced = gpu_name
        unwrap(
            self.market.post(
                "/_market/price", json={"selector": {"gpu_name": gpu_name}, "min_bid": price, "dph_base": price}
            )
        )

    def _sign(self, body: str) -> dict[str, str]:
        from standardwebhooks import Webhook

        message_id, now = f"msg_{secrets.token_hex(8)}", datetime.now(UTC)
        signature = Webhook(self.stage.webhook_secret).sign(message_id, now, body)
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": signature,
            "content-type": "application/json",
        }


def run(*, steps: int, plain: bool) -> int:
    """Run the demo. Returns 0 only if the job succeeded and all promises were kept."""
    console = Console()
    stage = Stage(_free_port(), _free_port())
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(service(stage))
        http = stack.enter_context(client(stage.control_url, stage.admin_key))
        market = stack.enter_context(
            httpx.Client(
                base_url=stage.market_url,
                headers={"Authorization": f"Bearer {stage.market_key}"},
                timeout=10,
                trust_env=False,
            )
        )
        job = unwrap(http.post("/v1/jobs", json=job_spec(steps)))
        incidents = Incidents(stage, market, steps)
        feed = Feed(http, job["id"])
        _follow(feed, incidents, console, plain)
        summary = _summary(http, market, feed, job["id"], time.monotonic() - began)
        latency = _rerank_latency(feed.events, incidents)
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    faults = verdict(summary)
    _show(console, summary, faults, incidents, latency)
    return 1 if faults else 0


def _follow(feed: Feed, incidents: Incidents, console: Console, plain: bool) -> None:
    deadline = time.monotonic() + DEADLINE_S
    live = None if plain or not console.is_terminal else Live(console=console, refresh_per_second=4)
    shown = 0
    with live or ExitStack():
        while time.monotonic() < deadline:
            job, fleet = feed.read()
            incidents.update(job, fleet)
            if live is not None:
                live.update(view(job, fleet, feed.events))
            else:
                for event in feed.events[shown:]:
                    console.print(
                        f"step {job['step']:>3} {event['at'][11:19]} {event['kind']}: {event['message']}",
                        highlight=False,
                    )
                shown = len(feed.events)
            if job["status"] in FINAL_STATUSES:
                return
            time.sleep(0.5)
    raise Unavailable(f"the demo did not end within {DEADLINE_S:.0f} s")


def _summary(http: httpx.Client, market: httpx.Client, feed: Feed, job_id: str, wall: float) -> dict[str, Any]:
    job, fleet = feed.read()
    cost = unwrap(http.get(f"/v1/jobs/{job_id}/cost"))
    books = _books(market)
    steps = _all_steps(http, job_id)
    broadcast, totals = fleet["broadcast"], fleet["totals"]
    return {
        "status": job["status"],
        "steps": job["step"],
        "eval_initial": job["reward"]["eval_initial"],
        "eval_final": job["reward"]["eval"],
        "budget_usd": job["cost"]["budget_usd"],
        "spent_usd": job["cost"]["spent_usd"],
        "marketplace_bill_usd": usd(books["billed_micros"]),
        "leases_total": len(cost["leases"]),
        "leases_open": len(fleet["nodes"]),
        "machines_running": books["running"],
        "preemptions": totals["preemptions"],
        "price_events": totals["price_events"],
        "nodes_peak": totals["nodes_peak"],
        "chain_depth_max": broadcast["chain_depth_max"],
        "bytes_from_learner": broadcast["bytes_from_learner"],
        "bytes_from_peers": broadcast["bytes_from_peers"],
        "bubble_ratio": job["learner"]["bubble_ratio"],
        "dropped_ratio": job["learner"]["dropped_ratio"],
        "t_train_mean": sum(s["t_train"] for s in steps) / len(steps) if steps else None,
        "t_bcast_mean": broadcast["t_bcast_mean"],
        "wall_seconds": round(wall, 1),
    }


def _books(market: httpx.Client) -> dict[str, Any]:
    """The marketplace's own books, once the processes of destroyed machines had their grace to end."""
    deadline = time.monotonic() + 15
    while True:
        books: dict[str, Any] = unwrap(market.get("/_market/state"))
        if books["running"] == 0 or time.monotonic() > deadline:
            return books
        time.sleep(0.2)


def _all_steps(http: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        params: dict[str, str | int] = {"limit": 1000, **({"cursor": cursor} if cursor else {})}
        page = unwrap(http.get(f"/v1/jobs/{job_id}/steps", params=params))
        rows += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return rows


def _rerank_latency(events: list[dict[str, Any]], incidents: Incidents) -> float | None:
    """Seconds from the webhook's answer to the re-ranking event; negative if the event came first."""
    if incidents.answered_at is None:
        return None
    times = [datetime.fromisoformat(e["at"]) for e in events if e["kind"] == "reranked"]
    return min((t - incidents.answered_at).total_seconds() for t in times) if times else None


def verdict(s: dict[str, Any]) -> list[str]:
    """Promises that were not kept, in words."""
    spent, bill, budget = micros(s["spent_usd"]), micros(s["marketplace_bill_usd"]), micros(s["budget_usd"])
    gain = (s["eval_final"] or 0.0) - (s["eval_initial"] or 0.0)
    checks = {
        f"the job is {s['status']}, not succeeded": s["status"] == "succeeded",
        f"held-out accuracy rose by {gain:.3f}, less than 0.15": gain >= 0.15,
        f"spent ${usd(spent)} of ${usd(budget)}": spent <= budget,
        f"our ledger says ${usd(spent)}, the marketplace's bill ${usd(bill)}: more than 1 % apart": (
            bill > 0 and abs(spent - bill) <= 0.01 * bill
        ),
        f"{s['leases_open']} leases are open": s["leases_open"] == 0,
        f"{s['machines_running']} machines are running": s["machines_running"] == 0,
        f"at most {s['nodes_peak']} nodes worked at once, fewer than 3": s["nodes_peak"] >= 3,
    }
    return [words for words, kept in checks.items() if not kept]


def _show(
    console: Console, summary: dict[str, Any], faults: list[str], incidents: Incidents, latency: float | None
) -> None:
    table = Table(title="summary", show_header=False)
    for key, value in summary.items():
        table.add_row(key, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)
    console.print(
        f"machine killed: {incidents.killed or '-'}; price raised: {incidents.priced or '-'}", highlight=False
    )
    if latency is not None:
        console.print(f"webhook to re-ranking: {latency:.3f} s", highlight=False)
    for fault in faults:
        console.print(f"not kept: {fault}", style="red", highlight=False)
    if not faults:
        console.print("every promise was kept", style="green")
