"""Rows, table, last line and plot of the broadcast benchmark. Pure but for printing and drawing.

Invariant: every number in the table and in the plot is in the JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.broadcast_cases import MB, Result

PLAIN = {"chain": "chains", "star": "star", "shardcast": "SHARDCAST"}
"""Transport → name of the case in which nothing goes wrong."""


def row(result: Result) -> dict[str, Any]:
    """A result as the JSON shows it. The time of a node that is slow or lies doesn't count in its own row."""
    case, seconds = result.case, result.seconds()
    return {
        "case": case.name,
        "transport": case.transport,
        "n": case.n,
        "rtt_ms": case.rtt_ms,
        "bytes": case.size,
        "seconds": round(seconds, 3),
        "limit_seconds": round(case.limit_s, 3),
        "vs_limit": round(seconds / case.limit_s, 3),
        "cpu_seconds_per_node": round(result.cpu_s, 3),
        "told": sorted({f"{e['host']}: {e['event']} {e['source']}" for e in result.told}),
    }


def summary(rows: Sequence[Mapping[str, Any]], delta: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    """The last line of the output; null is what was not run."""

    def ratio(transport: str, n: int) -> float | None:
        times = {r["transport"]: r["seconds"] for r in rows if r["n"] == n and r["case"] == PLAIN[r["transport"]]}
        return round(times[transport] / times["chain"], 2) if {transport, "chain"} <= set(times) else None

    return {
        "rows": list(rows),
        "star_over_chain_9": ratio("star", 9),
        "star_over_chain_16": ratio("star", 16),
        "shardcast_over_chain_9": ratio("shardcast", 9),
        "delta": delta,
        **more,
    }


def show(console: Console, found: Mapping[str, Any]) -> None:
    """The table for people."""
    table = Table("case", "N", "RTT ms", "MB", "seconds", "limit", "× limit", "CPU s/node", "told")
    for r in found["rows"]:
        numbers = [f"{r[key]:.2f}" for key in ("seconds", "limit_seconds", "vs_limit", "cpu_seconds_per_node")]
        table.add_row(
            r["case"], str(r["n"]), f"{r['rtt_ms']:g}", f"{r['bytes'] / MB:g}", *numbers, ", ".join(r["told"])
        )
    console.print(table)
    for key in ("delta", "training", "memory", "not_run"):
        if found.get(key):
            console.print(f"{key}:", found[key])
    console.print("1-minute load of this machine:", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def plot(found: Mapping[str, Any], path: Path) -> None:
    """T_bcast against N: chains, star, SHARDCAST and the limit, out of the run's JSON."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    limit: dict[int, float] = {}
    for transport, name in PLAIN.items():
        rows = [r for r in found["rows"] if r["transport"] == transport and r["case"] == name]
        points = sorted((r["n"], r["seconds"]) for r in rows)
        limit |= {r["n"]: r["limit_seconds"] for r in rows}
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.plot(*zip(*sorted(limit.items()), strict=True), color="grey", linestyle="--", label="limit M / B_w")
    axes.set(xlabel="nodes", ylabel="seconds until the last node has it", yscale="log")
    axes.set_yticks([5, 10, 20, 50, 100, 200], labels=["5", "10", "20", "50", "100", "200"])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    # usage: python -m bench.broadcast_report OUTPUT.txt PLOT.png, the output being what a run printed
    plot(json.loads(Path(sys.argv[1]).read_text().splitlines()[-1]), Path(sys.argv[2]))
