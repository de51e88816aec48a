"""Whether a benchmark that misses its figures is seen to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.limits import LIMITS, Limit, main, misses

GOOD = {"tokens_vs_engine": 0.99, "swap_overhead_s": 0.3, "wasted_share": 0.0, "groups_lost": 0}


def printing(*lines: str, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({chr(10).join(lines)!r}); raise SystemExit({status})"]


def test_figures_within_their_limits_pass(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", *printing("turn 1", json.dumps(GOOD))]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == ["turn 1", json.dumps(GOOD)], "what it prints is the benchmark's own"
    assert err == ""


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tokens_vs_engine": 0.96}, "at least 0.97"),
        ({"swap_overhead_s": 0.31}, "at most 0.3"),
        ({"groups_lost": 1}, "groups_lost is 1"),
        ({"wasted_share": None}, "wasted_share is None"),
        ({"wasted_share": float("nan")}, "wasted_share is nan"),
    ],
)
def test_a_missed_figure_fails_and_is_named(
    change: dict[str, float], word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["agent", *printing(json.dumps(GOOD | change))]) == 1
    assert word in capfd.readouterr().err


@pytest.mark.parametrize("lines", [[""], ["no figures"], ["[1, 2]"]])
def test_a_benchmark_without_figures_fails(lines: list[str]) -> None:
    assert main(["learner", *printing(*lines)]) == 1


def test_a_benchmark_that_fails_keeps_its_status() -> None:
    assert main(["agent", *printing(json.dumps(GOOD), status=3)]) == 3


def test_who_asks_for_an_unknown_one_is_told_which_there_are(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["agnet", "true"]) == 2
    assert "agent" in capfd.readouterr().err


def test_every_limit_is_of_a_target_of_the_makefile() -> None:
    makefile = Path(__file__).parents[3].joinpath("Makefile").read_text()
    for name in LIMITS:
        assert f"bench.limits {name} " in makefile


def test_limits_include_their_ends() -> None:
    assert misses("loop", {"bubble": 0.05, "dropped": 0.03, "pool_vs_need": 1.2}) == []
    assert str(Limit(least=0.97)) == "at least 0.97"
