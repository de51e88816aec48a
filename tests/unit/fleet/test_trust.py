"""When audits convict a node."""

from __future__ import annotations

import math
import random

import pytest

from app.fleet.trust import MOST_Z, Standing, after, guilt, hopeless
from app.protocol.audits import Audit

BOUND = 0.03


def audit(**changes) -> Audit:
    return Audit(**{"node_id": "n", "work_item": "w", "version": 1, "verdict": "passed", "tokens": 100, **changes})


def convicted(*audits: Audit) -> tuple[int | None, str]:
    """Number of the audit that convicts, and why."""
    standing = Standing()
    for number, one in enumerate(audits, 1):
        standing = after(standing, one, BOUND)
        why = guilt(standing, one, BOUND)
        if why:
            return number, why
    return None, ""


def test_a_failed_audit_convicts_and_says_what_was_found():
    bad = audit(verdict="failed", fault="version", detail="v3 was never published")
    assert convicted(audit(), bad) == (2, "version: v3 was never published (work item w)")


@pytest.mark.parametrize(
    ("rms", "at"),
    [(0.02, None), (0.0299, None), (0.035, 14), (0.04, 7), (0.05, 3), (0.1, 3), (10.0, 3)],
)
def test_drift_above_the_bound_adds_up(rms: float, at: int | None):
    found, why = convicted(*[audit(rms=rms, verdict="suspect" if rms > BOUND else "passed")] * 1000)
    assert found == at
    assert at is None or (f"{rms:.3g} nats RMS" in why and "trust.max_logprob_rms" in why)


@pytest.mark.parametrize(("good", "at"), [(0, 3), (1, None), (5, None)])
def test_single_outliers_wear_off(good: int, at: int | None):
    outlier, usual = audit(rms=0.5, verdict="suspect"), audit(rms=0.01)
    # Two outliers in a row make 4.
    assert convicted(*([outlier, outlier, *[usual] * good, outlier] if good else [outlier] * 3))[0] == (
        at if good != 1 else 4
    )
    assert convicted(*[outlier, *[usual] * 3] * 300)[0] is None


def test_few_tokens_and_unclear_ones_say_nothing_of_drift():
    assert convicted(*[audit(rms=9.0, tokens=7)] * 100)[0] is None
    assert convicted(*[audit(rms=9.0, verdict="unclear", fault="logprobs")] * 100)[0] is None


def test_so_many_tokens_as_are_enough_say_something_of_drift():
    assert convicted(*[audit(rms=9.0, tokens=8, verdict="suspect")] * 100)[0] == 3


@pytest.mark.parametrize(
    ("standing", "z"),
    [
        (Standing(), 0.0),
        (Standing(surprise=-30.0, variance=25.0, jump=1.1), -5.0),  # a jump makes chance likelier
        (Standing(surprise=-32.0, variance=25.0, spread=100.0), -6.0),  # 2 of a standard deviation are left to engines
        (Standing(surprise=-1.0, variance=25.0, spread=100.0), 0.0),
        (Standing(surprise=9.0, excess=6.0, variance=15.0), 1.2),  # upwards only so far, and 5 nats at most
        (Standing(surprise=9.0, excess=8.0, variance=15.0, spread=100.0), 1.2),
        (Standing(surprise=9.0, excess=1.0, variance=15.0, spread=100.0), 0.0),
    ],
)
def test_how_far_tokens_are_from_what_they_claim_to_be(standing: Standing, z: float):
    assert standing.z == pytest.approx(z)


def test_what_convicts_of_another_temperature_is_more_than_six_deviations_and_is_told():
    odd = audit(surprise=-6.0, excess=-6.0, variance=1.0, jump=0.0)
    assert convicted(odd) == (None, ""), "six are not more than six"
    found, why = convicted(*[audit(surprise=-1.0, excess=-1.0, variance=1.0)] * 100)
    assert found == 37
    assert "likelier than tokens of the policy" in why
    assert "z = -6.1 after 37 audits" in why


def test_tokens_that_are_drawn_are_summed_over_all_audits():
    one = audit(surprise=-1.0, excess=-2.0, variance=3.0, spread=4.0, jump=0.5)
    other = audit(surprise=-10.0, excess=-20.0, variance=30.0, spread=40.0, jump=0.25)
    found = after(after(Standing(), one, BOUND), other, BOUND)
    assert (found.surprise, found.excess, found.variance, found.spread, found.jump) == (-11.0, -22.0, 33.0, 44.0, 0.5)


@pytest.mark.parametrize("sign", [-1, 1])
def test_tokens_that_are_too_likely_or_not_likely_enough_convict(sign: int):
    odd = audit(surprise=sign * 12.0, excess=sign * 12.0, variance=100.0, spread=95.0, jump=2.0)
    found, why = convicted(*[odd] * 200)
    assert found is not None
    assert 30 < found < 60, "12 − 0.02·95 in ten standard deviations an audit, and the price of the jumps"
    assert ("likelier" in why) == (sign < 0)


def test_a_token_that_nobody_would_expect_does_not_convict():
    """Nearly certain tokens, and one of 15 nats among them: its share of the variance is next to nothing."""
    odd = audit(surprise=15.0, excess=5.0, variance=0.01, spread=1.0, jump=0.1)
    assert convicted(odd)[0] is None
    assert convicted(audit(surprise=-0.3, excess=-0.3, variance=0.0, spread=0.0, jump=0.1))[0] is None


def test_a_small_bias_of_an_engine_never_convicts_however_long_it_lives():
    biased = audit(surprise=-1.0, excess=-1.0, variance=100.0, spread=90.0, jump=3.0)
    assert convicted(*[biased] * 20_000)[0] is None


@pytest.mark.parametrize("seed", range(5))
def test_honest_sums_stay_far_from_the_bound(seed: int):
    rng, standing, worst = random.Random(seed), Standing(), 0.0
    for _ in range(2000):
        x = rng.gauss(0, 10)
        standing = after(standing, audit(surprise=x, excess=x, variance=100.0, spread=95.0, jump=3.0), BOUND)
        worst = max(worst, abs(standing.z))
    assert worst < MOST_Z - 1


def test_what_is_shown_of_a_node_follows_its_audits():
    standing = after(after(Standing(), audit(rms=0.01, kl=1e-4), BOUND), audit(rms=0.02, kl=2e-4), BOUND)
    assert standing.rms == pytest.approx(0.012)
    assert standing.kl == pytest.approx(1.2e-4)
    assert (standing.audits, standing.passed, standing.failures) == (2, 2, 0)
    assert standing.drift == 0.0, "good audits are not saved up against bad ones"
    failed = after(after(standing, audit(verdict="suspect"), BOUND), audit(verdict="failed"), BOUND)
    assert (failed.audits, failed.passed, failed.failures) == (4, 2, 2)
    silent = after(standing, audit(tokens=0, verdict="unclear"), BOUND)
    assert (silent.rms, silent.audits, silent.passed) == (standing.rms, 3, 2)
    assert math.isclose(Standing(surprise=-30.0, variance=25.0).z, -6.0)


@pytest.mark.parametrize(
    ("convicted", "passed", "expected"), [(0, 0, False), (4, 0, False), (5, 0, True), (50, 1, False)]
)
def test_a_job_in_which_everybody_lies_is_at_fault_itself(convicted: int, passed: int, expected: bool):
    assert hopeless(convicted, passed) is expected


def test_three_held_out_answers_that_are_not_the_likeliest_convict_whatever_the_training_groups_say():
    odd = audit(heldout="greedy", verdict="suspect", fault="greedy", detail="1 of 5 tokens", work_item="j-eval-2-7")
    honest = [audit(rms=0.0)] * 50
    found, why = convicted(*honest, odd, *honest, odd, *honest, odd)
    assert found == 153
    assert why.startswith("greedy: ")
    assert "1 of 5 tokens, work item j-eval-2-7" in why


def test_an_outlier_among_many_greedy_answers_convicts_nobody_and_their_figures_say_nothing_of_drift():
    odd = audit(heldout="greedy", verdict="suspect", fault="greedy", rms=5.0)
    good = audit(heldout="greedy", rms=0.001)
    assert convicted(*[odd, *[good] * 60] * 50) == (None, "")
    standing = after(Standing(), odd, BOUND)
    assert (standing.drift, standing.rms, standing.ungreedy, standing.failures) == (0.0, None, 1.0, 1)


def test_greedy_answers_that_pass_wear_doubt_off_slowly():
    """Each takes a fiftieth off: who chooses otherwise in every eleventh answer is convicted by the fourth."""
    odd = audit(heldout="greedy", verdict="suspect", fault="greedy")
    ten = [audit(heldout="greedy")] * 10
    assert convicted(*[odd, *ten] * 10)[0] == 3 * 11 + 1
    standing = after(Standing(), audit(heldout="greedy"), BOUND)
    assert standing.ungreedy == 0.0, "nobody saves up for later"
    assert convicted(*[audit(heldout="greedy"), *ten] * 10, odd, odd, odd)[0] == 113
    doubted = after(Standing(), odd, BOUND)
    unclear = audit(heldout="greedy", verdict="unclear", fault="greedy")
    assert after(doubted, unclear, BOUND).ungreedy == 1.0, "what is not clear changes nothing"


def test_held_out_answers_end_no_probation():
    standing = Standing()
    for kind in ("greedy", "sampled"):
        standing = after(standing, audit(heldout=kind), BOUND)
    assert (standing.audits, standing.passed) == (2, 0)
    assert after(standing, audit(), BOUND).passed == 1


def test_a_file_that_can_not_be_read_is_no_answer_that_was_chosen_otherwise():
    lost = audit(heldout="greedy", verdict="suspect", fault="file", tokens=0)
    assert convicted(*[lost] * 10) == (None, "")
