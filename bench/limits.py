"""Runs a benchmark and says which of its figures missed what they should reach. `make bench-NAME CHECK=1`.

What the benchmark prints goes through as it comes, so that its JSON object stays the last line of stdout; the verdict
goes to stderr. Exits with 1 if a figure is missed or missing, else with the benchmark's own status.

Invariant: a figure that isn't there was not reached.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure may be, ends included."""

    most: float = math.inf
    least: float = -math.inf

    def __str__(self) -> str:
        return f"at most {self.most:g}" if math.isfinite(self.most) else f"at least {self.least:g}"


LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "activation": {
        "vs_optimum_max": Limit(1.01),
        "worse_than_prefix": Limit(0),
        "ms_5000_p95": Limit(50),
    },
    "agent": {
        "tokens_vs_engine": Limit(least=0.97),
        "swap_overhead_s": Limit(0.3),
        "wasted_share": Limit(0.05),
        "groups_lost": Limit(0),
    },
    "learner": {
        "step_vs_bare": Limit(1.05),
        "publish_block_share": Limit(0.01),
        "load_share": Limit(0.1),
    },
    "loop": {
        "bubble": Limit(0.05),
        "dropped": Limit(0.03),
        "pool_vs_need": Limit(1.2),
    },
    "price-wave": {
        "vs_never_swapping_mean": Limit(1),
        "swaps_per_node_2h_max": Limit(1),
        "bid_vs_never_swapping_mean": Limit(1),
        "bid_swaps_per_node_2h_max": Limit(1),
    },
    "soak-providers": {
        "leaked": Limit(0),
        "double_rents": Limit(0),
        "bill_diff_pct": Limit(0.1),
        "budget_passed": Limit(0),
        "creates_per_attempt_max": Limit(1),
    },
}


def misses(name: str, found: Mapping[str, Any]) -> list[str]:
    """What `found` misses, in words. Raises KeyError for a benchmark without limits."""
    told = []
    for figure, limit in LIMITS[name].items():
        value = found.get(figure)
        # NaN lies within nothing.
        if not isinstance(value, int | float) or not limit.least <= value <= limit.most:
            told.append(f"{figure} is {value!r}, should be {limit}")
    return told


def last_object(lines: Sequence[str]) -> dict[str, Any]:
    """The JSON object of the last line; an empty one if that is none."""
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def main(arguments: Sequence[str]) -> int:
    """`NAME COMMAND …`."""
    if len(arguments) < 2 or arguments[0] not in LIMITS:
        print(f"usage: bench.limits {{{','.join(LIMITS)}}} COMMAND …", file=sys.stderr)
        return 2
    name, command = arguments[0], arguments[1:]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is not None:
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line if line.strip() else last
    missed = misses(name, last_object([last]))
    for line in missed:
        print(f"{name}: {line}", file=sys.stderr)
    return process.returncode or (1 if missed else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
