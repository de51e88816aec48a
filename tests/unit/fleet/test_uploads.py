"""Places for files that nodes were given and have not used."""

from __future__ import annotations

from app.fleet.uploads import EACH, MEMORY_S, MOST_KNOWN, SPARE, Places, most_unused


def test_a_place_counts_until_its_file_has_come_or_it_is_old() -> None:
    places = Places()
    places.given("n", "a", 0.0)
    places.given("n", "b", 1.0, ["x", "y"])
    places.given("m", "c", 1.0)
    assert (places.unused("n", 2.0), places.unused("m", 2.0), places.unused("o", 2.0)) == (2, 1, 0)
    # The answer to a group that came with a place went elsewhere: that place is of no use any more.
    places.used("n", "elsewhere", ["y"])
    assert places.unused("n", 2.0) == 1
    places.used("n", "a", [])
    places.used("n", "a", [])
    places.used("m", "a", [])
    assert (places.unused("n", 2.0), places.unused("m", 2.0)) == (0, 1)
    assert places.unused("m", 1.0 + MEMORY_S) == 0


def test_places_grow_with_the_work() -> None:
    assert (most_unused(0), most_unused(10)) == (SPARE, SPARE + EACH * 10)


def test_nodes_that_are_gone_are_forgotten() -> None:
    places = Places()
    for n in range(MOST_KNOWN):
        places.given(f"n{n}", "a", 0.0)
    places.given("last", "a", MEMORY_S + 1)
    assert len(places._nodes) == 1
