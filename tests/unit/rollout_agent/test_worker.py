from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal

import httpx
import pytest
from blake3 import blake3

from app.protocol import trajectory
from app.protocol.errors import BadInput, Gone, TaskFailed
from app.protocol.job import SamplingSpec
from app.protocol.partial import encode_partial
from app.rollout_agent.delivery import Delivery
from app.rollout_agent.engines.base import Completion, GenRequest, Interrupted
from app.rollout_agent.leasing import WorkSource
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from app.rollout_agent.partials import Partials
from app.rollout_agent.text_side import TextSide
from app.rollout_agent.worker import Worker
from app.tasks.base import Prompt
from tests.unit.rollout_agent.fakes import Clock, Echo, Letters, ScriptedEngine, Wire, accept, pool, problem, rows_of


class Shift:
    """A worker that drains itself after so many leases."""

    def __init__(self, leases: int, *, failures: Sequence[Exception] = (), max_tokens: int = 2, **answers: Any) -> None:
        self.engine: ScriptedEngine = ScriptedEngine(failures)
        self.task: Any = Echo()
        self.max_tokens = max_tokens
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
            client, text = self.wire.client(self.clock), TextSide(self.task, Letters())
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
                    max_tokens=self.max_tokens,
                    max_upload_bytes=10**6,
                    quantisation=lambda: None,
                    oldest_admissible=lambda: None,
                ),
                self.ledger,
                sampling=SamplingSpec(max_tokens=self.max_tokens),
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
    [report] = [r for r in shift.wire.of("reports") if r["kind"] != "handed_back"]
    assert report["kind"] == "engine_error"
    assert "out of memory" in report["detail"]
    assert report["work_items"] == ["w0"], "somebody else may try it at once"
    assert shift.ledger.errors == {"engine_error": 1}
    assert len(shift.wire.files) == 2
    assert "w0" in shift.ledger.unfinished()


class Picky(ScriptedEngine):
    """Fails over one prompt, or over more groups than `most`."""

    def __init__(self, poison: str = "", most: int = 1000) -> None:
        super().__init__()
        self._poison, self._most = [ord(letter) for letter in poison], most

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        if any(list(request.prompt_ids) == self._poison for request in requests):
            raise BadInput("no such prompt")
        if len(requests) > self._most:
            self.batches.append(requests)
            raise RuntimeError("out of memory")
        return super().generate(requests)


async def test_of_a_batch_that_fails_only_the_group_at_fault_is_given_up() -> None:
    shift = Shift(leases=4, uploads=slot)
    shift.engine = Picky(poison="p9")
    await shift.run()
    committed = {item for commit in shift.wire.of("trajectories") for item in commit["work_items"]}
    assert committed == {f"w{n}" for n in range(15) if n != 9}
    [report] = [r for r in shift.wire.of("reports") if r["kind"] != "handed_back"]
    assert (report["kind"], report["work_items"]) == ("engine_error", ["w9"])
    assert shift.ledger.errors == {"engine_error": 1}


async def test_a_batch_too_large_for_the_memory_loses_no_group() -> None:
    shift = Shift(leases=6, uploads=slot)
    shift.engine = Picky(most=3)
    await shift.run()
    committed = {item for commit in shift.wire.of("trajectories") for item in commit["work_items"]}
    assert committed == {f"w{n}" for n in range(len(committed))}
    assert len(committed) >= 11
    assert shift.ledger.errors == {}
    assert {r["kind"] for r in shift.wire.of("reports")} <= {"handed_back"}
    sizes = [len(batch) for batch in shift.engine.batches]
    assert sizes[:5] == [1, 2, 4, 2, 2]
    assert max(sizes[5:]) <= 2, "never so large again"


async def test_a_prompt_that_its_task_can_not_make_is_the_tasks_fault() -> None:
    class Gap(Echo):
        def train(self, index: int) -> Prompt:
            if index == 4:
                raise TaskFailed("hung")
            return super().train(index)

    shift = Shift(leases=4, uploads=slot)
    shift.task = Gap()
    await shift.run()
    committed = {item for commit in shift.wire.of("trajectories") for item in commit["work_items"]}
    assert committed == {f"w{n}" for n in range(11) if n != 4}
    [report] = [r for r in shift.wire.of("reports") if r["kind"] != "handed_back"]
    assert (report["kind"], report["subject"]) == ("task_error", "w4")
    assert shift.ledger.faults_in_a_row == 0


async def test_engine_errors_in_a_row_end_the_worker() -> None:
    shift = Shift(leases=100, failures=[BadInput("no such prompt")] * MAX_FAULTS)
    with pytest.raises(WorkerFault, match="no such prompt"):
        await shift.run()
    assert len(shift.wire.of("reports")) == MAX_FAULTS


async def test_an_interrupt_is_no_fault() -> None:
    shift = Shift(leases=2, failures=[Interrupted("stopped")])
    await shift.run()
    assert shift.ledger.errors == {}
    reports = shift.wire.of("reports")
    assert {r["kind"] for r in reports} == {"handed_back"}
    assert "w0" in [item for r in reports for item in r["work_items"]], "others need not wait until this node has left"


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


class LettersEngine(ScriptedEngine):
    """Samples the alphabet from where a sample is on; interrupted, it leaves `cut` tokens of each."""

    def __init__(self, cut: int | None = None) -> None:
        super().__init__()
        self._cut = cut

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        self.batches.append(requests)
        made = []
        for request in requests:
            left = request.sampling.max_tokens
            n = left if self._cut is None else min(self._cut, left)
            ids = [65 + request.start + i for i in range(n)]
            reason: Literal["length", "abort"] = "length" if n == left else "abort"
            made += [Completion(ids, [-0.5] * n, reason) for _ in range(request.n)]
        return made


async def test_a_batch_that_is_cut_is_handed_over() -> None:
    shift = Shift(leases=1, uploads=slot, partials=take)
    shift.engine = LettersEngine(cut=1)
    await shift.run()
    [body] = shift.wire.of("partials")
    assert body["work_items"] == ["w0"]
    rows = rows_of(shift.wire.files[0])
    assert [(row.completion_ids, row.finish_reason, row.span_versions) for row in rows] == [([65], "abort", [7])] * 2
    assert shift.wire.of("trajectories") == []
    assert "w0" not in shift.ledger.unfinished()
    assert shift.ledger.tokens_generated == 2
    assert not shift.ledger.tokens_wasted


async def test_a_batch_goes_on_from_what_others_have_begun() -> None:
    shift = Shift(leases=1)
    shift.engine = LettersEngine()
    row = {
        "work_item": "w0",
        "prompt_index": 0,
        "sample_index": 1,
        "prompt_ids": [ord("p"), ord("0")],
        "completion_ids": [65],
        "logprobs": [-0.25],
        "span_versions": [4],
        "span_starts": [0],
        "reward": 0.0,
        "finish_reason": "abort",
    }
    data = encode_partial([trajectory.Rollout(**row)])  # type: ignore[arg-type]
    shift.wire.objects["/begun"] = data
    lease = shift._work

    def work(body: dict[str, Any]) -> httpx.Response:
        answer = lease(body)
        items = json.loads(answer.content)
        items["items"][0]["partial"] = {
            "key": "begun",
            "url": "http://store/begun",
            "size": len(data),
            "blake3": blake3(data).hexdigest(),
        }
        return httpx.Response(200, json=items)

    shift.wire._answers["work"] = work
    await shift.run()
    [first, second] = shift.engine.batches[0]
    assert (first.n, first.first, first.start, first.sampling.max_tokens) == (1, 0, 0, 2)
    assert (second.n, second.first, second.start, second.sampling.max_tokens) == (1, 1, 1, 1)
    assert list(second.prompt_ids) == [ord("p"), ord("0"), 65]
    rows = rows_of(shift.wire.files[0])
    assert [list(row.completion_ids) for row in rows] == [[65, 66], [65, 66]]
    assert [list(row.logprobs) for row in rows] == [[-0.5, -0.5], [-0.25, -0.5]]
    assert [(list(row.span_versions), list(row.span_starts)) for row in rows] == [([7], [0]), ([4, 7], [0, 1])]
    assert shift.ledger.tokens_generated == 3


async def test_wasted_tokens_are_counted_by_reason() -> None:
    late = Shift(leases=1, trajectories=lambda _: httpx.Response(200, json={"accepted": [], "late": ["w0"]}))
    await late.run()
    assert late.ledger.tokens_wasted == {"stale": 4}
    refused = Shift(leases=1, trajectories=lambda _: problem("trajectory_refused", 422, reason="logprobs"))
    await refused.run()
    assert refused.ledger.tokens_wasted == {"refused": 4}
    assert refused.ledger.tokens_generated == 4
    lost = Shift(leases=1, trajectories=lambda _: httpx.Response(503))
    await lost.run()
    assert lost.ledger.tokens_wasted == {"refused": 4}


def slot(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"key": f"{body['policy_version']}/x", "url": "http://store/x"})


def take(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"taken": body["work_items"]})
