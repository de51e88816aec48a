"""Slow or stuck."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.phases import LIMITS_S, PATIENCE, Standing, advance, limit_s, stuck, words
from app.protocol.startup import StartPhase, StartProgress

T0 = 1_000_000.0
JOIN_S = 600.0
BEFORE_ACTIVE = [phase for phase in StartPhase if phase is not StartPhase.ACTIVE]


def told(phase: StartPhase, have: int | None = None, total: int | None = None, detail: str = "") -> StartProgress:
    return StartProgress(phase=phase, have=have, total=total, detail=detail)


def verdict(at: Standing, now: float, **more: object) -> str:
    return stuck(at, now, began=T0, join_s=JOIN_S, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", BEFORE_ACTIVE)
def test_a_phase_that_stands_still_for_its_limit_is_stuck_and_named(phase: StartPhase) -> None:
    at = advance(None, told(phase, detail="torch"), T0)
    limit = LIMITS_S[phase]
    assert verdict(at, T0 + limit) == ""
    why = verdict(at, T0 + limit + 1)
    assert f"stuck while {phase} torch" in why
    assert f"{limit + 1:.0f} s" in why


def test_every_phase_before_active_has_a_limit_and_active_has_none() -> None:
    assert set(LIMITS_S) == set(BEFORE_ACTIVE)
    assert verdict(advance(None, told(StartPhase.ACTIVE), T0), T0 + 1e9) == ""


def test_bytes_that_grow_keep_a_slow_start_alive_up_to_a_bound() -> None:
    at = advance(None, told(StartPhase.FETCHING, 0, 10**10), T0)
    now = T0
    while now < T0 + PATIENCE * JOIN_S:
        assert verdict(at, now) == ""
        now += 100
        at = advance(at, told(StartPhase.FETCHING, (at.have or 0) + 10**6, 10**10), now)
    assert verdict(at, T0 + PATIENCE * JOIN_S + 1).startswith("too slow: fetching")
    assert at.since == T0


def test_neither_words_nor_bytes_that_shrink_are_progress() -> None:
    at = advance(None, told(StartPhase.INSTALLING, 500), T0)
    at = advance(at, told(StartPhase.INSTALLING, 400, detail="again"), T0 + 100)
    at = advance(at, told(StartPhase.INSTALLING, 500, detail="and again"), T0 + 200)
    assert at.moved_at == T0
    assert at.detail == "and again"


def test_a_script_that_begins_again_and_again_is_stuck() -> None:
    at: Standing | None = None
    for at_s in range(0, 400, 20):
        for phase in (StartPhase.BOOTING, StartPhase.INSTALLING):
            at = advance(at, told(phase), T0 + at_s)
    assert at is not None
    assert "stuck while installing" in verdict(at, T0 + 400)


def test_an_engine_that_is_loaded_again_begins_anew() -> None:
    at = advance(advance(None, told(StartPhase.ACTIVE), T0), told(StartPhase.LOADING), T0 + 5000)
    assert (at.phase, at.since) == (StartPhase.LOADING, T0 + 5000)


def test_a_large_model_may_load_longer() -> None:
    small, large = limit_s(StartPhase.LOADING), limit_s(StartPhase.LOADING, 140 * 10**9)
    assert small is not None
    assert large is not None
    assert large > small + 1000
    at = advance(None, told(StartPhase.LOADING), T0)
    assert verdict(at, T0 + 1000) != ""
    assert verdict(at, T0 + 1000, model_bytes=140 * 10**9) == ""


def test_who_waits_for_the_first_version_is_not_stuck_while_there_is_none() -> None:
    at = advance(None, told(StartPhase.WARMING), T0)
    assert verdict(at, T0 + 10_000, waits=True) == ""
    assert "warming" in verdict(at, T0 + 10_000)


def test_the_words_hold_how_far_it_is() -> None:
    at = advance(None, told(StartPhase.FETCHING, 1_200_000_000, 3_400_000_000, "model.safetensors"), T0)
    assert words(at) == "fetching model.safetensors, 1.20 of 3.40 GB"


@given(st.lists(st.tuples(st.sampled_from(StartPhase), st.none() | st.integers(0, 10**12)), min_size=1, max_size=30))
def test_time_only_runs_out_for_what_does_not_move(steps: list[tuple[StartPhase, int | None]]) -> None:
    at: Standing | None = None
    for n, (phase, have) in enumerate(steps):
        before, now = at, T0 + n
        at = advance(at, told(phase, have), now)
        assert at.since <= at.moved_at <= now
        if before is not None and before.phase is not StartPhase.ACTIVE:
            assert at.phase.rank >= before.phase.rank
            moved = at.phase != before.phase or (at.have or 0) > (before.have or 0) or before.have != at.have
            assert (at.moved_at == now) == moved or at.moved_at == before.moved_at == now
