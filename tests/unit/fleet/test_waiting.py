"""What becomes of a node's word for its speed, heartbeat by heartbeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from app.fleet import waiting
from app.fleet.believed import LEAST
from app.fleet.waiting import FORGET_S, MOST_KNOWN, Waits
from app.protocol.node import Heartbeat, NodeState
from app.storage.models import Node

SAID = 10.0
"""Rollouts per second, by the word of the node."""


@dataclass
class Beating:
    """A node whose heart beats every ten seconds, handing in as much as the test says."""

    node: Node = field(default_factory=lambda: Node(id="n", state=NodeState.ACTIVE, waited_s=0.0, rollouts_delivered=0))
    news: list[float] = field(default_factory=list)

    def beat(self, rollouts: int, *, passed_s: float = 10.0, waited_s: float = 0.0, **said: Any) -> None:
        self.node.rollouts_delivered += rollouts
        beat = Heartbeat.model_validate(
            {"state": "active", "policy_version": 1, "rollouts_per_s": SAID, "tokens_per_s": 100 * SAID, **said}
        )
        told = waiting.believe(self.node, beat, passed_s=passed_s, waited_s=waited_s)
        if told is not None:
            self.news.append(told)

    def share(self) -> float:
        assert self.node.mu_measured is not None
        return self.node.mu_measured / SAID


def beating(count: int, rollouts: int, **beat: Any) -> Beating:
    made = Beating()
    for _ in range(count):
        made.beat(rollouts, **beat)
    return made


def test_who_hands_in_what_it_says_is_believed_and_nothing_is_told() -> None:
    found = beating(5 * LEAST, round(10 * SAID))
    assert (found.node.mu_measured, found.node.tokens_per_s, found.news) == (SAID, 100 * SAID, [])


def test_who_hands_in_a_tenth_is_cut_to_that_in_both_rates_and_told_of_once() -> None:
    found = beating(5 * LEAST, round(SAID))
    assert 0.1 <= found.share() <= 0.16, "1.25 times what it hands in, and something for what is on its way"
    assert found.node.tokens_per_s == pytest.approx(100 * SAID * found.share())
    assert found.news == [SAID]
    assert found.node.evidence is not None
    assert found.node.evidence["doubted"] is True


@pytest.mark.parametrize(("part", "told"), [(0.9, False), (0.6, False), (0.35, True)])
def test_who_says_a_little_much_is_not_told_of(part: float, told: bool) -> None:
    found = beating(5 * LEAST, round(10 * SAID * part))
    assert bool(found.news) is told


def test_seconds_of_waiting_count_wherever_they_were_counted() -> None:
    """Five of ten on record by another replica, four by this one: in the last it makes all that it hands in."""
    found = Beating()
    for _ in range(5 * LEAST * 10):
        found.node.waited_s += 5.0
        found.beat(round(SAID), waited_s=4.0)
        assert found.node.waited_s == 0.0, "each second once"
    assert found.share() == 1.0


@pytest.mark.parametrize(("passed_s", "share"), [(60.0, 0.2), (61.0, 1.0)])
def test_a_longer_silence_of_the_service_is_not_held_against_a_node(passed_s: float, share: float) -> None:
    found = beating(5 * LEAST, round(10 * SAID), passed_s=10.0)
    for _ in range(5 * LEAST):
        found.beat(round(10 * SAID), passed_s=passed_s)
    assert found.share() == pytest.approx(share, abs=0.06)


def test_time_in_which_a_node_is_not_active_is_not_held_against_it() -> None:
    found = beating(5 * LEAST, round(10 * SAID))
    found.node.state = NodeState.DRAINING
    for _ in range(5 * LEAST):
        found.beat(0)
    assert found.share() == 1.0


def test_a_self_test_is_shown_in_tokens_and_rents_nothing() -> None:
    found = Beating()
    found.beat(0, probed=True)
    assert (found.node.mu_measured, found.node.tokens_per_s) == (None, 100 * SAID)
    assert found.node.evidence is None
    found.beat(0, rollouts_per_s=None, tokens_per_s=None)
    assert (found.node.mu_measured, found.node.tokens_per_s) == (None, None)


def test_a_request_that_was_answered_in_full_counts_for_as_long_as_it_took() -> None:
    waits = Waits()
    waits.note("a", 10.0, 10.5, short=False)
    assert waits.take("a") == pytest.approx(0.5)
    waits.note("a", 20.0, 20.5, short=True)
    assert waits.take("a") == pytest.approx(0.8), "and a little more if it got less than it asked for"


def test_requests_that_end_before_another_one_add_nothing() -> None:
    waits = Waits()
    for began, ended in ((10.0, 20.0), (11.0, 12.0), (12.0, 20.0)):
        waits.note("a", began, ended, short=False)
    assert waits.take("a") == pytest.approx(10.0)


@pytest.mark.parametrize(("seconds", "due"), [(11.5, False), (12.0, True)])
def test_waiting_is_put_on_record_before_it_would_be_held_against_a_node(seconds: float, due: bool) -> None:
    waits = Waits()
    waits.note("a", 0.0, seconds, short=False)
    assert waits.due("a") is due


def test_of_many_nodes_only_those_that_were_long_silent_are_forgotten() -> None:
    waits = Waits()
    waits.note("silent", 0.0, 1.0, short=False)
    for number in range(MOST_KNOWN - 1):
        waits.note(f"n{number}", FORGET_S, FORGET_S + 1, short=False)
    waits.note("last", FORGET_S + 1, FORGET_S + 2, short=False)
    assert [waits.take(name) for name in ("silent", "n0", "last")] == [0.0, 1.0, 1.0]
