"""Table and plot of a staleness study, from the runs that `bench.staleness` writes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

UNCORRECTED = "uncorrected"


def cells(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, int, list[dict[str, Any]]]]:
    """(schedule, loss, S, runs of all seeds), in order."""
    for schedule, loss, staleness in sorted({(r["schedule"], r["loss"], r["staleness"]) for r in runs}):
        same = [r for r in runs if (r["schedule"], r["loss"], r["staleness"]) == (schedule, loss, staleness)]
        yield schedule, loss, staleness, same


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: held-out reward (mean and range over seeds, and against the same loss and seeds at S = 1) and how far
    the policies were apart at the end."""
    lines = [
        "| schedule | loss | S | seeds | start | held-out reward | range | against S = 1 "
        "| ESS | mean (log r)² | clipped |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for schedule, loss, staleness, same in cells(runs):
        rewards = [r["heldout"] for r in same]
        mean = {k: statistics.fmean(r[k] for r in same) for k in ("start", "ess", "log_ratio_squared", "clip_share")}
        apart = ("–",) * 3 if loss == UNCORRECTED else tuple(f"{mean[k]:.3f}" for k in list(mean)[1:])
        reward = statistics.fmean(rewards)
        lines.append(
            f"| {schedule} | {loss} | {staleness} | {len(same)} | {mean['start']:.3f} | {reward:.3f} "
            f"| {min(rewards):.3f}–{max(rewards):.3f} | {against(runs, same)} | {' | '.join(apart)} |"
        )
    return "\n".join(lines) + "\n"


def against(runs: Sequence[dict[str, Any]], same: Sequence[dict[str, Any]]) -> str:
    """By how much the runs of one cell end above or below those of S = 1 with their loss and seeds, in per cent."""
    one = same[0]
    by_seed = {r["seed"]: r["heldout"] for r in runs if r["staleness"] == 1 and r["loss"] == one["loss"]}
    pairs = [(r["heldout"], by_seed[r["seed"]]) for r in same if r["seed"] in by_seed]
    if one["staleness"] == 1 or not pairs:
        return "–"
    return f"{100 * (sum(a for a, _ in pairs) / sum(b for _, b in pairs) - 1):+.1f} %"


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out reward against S, a line a loss, a panel a schedule; large points are means, small ones seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    schedules = sorted({r["schedule"] for r in runs})
    figure, panels = pyplot.subplots(
        1, len(schedules), squeeze=False, sharex=True, sharey=True, figsize=(5 * len(schedules), 4)
    )
    for panel, schedule in zip(panels[0], schedules, strict=True):
        shown = [c for c in cells(runs) if c[0] == schedule]
        for loss in sorted({c[1] for c in shown}):
            points = [(s, [r["heldout"] for r in same]) for _, name, s, same in shown if name == loss]
            (line,) = panel.plot([s for s, _ in points], [statistics.fmean(v) for _, v in points], "o-", label=loss)
            scattered = [(s, value) for s, values in points for value in values]
            panel.plot(*zip(*scattered, strict=True), ".", color=line.get_color())
        panel.axhline(statistics.fmean(r["start"] for r in runs), color="grey", linestyle=":", label="start")
        panel.set(title=schedule, xlabel="S", ylabel="held-out reward")
        panel.legend(loc="lower left" if schedule == "adaptive" else "best", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
