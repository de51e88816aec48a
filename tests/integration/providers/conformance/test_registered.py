"""Harnesses are found, and excuse themselves only from what there is, for a reason that was looked at here too."""

from __future__ import annotations

import pytest

from . import test_conformance, test_conformance_reads
from .harness import Registered, registered

ALL = ("vastai", "ec2", "runpod", "gcp", "static")
SCENARIOS = {
    "rent": "test_rent_list_release_gone",
    "refuse": "test_a_refused_create_leaves_nothing",
    "unknown outcome, made": "test_a_create_with_a_lost_answer_is_one_request_and_is_found_by_its_label",
    "unknown outcome, not made": "test_a_create_that_never_arrived_is_one_request_and_proved_absent",
    "lag": "test_get_sees_an_instance_while_the_list_lags",
    "vanish": "test_an_instance_that_vanished_is_gone",
    "pre-emption": "test_an_instance_that_was_taken_away_does_not_look_alive",
    "release under failure": "test_a_release_that_fails_says_so_and_may_be_sent_again",
    "release with a bad key": "test_a_wrong_key_releases_nothing_and_says_so",
    "foreign instances": "test_foreign_instances_are_listed_and_told_apart",
    "incomplete listing": "test_a_listing_with_a_hole_is_never_passed_as_complete",
    "unreadable listing": "test_a_listing_that_can_t_be_read_raises",
}
"""What nobody may leave out."""
EXCUSED = {("static", "lag"), ("static", "incomplete listing")}
"""Its list asks the machines themselves, one by one: it can't lag, and has no pages."""


def _tests() -> set[str]:
    return {n for m in (test_conformance, test_conformance_reads) for n in vars(m) if n.startswith("test_")}


def test_every_harness_is_found_once() -> None:
    assert sorted(one.name for one in registered()) == sorted(ALL)


@pytest.mark.parametrize("one", registered(), ids=lambda one: one.name)
def test_a_harness_excuses_itself_only_from_scenarios_that_exist(one: Registered) -> None:
    assert set(one.not_applicable) <= _tests()
    assert all(one.not_applicable.values())


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_bad_day_is_played_over_every_adapter(name: str) -> None:
    assert SCENARIOS[name] in _tests()
    without = {(one.name, name) for one in registered() if SCENARIOS[name] in one.not_applicable}
    assert without <= EXCUSED
