"""The summary of a demo, and which promises were kept.

Invariant: every number is read from the service or from the marketplace's own books.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from app.client import unwrap
from app.demo.incidents import Incidents
from app.protocol.base import micros, usd
from app.watch import Feed


def summarise(http: httpx.Client, market: httpx.Client, feed: Feed, job_id: str, wall: float) -> dict[str, Any]:
    """What `.demo/summary.json` holds: dollars as text with six places, sizes in bytes, times in seconds."""
    job, fleet = feed.read()
    cost = unwrap(http.get(f"/v1/jobs/{job_id}/cost"))
    books = _books(market)
    steps = pages(http, f"/v1/jobs/{job_id}/steps")
    own = _own_count(pages(http, f"/v1/jobs/{job_id}/ledger"))
    broadcast, totals = fleet["broadcast"], fleet["totals"]
    return {
        "status": job["status"],
        "steps": job["step"],
        "eval_initial": job["reward"]["eval_initial"],
        "eval_final": job["reward"]["eval"],
        "budget_usd": job["cost"]["budget_usd"],
        "spent_usd": job["cost"]["spent_usd"],
        "spent_own_count_usd": usd(own),
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
        "versions_published": broadcast["versions"],
        "deltas_published": broadcast["deltas"],
        "deltas_applied": broadcast["deltas_applied"],
        "bytes_saved_by_deltas": broadcast["bytes_saved"],
        "last_publish": _publish(broadcast["publishes"]),
        "bubble_ratio": job["learner"]["bubble_ratio"],
        "dropped_ratio": job["learner"]["dropped_ratio"],
        "t_train_mean": sum(s["t_train"] for s in steps) / len(steps) if steps else None,
        "t_bcast_mean": broadcast["t_bcast_mean"],
        "wall_seconds": round(wall, 1),
    }


def _publish(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What the newest version weighed and how it was sent, in words."""
    if not rows:
        return None
    row = rows[0]
    if row["sent"] == "full":
        return f"v{row['version']}: {row['bytes']} bytes in full; {row['note']}"
    return f"v{row['version']}: {row['bytes']} bytes, delta of {row['delta_bytes']} ({row['delta_share']:.1%})"


def _books(market: httpx.Client) -> dict[str, Any]:
    """The marketplace's own books, once the processes of destroyed machines had their grace to end."""
    deadline = time.monotonic() + 15
    while True:
        books: dict[str, Any] = unwrap(market.get("/_market/state"))
        if books["running"] == 0 or time.monotonic() > deadline:
            return books
        time.sleep(0.2)


def _own_count(entries: Sequence[Mapping[str, Any]]) -> int:
    """Micro-dollars of the ledger without the corrections by the marketplace's bill: those have no length."""
    return sum(micros(e["usd"]) for e in entries if e["from"] != e["to"])


def pages(http: httpx.Client, path: str) -> list[dict[str, Any]]:
    """All rows of a list."""
    rows: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        params: dict[str, str | int] = {"limit": 1000, **({"cursor": cursor} if cursor else {})}
        page = unwrap(http.get(path, params=params))
        rows += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return rows


def rerank_latency(events: list[dict[str, Any]], incidents: Incidents) -> float | None:
    """Seconds from the webhook's answer to the re-ranking event; negative if the event came first."""
    if incidents.answered_at is None:
        return None
    times = [datetime.fromisoformat(e["at"]) for e in events if e["kind"] == "reranked"]
    return min((t - incidents.answered_at).total_seconds() for t in times) if times else None


def verdict(s: dict[str, Any], nodes: int = 3) -> list[str]:
    """Promises that were not kept, in words. `nodes`: so many have to have worked at once."""
    spent, bill, budget = micros(s["spent_usd"]), micros(s["marketplace_bill_usd"]), micros(s["budget_usd"])
    own = micros(s["spent_own_count_usd"])
    gain = (s["eval_final"] or 0.0) - (s["eval_initial"] or 0.0)
    checks = {
        f"the job is {s['status']}, not succeeded": s["status"] == "succeeded",
        f"held-out accuracy rose by {gain:.3f}, less than 0.15": gain >= 0.15,
        f"spent ${usd(spent)} of ${usd(budget)}": spent <= budget,
        f"our ledger says ${usd(spent)}, the marketplace's bill ${usd(bill)}: more than 1 % apart": (
            bill > 0 and abs(spent - bill) <= 0.01 * bill
        ),
        f"before the bill corrected it our ledger said ${usd(own)}, the bill ${usd(bill)}: more than 1 % apart": (
            bill > 0 and abs(own - bill) <= 0.01 * bill
        ),
        f"{s['leases_open']} leases are open": s["leases_open"] == 0,
        f"{s['machines_running']} machines are running": s["machines_running"] == 0,
        f"at most {s['nodes_peak']} nodes worked at once, fewer than {nodes}": s["nodes_peak"] >= nodes,
    }
    return [words for words, kept in checks.items() if not kept]


def show(
    console: Console, summary: dict[str, Any], faults: list[str], incidents: Incidents, latency: float | None
) -> None:
    """Print the summary, what happened to the job, and each promise that was not kept."""
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
