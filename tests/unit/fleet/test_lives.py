"""Expected lives: the guess, then what our own leases went through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.lives import LONGEST_H, PRIOR_H, Past, Record, learn, mean_life


def record(machine: str, hours: float, cut: float, gpu: str = "RTX 4090", provider: str = "vastai") -> Record:
    return Record(provider, gpu, machine, Past(hours, cut))


def test_without_experience_the_guess_holds() -> None:
    lives = learn([], True)
    assert lives.of("vastai", "RTX 4090", "1") == PRIOR_H[True]
    assert learn([], False).of("vastai", "RTX 4090", "1") == PRIOR_H[False]


def test_a_host_that_ends_after_ten_minutes_is_scored_down_and_others_less() -> None:
    """CASES 66."""
    lives = learn([record("bad", 10 / 60, 1), record("good", 4.0, 0)], True)
    bad, good = lives.of("vastai", "RTX 4090", "bad"), lives.of("vastai", "RTX 4090", "good")
    new, elsewhere = lives.of("vastai", "RTX 4090", "new"), lives.of("runpod", "RTX 4090", "new")
    assert bad < new < good
    assert elsewhere == PRIOR_H[True]
    often = learn([record("bad", 20 / 6, 20)], True).of("vastai", "RTX 4090", "bad")
    assert often == pytest.approx(10 / 60, abs=0.05), "in the end what was seen is what is expected"


def test_gpu_models_and_providers_have_their_own_lives() -> None:
    lives = learn([record("1", 0.5, 4), record("2", 20.0, 1, gpu="A100 SXM4")], True)
    assert lives.of("vastai", "RTX 4090", "9") < lives.of("vastai", "A100 SXM4", "9")
    assert lives.of("vastai", "RTX 4090", "9") < lives.of("vastai", "L4", "9") < lives.of("vastai", "A100 SXM4", "9")


def test_a_life_that_we_ended_is_no_interruption() -> None:
    assert mean_life(2.0, Past(3.0, 0.0)) == 5.0
    assert mean_life(2.0, None) == 2.0
    assert learn([record("1", 1000.0, 0)], True).of("vastai", "RTX 4090", "1") == LONGEST_H


@given(hours=st.floats(0, 1e4), cut=st.integers(0, 100), prior=st.floats(0.1, 10))
def test_more_interruptions_never_lengthen_a_life(hours: float, cut: int, prior: float) -> None:
    assert mean_life(prior, Past(hours, cut + 1)) <= mean_life(prior, Past(hours, cut))
    assert mean_life(prior, Past(hours + 1, cut)) >= mean_life(prior, Past(hours, cut))
