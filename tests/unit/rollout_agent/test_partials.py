"""Groups that change hands: nothing unchecked is used, nothing is lost without being counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.protocol import partial
from app.protocol.errors import Gone
from app.protocol.trajectory import Rollout
from app.protocol.work import PartialRef, WorkItem
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.groups import Begun, Group
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.partials import Partials, encoded
from app.tasks.base import Prompt
from tests.unit.rollout_agent.fake_stream import Desk
from tests.unit.rollout_agent.fakes import Clock, problem, rows_of

PROMPT = [112, 49]


class Bench:
    """Partials at a desk that has one stored file."""

    def __init__(self, *, floor: int | None = None, max_upload_bytes: int = 10**6, **answers: Any) -> None:
        self.desk = Desk(**answers)
        self.clock = Clock()
        self.ledger = WorkLedger(self.clock)
        self.partials = Partials(
            self.desk.wire.client(self.clock),
            self.ledger,
            max_tokens=8,
            max_upload_bytes=max_upload_bytes,
            quantisation=lambda: None,
            oldest_admissible=lambda: floor,
            vocabulary=lambda: 100,
        )

    async def taken_up(self, data: bytes, prompt_ids: list[int] = PROMPT, **changes: Any) -> Begun:
        """What is taken up of an item whose beginning is this file."""
        reference = self.desk.reference(data) | changes
        item = WorkItem(
            id="w1", prompt_index=1, group_size=3, seed=0, deadline_s=60, partial=PartialRef.model_validate(reference)
        )
        return await self.partials.taken_up(item, prompt_ids)


def begun(item: str = "w1", **more: Any) -> bytes:
    """A file with samples 0 (cut) and 2 (finished) of an item."""
    row: dict[str, Any] = {
        "work_item": item,
        "prompt_index": 1,
        "sample_index": 0,
        "prompt_ids": PROMPT,
        "completion_ids": [65, 66],
        "logprobs": [-0.5, -0.25],
        "span_versions": [4, 5],
        "span_starts": [0, 1],
        "reward": 0.0,
        "finish_reason": "abort",
    }
    return partial.encode_partial(
        [Rollout(**(row | more)), Rollout(**(row | more | {"sample_index": 2, "finish_reason": "stop"}))]
    )


def two(first: dict[str, Any], second: dict[str, Any]) -> bytes:
    """A file with samples 0 and 2 that differ from those of `begun`."""
    rows = rows_of(begun())
    return partial.encode_partial([replace(rows[0], **first), replace(rows[1], **second)])


def group(item: str = "w1", *, split: str = "train", tokens: int = 2, version: int = 4, foreign: int = 0) -> Group:
    """A group of two: one sample cut, of the other nothing."""
    work = WorkItem.model_validate(
        {"id": item, "prompt_index": 1, "group_size": 2, "seed": 0, "deadline_s": 60, "split": split}
    )
    cut = Completion([65] * tokens, [-0.5] * tokens, "abort", (Span(version, 0),) if tokens else ())
    return Group(work, Prompt(1, "p1", {}), PROMPT, 1060.0, [cut, None], foreign_tokens=foreign)


async def test_what_another_node_has_begun_is_taken_up() -> None:
    bench = Bench()
    first, second, third = await bench.taken_up(begun())
    assert first == Completion([65, 66], [-0.5, -0.25], "abort", [Span(4, 0), Span(5, 1)])
    assert second is None
    assert third is not None
    assert third.finish_reason == "stop"
    assert not bench.ledger.tokens_wasted


@pytest.mark.parametrize(
    ("data", "changes", "tokens"),
    [
        (begun(), {"blake3": "0" * 64}, 0),
        (begun(), {"size": len(begun()) + 1}, 0),
        (begun(), {"size": len(begun()) - 1}, 0),
        (begun(), {"size": 10**6 + 1}, 0),
        (begun(), {"url": "http://store/elsewhere"}, 0),
        (begun()[:-20], {}, 0),
        (b"no Parquet", {}, 0),
        (begun("w2"), {}, 0),
        (begun(prompt_index=2), {}, 0),
        (begun(logprobs=[0.5, 0.5]), {}, 0),
        (begun(quantisation="int8"), {}, 0),
        (begun(completion_ids=[65] * 8, logprobs=[-1.0] * 8), {}, 0),
        (begun(completion_ids=[65, 100]), {}, 0),
        (two({"completion_ids": [65, 100]}, {}), {}, 0),
        (two({}, {"completion_ids": [100, 65]}), {}, 0),
        (begun(prompt_ids=[112, 50]), {}, 4),
    ],
)
async def test_what_is_not_right_is_not_used_and_counted(data: bytes, changes: dict[str, Any], tokens: int) -> None:
    bench = Bench()
    assert await bench.taken_up(data, **changes) == ()
    assert bench.ledger.errors == {"partial_refused": 1}
    assert bench.ledger.tokens_wasted == ({"partial_refused": tokens} if tokens else {})


@pytest.mark.parametrize(("floor", "used"), [(4, True), (5, False)])
async def test_what_is_too_old_is_not_gone_on_with(floor: int, used: bool) -> None:
    bench = Bench(floor=floor)
    assert bool(await bench.taken_up(begun())) == used
    assert bench.ledger.tokens_wasted == ({} if used else {"stale": 4})
    assert not bench.ledger.errors


async def test_one_sample_that_is_too_old_makes_the_whole_group_too_old() -> None:
    bench = Bench(floor=4)
    assert await bench.taken_up(two({"span_versions": [3, 5]}, {})) == ()
    assert bench.ledger.tokens_wasted == {"stale": 4}


async def test_an_item_that_nobody_has_begun_is_sampled_from_scratch() -> None:
    bench = Bench()
    fresh = WorkItem(id="w0", prompt_index=1, group_size=3, seed=0, deadline_s=60)
    assert await bench.partials.begun([fresh], [PROMPT]) == {}
    assert (bench.ledger.errors, bench.ledger.tokens_wasted) == ({}, {})


@pytest.mark.parametrize(("spare", "used"), [(0, True), (-1, False)])
async def test_a_file_larger_than_any_that_may_be_handed_over_is_not_fetched(spare: int, used: bool) -> None:
    bench = Bench(max_upload_bytes=len(begun()) + spare)
    assert bool(await bench.taken_up(begun())) is used
    assert bench.ledger.errors == ({} if used else {"partial_refused": 1})


def fetched(bench: Bench) -> list[str]:
    """The files that are asked for, by their addresses, one at a time."""
    asked: list[str] = []
    download, busy = bench.partials._client.download, asyncio.Lock()

    async def counted(url: str, max_bytes: int) -> bytes:
        assert not busy.locked(), "several of the largest would not fit into memory"
        async with busy:
            asked.append(url)
            await asyncio.sleep(0)
            return await download(url, max_bytes)

    bench.partials._client.download = counted  # type: ignore[method-assign]
    return asked


async def test_a_file_with_several_groups_is_fetched_once() -> None:
    bench = Bench()
    asked = fetched(bench)
    first, second = begun(), begun(span_versions=[3, 5])
    assert all(await asyncio.gather(*(bench.taken_up(first) for _ in range(5))))
    assert await bench.taken_up(first), "a group that comes later"
    assert len(asked) == 1
    assert await bench.taken_up(second)
    assert len(asked) == 2
    assert await bench.taken_up(first)
    assert len(asked) == 3, "no more than one file is kept in memory"


async def test_files_whose_groups_come_in_turn_are_fetched_once_each() -> None:
    """As they do when two nodes had to stop at once: groups are leased in the order of their prompts."""
    bench = Bench()
    asked = fetched(bench)
    files = {f"http://store/{n}": begun(span_versions=[n, 5]) for n in range(3)}
    for url, data in files.items():
        bench.desk.reference(data, url.rpartition("/")[2])
    turns = [bench.taken_up(data, url=url, key=url) for _ in range(4) for url, data in files.items()]
    assert all(await asyncio.gather(*turns))
    assert sorted(asked) == sorted(files)


async def test_a_file_that_does_not_come_is_waited_for_once_by_all_of_its_groups() -> None:
    bench = Bench()
    asked = fetched(bench)
    gone = [bench.taken_up(begun(), url="http://store/elsewhere") for _ in range(5)]
    assert await asyncio.gather(*gone) == [()] * 5
    assert (len(asked), bench.ledger.errors) == (1, {"partial_refused": 5})
    assert await bench.taken_up(begun()), "another time it may be there"


async def test_a_group_that_is_given_up_takes_the_file_from_no_other() -> None:
    bench = Bench()
    asked = fetched(bench)
    first, second = (asyncio.create_task(bench.taken_up(begun())) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second
    assert (first.cancelled(), len(asked)) == (True, 1)


async def test_words_of_an_environment_are_no_tokens_that_anybody_sampled() -> None:
    words: dict[str, Any] = {
        "completion_ids": [65, 66, 67],
        "logprobs": [-0.5, -0.25, 0.0],
        "generated": [True, True, False],
    }
    for floor, prompt, reason in ((6, PROMPT, "stale"), (None, [1], "partial_refused")):
        bench = Bench(floor=floor)
        assert await bench.taken_up(begun(**words), prompt) == ()
        assert bench.ledger.tokens_wasted == {reason: 4}


async def test_groups_are_handed_over_and_are_no_longer_ours() -> None:
    bench = Bench()
    bench.ledger.leased({"w1": 1060.0, "w2": 1060.0, "exam": 1060.0, "empty": 1060.0})
    groups = [group("w1"), group("w2"), group("exam", split="heldout"), group("empty", tokens=0)]
    await bench.partials.hand_over(groups)
    assert {row.work_item for row in rows_of(bench.desk.wire.files[0])} == {"w1", "w2"}
    assert [body["work_items"] for body in bench.desk.wire.of("partials")] == [["w1", "w2"]]
    assert bench.desk.wire.of("uploads") == [{"policy_version": 4}]
    assert sorted(bench.ledger.unfinished()) == ["empty", "exam"]
    assert bench.ledger.tokens_wasted == {"interrupted": 2}, "an evaluation is not passed on"
    # But others may begin it at once: what nobody took over does not wait for the end of this node.
    (told,) = bench.desk.wire.of("reports")
    assert (told["kind"], told["work_items"]) == ("handed_back", ["exam", "empty"])


async def test_a_single_token_is_worth_handing_over_and_the_slot_is_of_the_oldest_version() -> None:
    bench = Bench()
    bench.ledger.leased({"w1": 1060.0, "w2": 1060.0})
    await bench.partials.hand_over([group("w1", tokens=1, version=5), group("w2", version=3)])
    assert {row.work_item for row in rows_of(bench.desk.wire.files[0])} == {"w1", "w2"}
    assert bench.desk.wire.of("uploads") == [{"policy_version": 3}]


async def test_what_a_node_has_added_nothing_to_is_only_given_back() -> None:
    """The store still has what others began."""
    bench = Bench()
    bench.ledger.leased({"w1": 1060.0})
    await bench.partials.hand_over([group("w1", foreign=2)])
    assert (bench.desk.wire.files, bench.ledger.tokens_wasted) == ([], {})
    (told,) = bench.desk.wire.of("reports")
    assert (told["kind"], told["work_items"]) == ("handed_back", ["w1"])


async def test_where_all_is_taken_over_nothing_is_handed_back() -> None:
    bench = Bench()
    bench.ledger.leased({"w1": 1060.0})
    await bench.partials.hand_over([group("w1")])
    await bench.partials.hand_over([])
    assert bench.desk.wire.of("reports") == []


async def test_only_what_was_taken_is_passed_on() -> None:
    bench = Bench(partials=lambda _: httpx.Response(200, json={"taken": ["w2", "stranger"]}))
    bench.ledger.leased({"w1": 1060.0, "w2": 1060.0})
    await bench.partials.hand_over([group("w1"), group("w2")])
    assert bench.ledger.unfinished() == ["w1"]
    assert bench.ledger.tokens_wasted == {"interrupted": 2}


async def test_a_hand_over_that_comes_before_the_word_of_its_version_is_tried_again() -> None:
    early = [problem("conflict", 409), problem("conflict", 409)]
    bench = Bench(
        partials=lambda body: early.pop() if early else httpx.Response(200, json={"taken": body["work_items"]})
    )
    bench.ledger.leased({"w1": 1060.0})
    await bench.partials.hand_over([group("w1")])
    assert (bench.ledger.unfinished(), bench.ledger.errors) == ([], {})
    assert len(bench.desk.wire.files) == 1


async def test_files_are_kept_under_the_limit() -> None:
    names = [f"w{n}" for n in range(9)]
    groups = [group(name) for name in names]
    limit = len(encoded(groups)) - 1
    bench = Bench(max_upload_bytes=limit)
    bench.ledger.leased(dict.fromkeys(names, 1060.0))
    await bench.partials.hand_over(groups)
    assert len(bench.desk.wire.files) == 2
    assert all(len(file) <= limit for file in bench.desk.wire.files)
    assert sorted(item for body in bench.desk.wire.of("partials") for item in body["work_items"]) == names
    assert bench.ledger.unfinished() == []


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("uploads", lambda _: problem("conflict", 409)),
        ("partials", lambda _: problem("trajectory_refused", 422, reason="hash")),
        ("partials", lambda _: problem("conflict", 409)),
        ("partials", lambda _: httpx.Response(503)),
    ],
)
async def test_a_failed_hand_over_is_counted_and_handed_back_without_it(
    call: str, answer: Callable[[dict[str, Any]], httpx.Response]
) -> None:
    answers: dict[str, Any] = {call: answer}
    bench = Bench(**answers)
    bench.ledger.leased({"w1": 1060.0})
    await bench.partials.hand_over([group("w1")])
    assert bench.ledger.unfinished() == ["w1"]
    assert bench.ledger.tokens_wasted == {"interrupted": 2}
    assert bench.ledger.errors == {"hand_over_failed": 1}
    assert [told["work_items"] for told in bench.desk.wire.of("reports")] == [["w1"]]


async def test_a_node_that_is_over_is_told_and_its_work_counted() -> None:
    bench = Bench(partials=lambda _: problem("gone", 410))
    bench.ledger.leased({"w1": 1060.0})
    with pytest.raises(Gone):
        await bench.partials.hand_over([group("w1")])
    assert bench.ledger.tokens_wasted == {"interrupted": 2}
