"""Where a leased group is: open, on its way, or let go and counted, and never in two places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from app.protocol.work import WorkItem
from app.rollout_agent.delivery import HOPELESS_AFTER_S, Delivery, Scored
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.groups import Group
from app.rollout_agent.ledger import WorkerFault, WorkLedger
from app.rollout_agent.open_groups import OpenGroups
from app.rollout_agent.opened import Open
from app.rollout_agent.partials import Partials
from app.rollout_agent.sampling import Sampler
from app.tasks.base import Prompt
from tests.unit.rollout_agent.fake_stream import FakeStream
from tests.unit.rollout_agent.fakes import Clock

WHOLE = Completion([65, 46], [-0.5, -0.5], "stop", (Span(0, 0),))
CUT = Completion([65], [-0.5], "abort", (Span(0, 0),))


class Post:
    """Takes files when it is let, and groups of others always."""

    def __init__(self) -> None:
        self.files: list[list[str]] = []
        self.handed_over: list[Group] = []
        self.open = asyncio.Event()
        self.fault: WorkerFault | None = None

    def items_that_fit(self) -> int | None:
        return None

    async def hand_in(self, scored: Sequence[Scored]) -> None:
        self.files.append([s.group.item.id for s in scored])
        await self.open.wait()
        if self.fault is not None:
            raise self.fault

    async def hand_over(self, groups: Sequence[Group]) -> None:
        self.handed_over += groups


class Bench:
    """Groups of a worker, without its work."""

    def __init__(self) -> None:
        self.clock, self.engine, self.post, self.room = Clock(), FakeStream(), Post(), 0
        self.ledger = WorkLedger(self.clock)

        async def revive() -> None:
            raise AssertionError

        self.sampler = Sampler(self.engine, revive, self.ledger, clock=self.clock)
        self.groups = OpenGroups(
            self.engine, self.sampler, self.ledger, cast(Partials, self.post), cast(Delivery, self.post), self.clock,
            self._changed,
        )  # fmt: skip
        self.handing_in = asyncio.create_task(self.groups.hand_in())

    def _changed(self) -> None:
        self.room += 1

    def lease(self, item: str, deadline: float = 1060.0) -> Open | None:
        self.ledger.leased({item: deadline})
        work = WorkItem.model_validate(
            {"id": item, "prompt_index": 1, "group_size": 2, "seed": 0, "deadline_s": 60, "split": "train"}
        )
        opened = self.groups.admit(work, deadline)
        if opened is not None:
            opened.prompt, opened.prompt_ids = Prompt(1, "p1", {}), [1]
        return opened

    def opened(self, item: str, *samples: Completion, worked_on: bool = False) -> Open:
        """A new group with these samples."""
        opened = self.lease(item)
        assert opened is not None
        for index, sample in enumerate(samples):
            opened.keep(index, sample)
        if worked_on:
            opened.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        return opened

    async def finished(self, item: str) -> None:
        """A new group is whole and scored, and has its turn."""
        opened = self.opened(item, WHOLE, WHOLE)
        self.groups.finish(opened, [Scored(opened.group(None), [1.0, 1.0])])
        await until_idle()

    async def sent(self) -> None:
        """All that is on its way arrives."""
        self.post.open.set()
        await until_idle()
        self.post.open.clear()


async def until_idle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.handing_in.cancel()
    await asyncio.gather(made.handing_in, return_exceptions=True)


async def test_a_group_whose_file_is_on_its_way_is_not_begun_again_when_its_lease_comes_back(bench: Bench) -> None:
    await bench.finished("w0")
    await bench.finished("w1")
    assert bench.post.files == [["w0"]], "w0 is being handed in, w1 waits for that"
    assert (bench.groups.sampled, bench.groups.in_flight) == (1, 0)
    assert bench.lease("w0", 1200.0) is None
    assert bench.lease("w1", 1200.0) is None
    await bench.sent()
    assert bench.post.files == [["w0"], ["w1"]]
    await bench.sent()
    assert bench.lease("w0", 1200.0) is not None, "it was answered, or lost: the next lease is for another try"


async def test_a_group_that_is_being_worked_on_gets_its_newest_deadline(bench: Bench) -> None:
    opened = bench.opened("w0", CUT)
    assert bench.lease("w0", 1200.0) is None
    assert (opened.deadline, bench.groups.in_flight) == (1200.0, 2)


async def test_what_is_sampled_and_not_handed_in_yet_is_told_from_what_is_not(bench: Bench) -> None:
    bench.opened("w0", CUT, WHOLE)
    whole = bench.opened("w1", WHOLE, WHOLE)
    assert (bench.groups.in_flight, bench.groups.sampled) == (1, 1)
    bench.groups.finish(whole, [])
    assert (bench.groups.in_flight, bench.groups.sampled) == (1, 0), "without a reward it comes to nothing"
    assert bench.lease("w1") is not None


async def test_a_group_that_is_let_go_is_counted_given_back_and_makes_room(bench: Bench) -> None:
    opened = bench.opened("w0", CUT, WHOLE)
    opened.foreign_tokens = 1
    bench.groups.drop(opened, "stale")
    assert bench.ledger.tokens_wasted == {"stale": 2}
    assert (bench.ledger.in_flight, bench.ledger.unfinished()) == (0, ["w0"])
    assert (bench.room, bench.groups.in_flight) == (1, 0)


@pytest.mark.parametrize(
    ("floor", "late", "gone"), [(None, -1.0, False), (0, -1.0, False), (1, -1, True), (0, 1, True)]
)
async def test_what_is_too_old_or_too_late_is_given_up(
    bench: Bench, floor: int | None, late: float, gone: bool
) -> None:
    opened = bench.opened("w0", CUT, worked_on=True)
    assert bench.groups.working == {opened.task}
    bench.clock.now = 1060.0 + HOPELESS_AFTER_S + late
    bench.groups.drop_stale(floor)
    await until_idle()
    assert (bench.groups.in_flight == 0) is gone
    assert (bench.groups.working == set()) is gone
    assert opened.task is not None
    assert opened.task.cancelled() is gone
    assert bench.ledger.tokens_wasted == ({"stale": 1} if gone else {})


async def test_of_a_group_without_a_token_the_version_counts_that_was_in_force_at_its_lease(bench: Bench) -> None:
    bench.engine.version = 3
    bench.opened("w0", worked_on=True)
    bench.groups.drop_stale(3)
    assert bench.groups.in_flight == 2
    bench.groups.drop_stale(4)
    assert bench.groups.in_flight == 0


async def test_at_the_end_what_is_open_was_interrupted_and_what_is_on_its_way_could_not_be_handed_in(
    bench: Bench,
) -> None:
    bench.opened("w0", CUT)
    await bench.finished("w1")
    await bench.sent()
    await bench.finished("w2")
    await bench.finished("w3")
    bench.groups.drop_all()
    assert bench.ledger.tokens_wasted == {"interrupted": 1, "refused": 4 + 4}, "w1 has arrived"


async def test_what_is_handed_over_is_no_longer_here_to_be_counted(bench: Bench) -> None:
    bench.engine.quantisation = "int8"
    bench.opened("w0", CUT)
    bench.opened("w1")
    await bench.groups.hand_over()
    assert [(g.item.id, g.completions, g.quantisation) for g in bench.post.handed_over] == [
        ("w0", (CUT, None), "int8"), ("w1", (None, None), "int8"),
    ]  # fmt: skip
    assert bench.groups.in_flight == 0
    bench.groups.drop_all()
    assert not bench.ledger.tokens_wasted


async def test_a_file_that_is_one_fault_too_many_is_counted_once_and_what_waits_with_it(bench: Bench) -> None:
    await bench.finished("w0")
    await bench.finished("w1")
    bench.post.fault = WorkerFault("refused", kind="refused")
    room = bench.room
    await bench.sent()
    with pytest.raises(WorkerFault):
        await bench.handing_in
    assert bench.room == room + 1
    bench.groups.drop_all()
    assert bench.ledger.tokens_wasted == {"refused": 4}, "w1; whoever was refused w0 has counted that"


async def test_each_file_that_arrives_makes_room_and_at_the_close_all_is_handed_in(bench: Bench) -> None:
    await bench.finished("w0")
    await bench.finished("w1")
    bench.groups.close()
    assert bench.room == 0
    bench.post.open.set()
    await asyncio.wait_for(bench.handing_in, 15)
    assert (bench.room, bench.post.files) == (2, [["w0"], ["w1"]])


async def test_what_the_engine_had_of_a_group_that_is_handed_over_is_counted_as_lost(bench: Bench) -> None:
    lost: list[Any] = []
    bench.sampler.lose = lambda *what: lost.append(what)  # type: ignore[method-assign]
    bench.opened("w0", CUT)
    await bench.groups.hand_over()
    bench.groups.drop(bench.opened("w1"), "engine_died")
    assert lost == [("w0", "interrupted"), ("w1", "engine_died")]
