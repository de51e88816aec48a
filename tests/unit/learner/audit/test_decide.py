"""Which groups are audited, and what is made of what is found."""

from __future__ import annotations

import dataclasses
import random

import pytest

from app.learner.audit.custody import Case, Custody
from app.learner.audit.decide import Look, judge, route, share
from app.learner.audit.proofs import Match
from app.learner.audit.statistics import NOTHING, Figures
from app.learner.buffer import Group
from app.protocol.audits import Audit, Fault, Verdict
from app.protocol.trust_spec import TrustSpec
from tests.unit.learner.samples import group

TRUST = TrustSpec()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"passed": 0}, "first"),
        ({"passed": 7}, "first"),
        ({"passed": 7, "under_way": True}, "first"),
        ({}, "train"),
        ({"draw": 0.021}, "train"),
        ({"draw": 0.019}, "beside"),
        ({"draw": 0.039, "interruptible": True}, "beside"),
        ({"draw": 0.041, "interruptible": True}, "train"),
        ({"version_passed": False}, "first"),
        ({"version_passed": False, "under_way": True}, "wait"),
        ({"version_passed": False, "draw": 0.0}, "first"),
    ],
)
def test_route(changes, expected: str):
    usual = {"passed": 8, "version_passed": True, "under_way": False, "interruptible": False, "draw": 0.5}
    assert route(TRUST, **{**usual, **changes}) == expected


def test_a_job_may_want_less_or_more():
    usual = {"passed": 0, "version_passed": False, "under_way": False, "interruptible": True, "draw": 0.5}
    assert route(TrustSpec(probation=0, each_version=False), **usual) == "train"
    assert route(TrustSpec(probation=0, each_version=False, audit_share=1.0), **usual) == "beside"
    none = TrustSpec(probation=0, each_version=False, audit_share=0)
    assert route(none, **{**usual, "draw": 0.0}) == "train"
    assert share(TrustSpec(audit_share=0.7), True) == 1.0
    assert TrustSpec(probation=0, each_version=False, audit_share=0).off
    assert not any(TrustSpec(**one).off for one in ({"probation": 0}, {"audit_share": 0}, {"each_version": False}))


def figures(rms: float, median: float = 0.0, tokens: int = 50) -> Figures:
    return dataclasses.replace(NOTHING, tokens=tokens, rms=rms, median=median)


FINE = Look(figures(0.01), 0.0, 0, None)


@pytest.mark.parametrize(
    ("changes", "verdict", "fault"),
    [
        ({}, "passed", ""),
        ({"reward_off": None}, "passed", ""),
        ({"reward_off": 1e-7}, "passed", ""),
        ({"reward_off": 1e-5}, "failed", "reward"),
        ({"reward_off": float("nan")}, "failed", "reward"),
        ({"reward_off": 1.0, "missing": 3}, "failed", "reward"),
        ({"reward_off": 1.0, "foreign": True}, "failed", "reward"),
        ({"never": 3}, "failed", "version"),
        ({"never": 3, "foreign": True}, "unclear", "version"),
        ({"missing": 3}, "unclear", ""),
        ({"figures": figures(0.031, 0.02)}, "suspect", "logprobs"),
        ({"figures": figures(0.16, 0.02)}, "suspect", "logprobs"),
        ({"figures": figures(0.16, 0.031)}, "failed", "logprobs"),
        ({"figures": figures(0.16, 0.031), "foreign": True}, "unclear", "logprobs"),
        ({"figures": figures(0.16, 0.1, 7)}, "passed", ""),
        ({"figures": figures(0.16, 0.1, 8)}, "failed", "logprobs"),
        ({"proofs": (Match(4, 4), Match(3, 3))}, "passed", ""),
        ({"proofs": (Match(4, 4), Match(4, 4))}, "failed", "proof"),
        ({"copies": 3}, "failed", "copied"),
        ({"copies": 3, "foreign": True}, "unclear", "copied"),
        ({"reward_off": None, "unscored": "it hangs"}, "unclear", ""),
        ({"reward_off": None, "unscored": "it hangs", "copies": 3}, "failed", "copied"),
        ({"reward_off": None, "unscored": "it hangs", "figures": figures(0.16, 0.031)}, "failed", "logprobs"),
    ],
)
def test_judge(changes, verdict: str, fault: str):
    found = judge(dataclasses.replace(FINE, **changes), 0.03)
    assert found[:2] == (verdict, fault)
    assert bool(found[2]) == (verdict != "passed")
    assert said(*found[:2]).clean == (fault == "")


def said(verdict: Verdict, fault: Fault = "") -> Audit:
    """An audit with this outcome."""
    return Audit(node_id="n", work_item="w", version=0, verdict=verdict, fault=fault)


def case(name: str, version: int = 0, node: str = "n", **options) -> Case:
    return Case(dataclasses.replace(group(name, version=version), node=node), **options)


def test_a_node_is_on_probation_until_its_groups_have_passed():
    custody = Custody(TRUST, lambda: 0.9)
    cases = [case(f"w{i}") for i in range(9)]
    assert [custody.receive(c) for c in cases[:8]] == ["first"] * 8
    for c in cases[:7]:
        assert custody.settled(c, True, said("passed")) == []
    assert custody.receive(cases[8]) == "first"
    custody.settled(cases[7], True, said("suspect", "logprobs"))
    assert custody.receive(case("x")) == "first", "one that did not pass is not counted"
    custody.settled(cases[8], True, said("passed"))
    assert custody.receive(case("y")) == "train"


def test_what_a_learner_counted_before_is_not_asked_again():
    custody = Custody(TRUST, lambda: 0.9)
    custody.known("n", 8)
    custody.known("n", 3)
    assert custody.receive(case("a", 4)) == "first"
    assert custody.receive(case("other", node="m")) == "first"
    custody.settled(case("a", 4), True, said("passed"))
    assert custody.receive(case("b", 4)) == "train"


def test_under_a_new_version_all_wait_for_the_first():
    custody = Custody(TRUST, lambda: 0.9)
    custody.known("n", 100)
    first, second, third = (case(f"w{i}", 5) for i in range(3))
    assert [custody.receive(c) for c in (first, second, third)] == ["first", "wait", "wait"]
    assert custody.waiting == 2
    again = custody.settled(first, True, said("suspect", "logprobs"))
    assert again == [second, third]
    assert [custody.receive(c) for c in again] == ["first", "wait"], "the next one is looked at"
    assert custody.settled(second, True, said("passed")) == [third]
    assert custody.receive(third) == "train"
    assert custody.receive(case("w4", 6)) == "first"


def test_a_version_that_can_not_be_looked_at_holds_nobody_up():
    custody = Custody(TRUST, lambda: 0.9)
    custody.known("n", 100)
    custody.receive(case("a", 5))
    custody.settled(case("a", 5), True, said("unclear"))
    assert custody.receive(case("b", 5)) == "train"
    foreign = case("c", 6, foreign=True)
    custody.receive(foreign)
    custody.settled(foreign, True, said("unclear", "logprobs"))
    assert custody.receive(case("d", 6)) == "first"


def test_a_group_with_unknown_rewards_speaks_for_no_other_of_its_version():
    custody = Custody(TRUST, lambda: 0.9)
    custody.known("n", 100)
    first, second = case("a", 5), case("b", 5)
    assert [custody.receive(c) for c in (first, second)] == ["first", "wait"]
    assert custody.settled(first, True, said("unclear"), scored=False) == [second]
    assert custody.receive(second) == "first"


def test_what_others_began_does_not_speak_for_the_node_that_finished_it():
    custody = Custody(TRUST, lambda: 0.9)
    custody.known("n", 100)
    foreign = case("c", 6, foreign=True)
    custody.receive(foreign)
    custody.settled(foreign, True, said("passed"))
    assert custody.receive(case("d", 6)) == "first"


def test_what_others_began_is_looked_at_before_it_is_trained_on_whoever_hands_it_in():
    custody = Custody(TRUST, lambda: 0.9)
    custody.known("n", 100)
    custody.receive(case("a", 5))
    custody.settled(case("a", 5), True, said("passed"))
    assert custody.receive(case("own", 5)) == "train"
    assert custody.receive(case("begun elsewhere", 5, foreign=True)) == "first"
    off = Custody(TrustSpec(audit_share=0.0, probation=0, each_version=False), lambda: 0.9)
    assert off.receive(case("begun elsewhere", 5, foreign=True)) == "train", "the job wants nothing looked at"


def test_a_group_is_of_the_newest_version_that_it_claims():
    mixed = Case(dataclasses.replace(group("w", version=[3, 7, 5, 3]), node="n"))
    assert mixed.version == 7
    custody = Custody(TRUST, lambda: 0.9)
    custody.known("n", 100)
    custody.receive(case("a", 3))
    custody.settled(case("a", 3), True, said("passed"))
    assert custody.receive(mixed) == "first"


def test_nothing_is_left_of_a_banished_node():
    custody = Custody(TRUST, lambda: 0.9)
    custody.known("n", 100)
    for c in (case("a", 5), case("b", 5)):
        custody.receive(c)
    assert custody.banish(["n", "m"]) == ["b"]
    assert custody.banish(["n"]) == []
    assert custody.waiting == 0
    assert custody.banished("n")
    assert not custody.banished("o")


@pytest.mark.parametrize(("interruptible", "expected"), [(False, 0.02), (True, 0.04)])
def test_so_many_are_chosen_and_no_pattern_says_which(interruptible: bool, expected: float):
    rng = random.Random(1)
    custody = Custody(TRUST, rng.random)
    custody.known("n", 100)
    custody.receive(case("first"))
    custody.settled(case("first"), True, said("passed"))
    found = [custody.receive(case(f"w{i}", interruptible=interruptible)) for i in range(20_000)]
    assert set(found) == {"beside", "train"}
    assert found.count("beside") / len(found) == pytest.approx(expected, abs=0.004)
    assert isinstance(case("x").group, Group)
