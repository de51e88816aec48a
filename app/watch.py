"""Live view of a job in a terminal.

Invariant: it only reads; ending the view ends nothing else, and a service that is started again does not end the view,
with a proxy before it or without. What others wrote (machines, tasks, the learner) is shown as it is: it neither drives
the terminal nor is taken for markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from app.client import Problem, away, client, unwrap
from app.protocol.errors import EchoError
from app.protocol.job import FINAL_STATUSES
from app.protocol.paging import encode

POLL_S = 1.0
SILENCE_S = 300.0
"""A service that was there and has not answered for so long is not merely being started again."""
SHOWN_EVENTS = 8
PROXY_SAYS_AWAY = (502, 503, 504)


def harmless(text: object) -> Text:
    """A line of text without control characters."""
    return Text("".join(c if c.isprintable() else "?" for c in str(text)))


def _num(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def job_panel(job: dict[str, Any]) -> Panel:
    """Step, reward, bubble and money of a job."""
    steps = job["stop"]["steps"]
    grid = Table.grid(padding=(0, 2))
    reward, learner, capacity, cost = job["reward"], job["learner"], job["capacity"], job["cost"]
    rows = [
        ("status", f"{job['status']} {job['status_reason']}"),
        ("step", f"{job['step']} of {steps or '∞'}   published v{job['published_version']}"),
        (
            "reward",
            f"train {_num(reward['train'])}   held-out {_num(reward['eval'])} "
            f"(began at {_num(reward['eval_initial'])})",
        ),
        (
            "learner",
            f"T_train {_num(learner['t_train'])} s   T_bcast {_num(learner['t_bcast'])} s   "
            f"bubble {_num(learner['bubble_ratio'])}   dropped {_num(learner['dropped_ratio'])}",
        ),
        (
            "capacity",
            f"pool {_num(capacity['mu_pool'], 4)}   held at {_num(capacity['mu_steered'], 4)}   "
            f"Eq. 2 target {_num(capacity['mu_target'], 4)} rollouts/s",
        ),
        (
            "money",
            f"spent ${cost['spent_usd']}   committed ${cost['committed_usd']}   budget ${cost['budget_usd']}   "
            f"${cost['usd_per_step'] or '-'} a step",
        ),
    ]
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), harmless(value))
    bar = ProgressBar(total=steps or 1, completed=min(job["step"], steps or 1))
    return Panel(Group(grid, bar), title=harmless(job["name"] or job["id"]), border_style="cyan")


def node_table(fleet: dict[str, Any]) -> Table:
    """Nodes, cheapest throughput first."""
    table = Table(expand=True, border_style="dim")
    for column in ("machine", "GPU", "state", "$/h", "ρ", "rollouts/s", "version", "chain", "upstream", "accepted"):
        table.add_column(column)
    for node in sorted(fleet["nodes"], key=lambda n: (n["rho"] is None, n["rho"])):
        chain = "-" if node["chain"] is None else f"{node['chain']}.{node['chain_position']}"
        version = "-" if node["policy_version"] is None else f"v{node['policy_version']}"
        cells = (
            node["machine_id"], node["gpu_name"], node["state"], node["price_per_hour"], _num(node["rho"]),
            _num(node["mu_measured"], 4), version, chain, (node["upstream"] or "-")[-10:], node["rollouts_accepted"],
        )  # fmt: skip
        table.add_row(*map(harmless, cells))
    return table


def view(job: dict[str, Any], fleet: dict[str, Any], events: list[dict[str, Any]]) -> Group:
    """The whole screen."""
    lines = [harmless(f"{e['at'][11:19]} {e['kind']}: {e['message']}") for e in events[-SHOWN_EVENTS:]]
    return Group(job_panel(job), node_table(fleet), Panel(Text("\n").join(lines), title="events", border_style="dim"))


class Feed:
    """Reads a job, its fleet and its new events."""

    def __init__(self, http: httpx.Client, job_id: str) -> None:
        self.http = http
        self.base = f"/v1/jobs/{job_id}"
        self.events: list[dict[str, Any]] = []

    def read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The job and its fleet, events gathered. Raises httpx.TransportError while the service is away."""
        job = unwrap(self.http.get(self.base))
        fleet = unwrap(self.http.get(f"{self.base}/fleet"))
        self._read_events()
        return job, fleet

    def _read_events(self) -> None:
        while True:
            params: dict[str, Any] = {"limit": 1000}
            if self.events:
                params["cursor"] = encode(int(self.events[-1]["id"]))
            page = unwrap(self.http.get(f"{self.base}/events", params=params))
            self.events.extend(page["items"])
            if page["next_cursor"] is None:
                return


def follow(
    feed: Feed,
    show: Callable[[RenderableType], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Show a job until it ends. Returns 0 only if it succeeded.

    Raises Unavailable when the service never answered, or has not for SILENCE_S; Problem for what it refuses.
    """
    screen: RenderableType | None = None
    answered = clock()
    while True:
        try:
            job, fleet = feed.read()
        except (httpx.TransportError, Problem) as error:
            if screen is None or clock() - answered >= SILENCE_S or not _is_away(error):
                raise _told(error, feed) from error
            show(Group(screen, Text(f"no answer from {feed.http.base_url}: {error}; trying again", style="yellow")))
        else:
            answered, screen = clock(), view(job, fleet, feed.events)
            del feed.events[:-SHOWN_EVENTS]
            show(screen)
            if job["status"] in FINAL_STATUSES:
                return 0 if job["status"] == "succeeded" else 1
        sleep(POLL_S)


def _is_away(error: httpx.TransportError | Problem) -> bool:
    return not isinstance(error, Problem) or error.status in PROXY_SAYS_AWAY


def _told(error: httpx.TransportError | Problem, feed: Feed) -> EchoError:
    return error if isinstance(error, Problem) else away(error, str(feed.http.base_url))


def watch(job_id: str) -> int:
    """Follow a job in this terminal until it ends. Returns 0 only if it succeeded. Raises as `follow`."""
    with client() as http, Live(console=Console(), refresh_per_second=4) as live:
        return follow(Feed(http, job_id), live.update)
