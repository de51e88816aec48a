"""Who has a twin, and what is read of the answers."""

from __future__ import annotations

from collections import Counter

import pytest

from app.fleet.twins import PARTNERS, Answer, answers, partner, place, wanted
from app.protocol.job import JobSpec
from app.protocol.trajectory import Rollout, encode, read_table


def test_twins_are_spread_over_the_others_and_who_has_one_waiting_has_no_second() -> None:
    known, meant = Counter({"a": 3, "b": 1}), {"c"}
    assert partner({"a", "b", "c"}, known, meant) == ["b"]
    assert partner({"a", "b", "c"}, known, meant) == ["a"]
    assert partner({"a", "b", "c"}, known, meant) == [], "whoever asks"
    assert (known, meant) == (Counter({"a": 4, "b": 2}), {"a", "b", "c"})


def test_few_earlier_partners_are_not_asked_alone() -> None:
    few = Counter({f"n{i}": 1 for i in range(PARTNERS - 1)})
    assert partner({*few, "new"}, few, set()) == ["new"]
    enough = Counter({f"n{i}": 1 for i in range(PARTNERS)})
    assert partner({*enough, "new"}, enough, set()) == ["n0"]
    gone = Counter({f"n{i}": 1 for i in range(PARTNERS)})
    assert partner({*list(gone)[1:], "new"}, gone, set()) == ["new"], "who has left is no partner any more"


def test_a_large_fleet_is_not_asked_as_a_whole() -> None:
    """Who says a little of everybody says enough of nobody."""
    others, known = {f"n{i:02}" for i in range(50)}, Counter[str]()
    for _ in range(300):
        partner(others, known, set())
    assert len(known) == PARTNERS
    assert set(known.values()) == {300 // PARTNERS}
    # One that has left is replaced, by one.
    gone, before = min(known), set(known)
    found = {name for _ in range(20) for name in partner(others - {gone}, known, set())}
    assert len(found - before) == 1
    assert gone not in found


def test_answers_have_their_rewards_by_sample_and_their_versions() -> None:
    def row(item: str, sample: int, reward: float, versions: list[int]) -> Rollout:
        starts = list(range(len(versions)))
        return Rollout(item, 7, sample, [1], [4, 5, 6], [-0.5] * 3, versions, starts, reward, "stop")

    table = read_table(encode([row("w", 1, 0.5, [3, 4]), row("v", 0, 1.0, [5]), row("w", 0, -1.0, [4])]))
    assert answers(table) == {"w": Answer(3, 4, (-1.0, 0.5)), "v": Answer(5, 5, (1.0,))}


def test_places_of_twins_are_beside_the_order() -> None:
    places = [place(ordinal) for ordinal in range(100)]
    assert max(places) < 0
    assert len(set(places)) == 100


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"trust": {"twin_share": 0}}, False),
        ({"batch": {"prune": "shuffle_r1"}}, False),
        ({"rewards": "learner", "learner": {"eval_by": "learner"}}, False),
        ({"rewards": "both"}, True),
    ],
)
def test_which_jobs_have_twins(change: dict[str, object], expected: bool) -> None:
    spec = {"model": "tiny", "task": {"name": "reasoning_gym", "params": {}}, "budget_usd": "1"}
    assert wanted(JobSpec.model_validate({**spec, **change})) is expected
