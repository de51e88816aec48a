from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.protocol import trajectory
from app.protocol.errors import Gone
from app.protocol.job import SamplingSpec
from app.rollout_agent.batch import sample
from app.rollout_agent.delivery import HOPELESS_AFTER_S, Delivery
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from app.rollout_agent.text_side import TextSide
from tests.unit.rollout_agent.fakes import (
    Clock,
    Echo,
    Letters,
    ScriptedEngine,
    Wire,
    accept,
    batch_of,
    pool,
    problem,
    rows_of,
)


def slot(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"key": f"{body['policy_version']}/x", "url": "http://store/x"})


class Bench:
    """A delivery with everything around it."""

    def __init__(self, wire: Wire, task: Echo | None = None, max_upload_bytes: int = 1_000_000) -> None:
        self.clock = Clock()
        self.ledger = WorkLedger(self.clock)
        self.text = TextSide(task or Echo(), Letters())
        self.max_upload_bytes = max_upload_bytes
        self.wire = wire
        self.fits: int | None = None

    async def deliver(self, *indices: int) -> None:
        """Sample groups of two of these prompts under version 7, and hand them in."""
        batch = batch_of(*indices, deadline=self.clock.now + 60)
        self.ledger.leased(batch.deadlines)
        sampled = sample(ScriptedEngine(), self.text, batch, SamplingSpec(max_tokens=2))
        with pool() as executor:
            delivery = Delivery(
                self.wire.client(self.clock),
                self.text,
                self.ledger,
                executor,
                max_upload_bytes=self.max_upload_bytes,
                clock=self.clock,
                sleep=self.clock.sleep,
                jitter=lambda: 1.0,
            )
            try:
                await delivery.finish(sampled)
            finally:
                self.fits = delivery.items_that_fit()


async def test_a_batch_becomes_one_valid_committed_file() -> None:
    bench = Bench(Wire({"trajectories": accept}), Echo({3: 0.25, 4: 0.75}))
    await bench.deliver(3, 4)
    [file] = bench.wire.files
    table = trajectory.read_table(file)
    expected = {"w0": trajectory.Expected(3, 2), "w1": trajectory.Expected(4, 2)}
    trajectory.validate(table, expected, newest_version=7, max_tokens=2)
    rows = rows_of(file)
    assert [row.reward for row in rows] == [0.25, 0.25, 0.75, 0.75]
    assert {tuple(row.span_versions) for row in rows} == {(7,)}
    assert rows[0].prompt_ids == [ord("p"), ord("3")]
    [commit] = bench.wire.of("trajectories")
    assert commit["work_items"] == ["w0", "w1"]
    assert commit["size"] == len(file)
    assert bench.ledger.in_flight == 0
    assert bench.ledger.unfinished() == []


@pytest.mark.parametrize("wrong", [ZeroDivisionError("oh"), float("nan")])
async def test_a_failed_reward_is_no_zero_but_hands_the_item_back(wrong: float | Exception) -> None:
    bench = Bench(Wire({"trajectories": accept}), Echo({4: wrong}))
    await bench.deliver(3, 4, 5)
    assert {row.work_item for row in rows_of(bench.wire.files[0])} == {"w0", "w2"}
    assert bench.wire.of("trajectories")[0]["work_items"] == ["w0", "w2"]
    [report] = bench.wire.of("reports")
    assert (report["kind"], report["subject"], report["version"]) == ("task_error", "w1", 7)
    assert bench.ledger.errors["task_error"] == 1
    assert bench.ledger.unfinished() == ["w1"]
    assert bench.ledger.in_flight == 0


async def test_a_task_that_scores_nothing_ends_the_node_after_some_batches() -> None:
    bench = Bench(Wire({"trajectories": accept}), Echo({3: RuntimeError("broken task")}))
    for _ in range(MAX_FAULTS - 1):
        await bench.deliver(3)
    with pytest.raises(WorkerFault, match="scored"):
        await bench.deliver(3)
    assert bench.wire.files == []


async def test_a_refusal_is_counted_and_not_repeated() -> None:
    bench = Bench(Wire({"trajectories": lambda _: problem("trajectory_refused", 422, reason="logprobs")}))
    await bench.deliver(3)
    assert len(bench.wire.of("trajectories")) == 1
    assert bench.ledger.errors == {"refused": 1}
    assert bench.ledger.unfinished() == []


async def test_an_outage_is_waited_out() -> None:
    outage = iter(range(12))

    def answer(body: dict[str, object]) -> httpx.Response:
        return httpx.Response(503) if next(outage, None) is not None else accept(body)

    bench = Bench(Wire({"trajectories": answer}))
    await bench.deliver(3)
    assert len(bench.wire.of("trajectories")) == 13
    assert bench.ledger.in_flight == 0
    assert bench.ledger.errors == {}


async def test_a_file_that_is_still_being_looked_at_is_sent_again() -> None:
    busy = iter(range(2))

    def answer(body: dict[str, object]) -> httpx.Response:
        return problem("conflict", 409) if next(busy, None) is not None else accept(body)

    bench = Bench(Wire({"trajectories": answer}))
    await bench.deliver(3)
    assert len(bench.wire.of("trajectories")) == 3
    assert bench.ledger.errors == {}


async def test_work_is_lost_only_when_its_lease_is_hopelessly_over() -> None:
    bench = Bench(Wire({"trajectories": lambda _: httpx.Response(503)}))
    began = bench.clock.now
    await bench.deliver(3)
    assert bench.clock.now > began + 60 + HOPELESS_AFTER_S
    assert bench.ledger.errors == {"work_lost": 1}
    assert bench.ledger.in_flight == 0


async def test_a_lease_that_has_come_back_meanwhile_counts() -> None:
    """The service was away, the lease ran out, and the group was leased to the same node again."""
    began = Clock().now
    late = began + 60 + HOPELESS_AFTER_S + 60

    def answer(body: dict[str, Any]) -> httpx.Response:
        if bench.clock.now > late:
            return accept(body)
        if bench.clock.now > began + 60:
            bench.ledger.leased({"w0": began + 600})
        return httpx.Response(503)

    bench = Bench(Wire({"trajectories": answer}))
    await bench.deliver(3)
    assert bench.clock.now > late
    assert (bench.ledger.errors, bench.ledger.in_flight) == ({}, 0)


async def test_the_store_can_refuse_a_file_but_not_end_the_node() -> None:
    bench = Bench(Wire({"trajectories": accept}, put=lambda: httpx.Response(401)))
    await bench.deliver(3)
    assert bench.ledger.errors == {"refused": 1}
    assert bench.wire.of("trajectories") == []


async def test_a_control_service_that_has_ended_the_node_does() -> None:
    bench = Bench(Wire({"trajectories": lambda _: problem("gone", 410)}))
    with pytest.raises(Gone):
        await bench.deliver(3)


async def test_late_items_are_counted() -> None:
    bench = Bench(Wire({"trajectories": lambda _: httpx.Response(200, json={"accepted": [], "late": ["w0"]})}))
    await bench.deliver(3)
    assert bench.ledger.errors == {"late": 1}


async def test_a_group_that_is_too_large_for_a_file_is_not_sent_and_given_up() -> None:
    bench = Bench(Wire({"trajectories": accept}), max_upload_bytes=1000)
    await bench.deliver(3)
    assert bench.wire.files == []
    assert bench.ledger.errors == {"too_large": 1}
    assert bench.ledger.unfinished() == ["w0"]
    assert bench.ledger.tokens_wasted == {"refused": 4}
    assert bench.fits == 1


async def test_groups_that_are_too_large_for_one_file_go_in_several() -> None:
    whole = Bench(Wire({"trajectories": accept}))
    await whole.deliver(*range(40))
    [file] = whole.wire.files
    bench = Bench(Wire({"trajectories": accept, "uploads": slot}), max_upload_bytes=len(file) - 1)
    await bench.deliver(*range(40))
    assert len(bench.wire.files) == 2
    assert all(len(part) < len(file) for part in bench.wire.files)
    rows = [row.work_item for part in bench.wire.files for row in rows_of(part)]
    assert rows == [row.work_item for row in rows_of(file)]
    assert bench.ledger.unfinished() == []
    assert not bench.ledger.errors
    assert bench.fits is not None
    assert bench.fits < 40, "and the next one is smaller"
