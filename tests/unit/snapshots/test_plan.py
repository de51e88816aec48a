"""The way to a version: never more bytes than the whole, never from a base that isn't held; what it needs is kept."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.snapshots.plan import Offer, Plan, cheapest, keyframe, newest, useful

FULL = 1000


def delta(version: int, base: int, size: int = 10) -> Offer:
    return Offer(version, base, size)


CHAIN = [delta(v, v - 1) for v in range(1, 10)]


@pytest.mark.parametrize(
    ("held", "wholes", "deltas", "steps"),
    [
        ([], [9], [], [(9, None)]),
        ([8], [9], CHAIN, [(9, 8)]),
        ([6, 5], [9], CHAIN, [(7, 6), (8, 7), (9, 8)]),
        ([6], [9], [delta(7, 6, 400), delta(8, 7, 400), delta(9, 8, 400)], [(9, None)]),
        ([6], [9], [delta(7, 6), delta(9, 8)], [(9, None)]),  # one is lost
        ([], [7], CHAIN, [(7, None), (8, 7), (9, 8)]),  # a keyframe and deltas
        ([8], [], CHAIN, [(9, 8)]),
        ([], [], CHAIN, None),
        ([5], [9], [delta(9, 5), delta(8, 7)], [(9, 5)]),  # versions between were never published
        ([9], [9], CHAIN, []),
        ([8], [9], [delta(9, 9)], [(9, None)]),
        ([12], [9], [delta(9, 12)], [(9, None)]),  # a delta leads to a newer version, never back
    ],
)
def test_the_cheapest_way(
    held: list[int], wholes: list[int], deltas: list[Offer], steps: list[tuple[int, int | None]] | None
) -> None:
    plan = cheapest(9, held=held, wholes=dict.fromkeys(wholes, FULL), deltas=deltas)
    assert steps == (None if plan is None else [(s.version, s.base) for s in plan.steps])


VERSIONS = st.integers(0, 12)
OFFERS = st.lists(
    st.builds(lambda base, on, size: Offer(base + on, base, size), VERSIONS, st.integers(1, 3), st.integers(1, 1500)),
    unique_by=lambda o: o.version,
)


@given(VERSIONS, st.sets(VERSIONS), st.dictionaries(VERSIONS, st.integers(1, 2000)), OFFERS)
def test_every_plan_holds_together(version: int, held: set[int], wholes: dict[int, int], deltas: list[Offer]) -> None:
    plan = cheapest(version, held=held, wholes=wholes, deltas=deltas)
    if plan is None:
        assert version not in held
        assert version not in wholes
        return
    at = {*held}
    for step in plan.steps:
        assert step.base is None or step.base in at
        assert step in deltas or wholes[step.version] == step.bytes
        at.add(step.version)
    assert version in at
    assert version not in wholes or version in held or plan.bytes <= wholes[version]


@given(st.integers(-1, 12), st.sets(VERSIONS), st.dictionaries(VERSIONS, st.integers(1, 2000)), OFFERS)
def test_the_newest_that_can_be_reached_is_announced_and_nobody_goes_back(
    after: int, held: set[int], wholes: dict[int, int], deltas: list[Offer]
) -> None:
    held = {v for v in held if v <= after}
    plan = newest(after, held=held, wholes=wholes, deltas=deltas)
    reached = -1 if plan is None else plan.steps[-1].version
    assert plan is None or plan.steps[0].version > after
    assert all(v <= max(reached, after) for v in wholes), "a whole version is always within reach"


@pytest.mark.parametrize(
    ("after", "held", "wholes", "deltas", "steps"),
    [
        (5, [], {5: 10, 6: FULL}, [delta(6, 5)], [(6, None)]),  # though 5 and the delta would be fewer bytes
        (5, [4], {}, [delta(5, 4), delta(6, 5)], None),  # who says that he has 5 isn't led to it once more
        (5, [5], {6: FULL}, [delta(6, 5)], [(6, 5)]),
        (6, [6], {6: FULL}, CHAIN[:6], None),
    ],
)
def test_nothing_that_the_one_who_asks_has_is_announced_to_him(
    after: int, held: list[int], wholes: dict[int, int], deltas: list[Offer], steps: list[tuple[int, int | None]] | None
) -> None:
    plan = newest(after, held=held, wholes=wholes, deltas=deltas)
    assert steps == (None if plan is None else [(s.version, s.base) for s in plan.steps])


@pytest.mark.parametrize(
    ("whole", "deltas", "most", "kept"),
    [
        (FULL, CHAIN, 12, set(range(1, 10))),
        (FULL, CHAIN, 3, {9, 8, 7}),
        (25, CHAIN, 12, {9, 8}),
        (20, CHAIN, 12, {9}),  # both together are no shorter than the whole
        (FULL, [delta(9, 8), delta(7, 6)], 12, {9}),  # what leads to 8 is lost
        (FULL, [delta(9, 8), Offer(8, None, 10)], 12, {9}),
        (FULL, CHAIN[:8], 12, set()),
        (FULL, CHAIN, 0, set()),
    ],
)
def test_of_the_chain_that_ends_at_the_version_as_much_is_kept_as_pays(
    whole: int, deltas: list[Offer], most: int, kept: set[int]
) -> None:
    assert useful(9, whole, deltas, most) == kept


@given(OFFERS, VERSIONS, st.integers(1, 3000), st.integers(0, 12))
def test_what_is_kept_is_a_chain_that_is_shorter_than_the_whole(
    deltas: list[Offer], version: int, whole: int, most: int
) -> None:
    kept = useful(version, whole, deltas, most)
    by_version = {o.version: o for o in deltas}
    chain = sorted(kept, reverse=True)
    assert len(kept) <= most
    assert sum(by_version[v].bytes for v in kept) < whole or not kept
    assert [by_version[v].base for v in chain][:-1] == chain[1:], "one leads to the next"
    if kept:
        assert chain[0] == version
        oldest = by_version[chain[-1]].base
        assert oldest is not None
        plan = cheapest(version, held=[oldest], wholes={version: whole}, deltas=[by_version[v] for v in kept])
        assert plan == Plan(tuple(by_version[v] for v in reversed(chain))), "who has the oldest base takes the chain"


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 20))
def test_there_is_a_whole_version_among_any_k_in_the_store(pays: list[bool], every: int) -> None:
    """And from it an unbroken chain leads to the newest."""
    stored: int | None = None
    since = 0
    wholes: list[int] = []
    for version, delta_pays in enumerate(pays):
        base = version - 1 if delta_pays and version else None
        if keyframe(base, stored=stored, since=since, every=every):
            wholes.append(version)
            since = 0
        else:
            since += 1
        stored = version
    assert not pays or wholes[0] == 0
    ends = [*wholes, len(pays)]
    assert all(b - a <= every for a, b in itertools.pairwise(ends))


def test_one_in_so_many_versions_is_stored_whole_when_every_delta_pays() -> None:
    assert [keyframe(3, stored=3, since=since, every=4) for since in range(4)] == [False, False, False, True]


def test_after_a_failed_upload_the_store_gets_a_whole_version() -> None:
    """The delta's base isn't there."""
    assert not keyframe(4, stored=4, since=1, every=16)
    assert keyframe(5, stored=4, since=1, every=16)
    assert keyframe(None, stored=5, since=1, every=16)
