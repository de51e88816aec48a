from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from app.protocol.errors import BadInput, Gone
from app.protocol.job import SamplingSpec
from app.rollout_agent.batch import TextSide
from app.rollout_agent.delivery import Delivery
from app.rollout_agent.engines.base import Interrupted
from app.rollout_agent.leasing import WorkSource
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from app.rollout_agent.partials import Partials
from app.rollout_agent.worker import Worker
from tests.unit.rollout_agent.fakes import Clock, Echo, Letters, ScriptedEngine, Wire, accept, pool, problem, rows_of


class Shift:
    """A worker that drains itself after so many leases."""

    def __init__(self, leases: int, *, failures: Sequence[Exception] = (), **answers: Any) -> None:
        self.engine = ScriptedEngine(failures)
        self.clock = Clock()
        self.ledger = WorkLedger(self.clock)
        self.wire = Wire({"work": self._work, "trajectories": accept, **answers})
        self._leases = leases
        self._ids = itertools.count()
        self._worker: Worker | None = None

    def _work(self, body: dict[str, Any]) -> httpx.Response:
        assert self._worker is not None
        if len(self.wire.of("work")) > self._leases:
            self._worker.drain(0.0)
        items = [
            {"id": f"w{n}", "prompt_index": n, "group_size": 2, "seed": n, "deadline_s": 60}
            for n in itertools.islice(self._ids, body["max_items"])
        ]
        return httpx.Response(200, json={"items": items, "upload": {"key": items[0]["id"], "url": "http://store/x"}})

    async def run(self, *, installed: bool = True) -> None:
        """Work until drained."""
        with pool() as engine_pool, pool() as score_pool:
            client, text = self.wire.client(self.clock), TextSide(Echo(), Letters())
            delivery = Delivery(
                client, text, self.ledger, score_pool, max_upload_bytes=10**6, clock=self.clock, sleep=self.clock.sleep
            )
            worker = Worker(
                client,
                self.engine,
                text,
                WorkSource(client, self.ledger, lambda: 7, clock=self.clock, sleep=self.clock.sleep),
                delivery,
                Partials(
                    client,
                    self.ledger,
                    max_tokens=2,
                    max_upload_bytes=10**6,
                    quantisation=lambda: None,
                    oldest_admissible=lambda: None,
                ),
                self.ledger,
                sampling=SamplingSpec(max_tokens=2),
                engine_pool=engine_pool,
                clock=self.clock,
            )
            self._worker = worker
            if installed:
                worker.installed()
            else:
                worker.drain(0.0)
            await asyncio.wait_for(worker.run(), 20)


async def test_work_is_leased_sampled_and_committed_and_the_rest_handed_back() -> None:
    shift = Shift(leases=3)
    await shift.run()
    committed = [item for commit in shift.wire.of("trajectories") for item in commit["work_items"]]
    assert len(shift.wire.files) == 3
    assert {row.work_item for file in shift.wire.files for row in rows_of(file)} == set(committed)
    assert shift.ledger.in_flight == 0
    unfinished = shift.ledger.unfinished()
    assert unfinished
    assert sorted(committed + unfinished) == sorted(f"w{n}" for n in range(len(committed) + len(unfinished)))
    assert {ask["policy_version"] for ask in shift.wire.of("work")} == {7}


async def test_nothing_is_leased_before_a_version_is_installed() -> None:
    shift = Shift(leases=3)
    await shift.run(installed=False)
    assert shift.wire.calls == []


async def test_an_engine_error_is_reported_and_the_next_batch_is_generated() -> None:
    shift = Shift(leases=3, failures=[RuntimeError("out of memory")])
    await shift.run()
    [report] = shift.wire.of("reports")
    assert report["kind"] == "engine_error"
    assert "out of memory" in report["detail"]
    assert shift.ledger.errors == {"engine_error": 1}
    assert len(shift.wire.files) == 2
    assert "w0" in shift.ledger.unfinished()


async def test_engine_errors_in_a_row_end_the_worker() -> None:
    shift = Shift(leases=100, failures=[BadInput("no such prompt")] * MAX_FAULTS)
    with pytest.raises(WorkerFault, match="no such prompt"):
        await shift.run()
    assert len(shift.wire.of("reports")) == MAX_FAULTS


async def test_an_interrupt_is_no_fault() -> None:
    shift = Shift(leases=2, failures=[Interrupted("stopped")])
    await shift.run()
    assert shift.ledger.errors == {}
    assert shift.wire.of("reports") == []


async def test_a_node_that_is_over_ends_while_asking_for_work() -> None:
    shift = Shift(leases=3, work=lambda _: problem("gone", 410))
    with pytest.raises(Gone):
        await shift.run()


async def test_no_answer_and_no_work_are_waited_out_with_pauses() -> None:
    shift = Shift(leases=0)
    answers = iter([httpx.Response(503)] * 3 + [httpx.Response(200, json={"items": [], "reason": "wait"})] * 3)
    lease = shift._work

    def work(body: dict[str, Any]) -> httpx.Response:
        answer = next(answers, None)
        return lease(body) if answer is None else answer

    shift.wire._answers["work"] = work
    began = shift.clock.now
    await shift.run()
    assert len(shift.wire.of("work")) == 7
    assert shift.clock.now - began >= 3 * 0.125 + 3 * 0.1
