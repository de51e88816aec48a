"""The options of a staleness study."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from app.learner.optimizer import BETAS
from app.protocol.learner_spec import LossName
from bench.staleness_report import UNCORRECTED
from bench.staleness_variants import STEP_SIZES

LOSSES = (*get_args(LossName), UNCORRECTED)


def options(description: str) -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(prog="bench.staleness", description=description)
    parser.add_argument("--out", type=Path, default=Path("build/staleness"), help="folder for runs, table and plot")
    parser.add_argument("--cache", type=Path, default=Path(".echo2/cache"), help="folder of the tiny model")
    default = ["ppo_clip", "dppo", "m2po", "m2po_clip", UNCORRECTED]
    parser.add_argument("--losses", type=listed(str, LOSSES), default=default, help=f"of {', '.join(LOSSES)}")
    parser.add_argument("--schedules", type=listed(str, ("const", "echo", "adaptive")), default=["echo"])
    parser.add_argument(
        "--staleness", type=listed(int, range(1, 1001)), default=[1, 2, 3, 6, 11, 20], help="values of S"
    )
    parser.add_argument("--adaptive", type=_bounds, default=[11], help="bounds of an adaptive S, or none")
    parser.add_argument("--max-mismatch-kl", type=float, help="limit of an adaptive S; default: the job's")
    parser.add_argument("--adaptive-start", type=_first, help="where an adaptive S begins; default: as a job's does")
    parser.add_argument("--seeds", type=listed(int), default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--scale-rewards", choices=("group", "none", "batch"), help="default: the loss's own")
    parser.add_argument("--learner", type=_fields, default={}, help="fields of learner: gac=true,gac_low=0.3")
    parser.add_argument("--step-size", choices=STEP_SIZES, default="constant", help="what the rate is scaled by")
    parser.add_argument("--beta1", type=_beta, default=BETAS[0], help="AdamW's first beta")
    parser.add_argument("--eval-prompts", type=int, default=512)
    parser.add_argument("--report-only", action="store_true", help="table and plot of the runs that are there")
    return parser


def listed(kind: Callable[[str], Any], allowed: Sequence[Any] | None = None) -> Callable[[str], list[Any]]:
    """A comma-separated option."""

    def parse(text: str) -> list[Any]:
        values = [kind(part) for part in text.split(",")]
        for value in values:
            if (allowed is not None and value not in allowed) or (kind is int and value < 0):
                raise argparse.ArgumentTypeError(
                    f"{value!r} is not one of {', '.join(map(str, allowed or ['0, 1, …']))}"
                )
        return values

    return parse


def _first(text: str) -> int:
    (value,) = listed(int, range(1, 1001))(text)
    return int(value)


def _beta(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and below 1")
    return float(text)


def _bounds(text: str) -> list[Any]:
    return [] if text == "none" else listed(int, range(1, 1001))(text)


def _fields(text: str) -> dict[str, Any]:
    """`gac=true,gac_low=0.3` as fields of `learner`. Raises ValueError."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not NAME=VALUE")
        try:
            found[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip()] = value
    return found
