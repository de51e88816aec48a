from __future__ import annotations

from app.fleet.model_files import announced, coming, stored, want, wanted
from app.protocol.hub import HubRef
from app.protocol.learner import AssetInfo
from app.protocol.node import AssetRef

REF = HubRef(repo="org/m", revision="0" * 40)
FILES = [
    AssetInfo(path="config.json", size=2, blake3="c" * 64),
    AssetInfo(path="model.safetensors", size=10**9, blake3="d" * 64, hub=REF),
]


def test_files_on_the_hub_are_wanted_once_one_did_not_come_and_by_later_learners_too() -> None:
    rows = announced([], FILES)
    assert not wanted(rows)
    failed = want(rows)
    assert [row.get("wanted", False) for row in failed] == [False, True]
    assert wanted(failed)
    assert want(failed) == failed
    assert announced(failed, FILES) == failed
    assert announced(rows, FILES) == rows


def test_files_of_the_store_are_never_wanted() -> None:
    rows = announced([], FILES[:1])
    assert not wanted(want(rows))
    assert not wanted(announced(want(announced([], FILES)), FILES[:1]))


def test_rows_are_what_nodes_read() -> None:
    read = [AssetRef(**row, url="u") for row in want(announced([], FILES))]
    assert [a.hub for a in read] == [None, REF]
    # As jobs have them that began before there was a Hub.
    assert AssetRef(path="a", size=1, blake3="", url="u").hub is None


def test_what_is_wanted_is_coming_until_the_learner_says_that_it_is_there() -> None:
    rows = announced([], FILES)
    assert not coming(rows)
    assert coming(want(rows))
    there = stored(want(rows))
    assert not coming(there)
    assert wanted(there), "a later learner has to look that it is so"
    assert coming(announced(there, FILES))
    assert not coming(stored(rows))
    assert not coming(want(there)), "another node that fails finds it"
