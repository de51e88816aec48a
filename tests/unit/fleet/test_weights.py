"""Which engines hold something else than others of their kind under the same version."""

from __future__ import annotations

import pytest

from app.fleet.weights import BEHIND, MOST_JOBS, Told
from app.protocol.node import Weights

KIND = "vllm 0.32.0, bfloat16, H200, arguments none, 1 workers"


def word(digest: str, version: int = 3, engine: str = KIND) -> Weights:
    return Weights(version=version, engine=engine, digest=digest * 64)


@pytest.mark.parametrize(
    ("digests", "odd"),
    [("aaa", None), ("ab", ""), ("aba", "n1"), ("aabb", ""), ("aabbc", ""), ("aaabbc", "n3 n4 n5"), ("abc", "")],
)
def test_who_stands_against_a_majority_of_at_least_two_is_odd(digests: str, odd: str | None) -> None:
    told = Told()
    found = [told.take("job", f"n{i}", word(digest)) for i, digest in enumerate(digests)][-1]
    if odd is None:
        assert found is None
        return
    assert found is not None
    assert " ".join(found.odd) == odd
    assert found.nodes == tuple(f"n{i}" for i in range(len(digests)))
    assert all(node in found.message for node in found.odd or found.nodes)
    assert found.data == {"version": 3, "nodes": list(found.nodes), "odd": list(found.odd)}
    assert ("than" in found.message) == bool(odd)


def test_how_many_stand_against_the_odd_one_is_told() -> None:
    told = Told()
    found = [told.take("job", f"n{i}", word(digest)) for i, digest in enumerate("aaab")][-1]
    assert found is not None
    assert found.message == "under version 3 n3 holds other weights than 3 engines of its kind"


def test_others_hold_the_same_numbers_in_other_forms() -> None:
    told = Told()
    assert told.take("job", "n0", word("a")) is None
    assert told.take("job", "n1", word("b", engine="vllm 0.33.0")) is None
    assert told.take("job", "n2", word("b", version=4)) is None
    assert told.take("another", "n3", word("b")) is None
    assert told.take("job", "n4", None) is None
    assert told.take("job", "n5", word("b")) is not None


def test_it_is_told_once_and_again_in_the_next_version() -> None:
    told = Told()
    told.take("job", "n0", word("a"))
    assert told.take("job", "n1", word("b")) is not None
    assert told.take("job", "n1", word("b")) is None
    assert told.take("job", "n0", word("a")) is None
    assert told.take("job", "n0", word("a", version=4)) is None
    assert told.take("job", "n1", word("b", version=4)) is not None
    assert told.take("job", "n1", word("a", version=4)) is None, "loaded again, it is as the others"


def test_what_is_known_stays_little() -> None:
    told = Told()
    told.take("job", "n0", word("a", version=0))
    told.take("job", "n1", word("a", version=BEHIND))
    assert told.take("job", "n2", word("b", version=0)) is not None, "it is not so far behind"
    told.take("job", "n1", word("a", version=BEHIND + 1))
    assert told.take("job", "n2", word("b", version=0)) is None
    for n in range(2 * MOST_JOBS):
        told.take(f"job{n}", "n0", word("a"))
    assert len(told._jobs) == MOST_JOBS
