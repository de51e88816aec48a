"""Three nodes, one of which dies every minute: what of their work is wasted, and whether a group gets lost.

The service, the marketplace and the nodes are those of `make demo` (engine `transformers`: a machine that is replaced
every minute should not spend it starting). A machine is killed by the marketplace's control side, which ends all its
processes with SIGKILL. Wasted are the tokens that the nodes themselves count as thrown away, and what a killed node
had under way: all of the groups that were leased to it then, as if it had been about to finish them. Lost is a group
that was handed out, is older than what the last step trained on, and was neither trained on nor dropped for a reason.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx

from app.client import client, unwrap
from app.demo import job_spec
from app.demo.stage import FOLDER, Stage, free_port, service
from app.protocol.errors import Unavailable
from app.protocol.job import FINAL_STATUSES

NODES = 3
START_S = 240.0
END_S = 120.0


def spec() -> dict[str, Any]:
    """The demo's job over three nodes, without end."""
    job = job_spec(100_000)
    job["fleet"]["max_nodes"] = NODES
    job["learner"] |= {"eval_every": 100_000, "eval_prompts": 64}
    return job


def kills(minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Run it for so long; figures for the last line."""
    stage, under_way, killed = Stage(free_port(), free_port()), 0, 0
    with service(stage), client(stage.control_url, stage.admin_key) as http, _market(stage) as market:
        job_id = unwrap(http.post("/v1/jobs", json=spec()))["id"]
        _wait(lambda: len(_active(http, job_id)) == NODES, START_S, "three nodes at work")
        end = time.monotonic() + 60.0 * minutes
        while time.monotonic() < end:
            _pause(min(60.0, end - time.monotonic()))
            active = _active(http, job_id)
            if len(active) < 2 or time.monotonic() >= end:
                continue
            victim = active[killed % len(active)]
            unwrap(market.post(f"/_market/machines/{victim['machine_id']}/kill"))
            under_way += _leased_to(victim["id"])
            killed += 1
            say(f"killed {victim['gpu_name']} (node {victim['id']}) as number {killed}")
        unwrap(http.post(f"/v1/jobs/{job_id}/cancel"))
        _wait(lambda: unwrap(http.get(f"/v1/jobs/{job_id}"))["status"] in FINAL_STATUSES, END_S, "the job's end")
        fleet = unwrap(http.get(f"/v1/jobs/{job_id}/fleet"))
    return {"kills": killed, **_figures(fleet["totals"], under_way)}


def _figures(totals: dict[str, Any], under_way: int) -> dict[str, Any]:
    with closing(_database()) as database:
        done, groups_lost = _groups(database)
    generated = totals["tokens_generated"]
    # What went with a killed node is reckoned here, more strictly than by the service.
    wasted = sum(n for reason, n in totals["tokens_wasted"].items() if reason != "node_lost")
    per_group = generated / max(1, done)
    share = (wasted + under_way * per_group) / (generated + under_way * per_group)
    return {
        "groups_done": done,
        "tokens_generated": generated,
        "tokens_wasted": totals["tokens_wasted"],
        "groups_under_way_at_kills": under_way,
        "wasted_share": round(share, 4),
        "groups_lost": groups_lost,
    }


def _groups(database: sqlite3.Connection) -> tuple[int, int]:
    """Groups that came to an end, and those that should have and did not."""
    [done] = database.execute(
        "SELECT COUNT(*) FROM work_items WHERE status IN ('trained', 'accepted', 'dropped')"
    ).fetchone()
    [last] = database.execute("SELECT MAX(trained_step) FROM work_items").fetchone()
    # Twins have negative ones: they are at no place of the order.
    places = "FROM work_items WHERE ordinal >= 0"
    [oldest] = database.execute(f"SELECT MIN(ordinal) {places} AND trained_step = ?", (last,)).fetchone()
    [open_] = database.execute(
        f"SELECT COUNT(*) {places} AND status IN ('leased', 'pending') AND ordinal < ?", (oldest,)
    ).fetchone()
    [rows, highest] = database.execute(f"SELECT COUNT(*), MAX(ordinal) {places}").fetchone()
    return int(done), int(open_) + int(highest) + 1 - int(rows)


def _database() -> sqlite3.Connection:
    [path] = (FOLDER / "state").glob("*.db")
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


def _leased_to(node_id: str) -> int:
    with closing(_database()) as database:
        query = "SELECT COUNT(*) FROM work_items WHERE node_id = ? AND status = 'leased'"
        return int(database.execute(query, (node_id,)).fetchone()[0])


def _market(stage: Stage) -> httpx.Client:
    headers = {"Authorization": f"Bearer {stage.market_key}"}
    return httpx.Client(base_url=stage.market_url, headers=headers, timeout=10, trust_env=False)


def _active(http: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    return [n for n in unwrap(http.get(f"/v1/jobs/{job_id}/fleet"))["nodes"] if n["state"] == "active"]


def _pause(seconds: float) -> None:
    time.sleep(max(0.0, seconds))


def _wait(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Unavailable(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.5)
