"""The ledger and the promise of the budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from app.fleet import money
from app.protocol.base import micros
from app.storage.models import Lease, LedgerEntry
from providers.base import AuthError, Caps, Transient
from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider, Machine, Outcome, machines_of
from tests.integration.control.rig import FakeClock, Learner, Node_, World, machines, world

DISK_MICROS_H = 10 * 10_000
"""10 GB at 10000 micro-dollars per GB and hour."""


async def entries(control: World) -> dict[tuple[str, str], list[LedgerEntry]]:
    out: dict[tuple[str, str], list[LedgerEntry]] = {}
    for entry in await control.ledger():
        out.setdefault((entry.lease_id, entry.kind), []).append(entry)
    return out


def assert_no_gap(rows: list[LedgerEntry], start: float, end: float) -> None:
    assert rows[0].start == start
    assert rows[-1].end == end
    assert all(a.end == b.start for a, b in pairwise(rows))


@BOTH
async def test_ledger_is_rate_times_time_to_the_micro_dollar(control: World, provider: FakeProvider) -> None:
    provider.boot_s = 17.0
    provider.machines = machines_of(m1=0.123457)
    job_id = await control.create()
    learner = await control.ready_learner(job_id)
    await control.round()
    await control.round(20)
    node = await control.join(provider.live()[0])
    for seconds in (7, 61, 3.25, 59.999, 120, 13, 0.001, 77):
        node.down += 1_234_567_891
        node.up += 100_000_001
        await control.rounds(1, seconds, node, learner)
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await learner.done("finished")
    await control.round(3)
    await node.leave()
    await control.round(2)
    await control.round(2)
    (lease,) = await control.leases()
    assert lease.state == "released"
    machine = provider.rented["1"]
    assert machine.gone_at is not None
    gpu_ms = round((machine.gone_at - machine.runs_at) * 1000)
    disk_ms = round((machine.gone_at - machine.created_at) * 1000)
    expected = {
        "gpu": 123_457 * gpu_ms // 3_600_000,
        "disk": DISK_MICROS_H * disk_ms // 3_600_000,
        "download": 1_000 * node.down // 1_000_000_000,
        "upload": 2_000 * node.up // 1_000_000_000,
    }
    rows = await entries(control)
    assert {kind: sum(e.micros for e in rows[lease.id, kind]) for kind in expected} == expected
    assert_no_gap(rows[lease.id, "gpu"], machine.runs_at, machine.gone_at)
    assert_no_gap(rows[lease.id, "disk"], machine.created_at, machine.gone_at)
    cost = await control.get(f"/v1/jobs/{job_id}/cost")
    assert {kind: micros(value) for kind, value in cost["by_kind"].items()} == expected
    assert micros(cost["spent_usd"]) == sum(expected.values())
    del cost["forecast"]
    assert await control.get("/v1/cost") == cost


async def test_interrupted_machine_is_not_billed_for_its_gpu_while_it_stands(
    control: World, provider: FakeProvider
) -> None:
    provider.spot = True
    provider.release_failures = 5
    job_id = await control.create(fleet={"interruptible": True})
    await control.running(job_id)
    control.clock.advance(30)
    provider.pause("1")
    await control.round()
    for _ in range(12):
        await control.round(10)
    first = next(x for x in await control.leases() if x.instance_id == "1")
    true = provider.cost(first.label)
    assert first.state == "released"
    assert first.spent_gpu == int(true["gpu"])
    assert first.spent_disk == int(true["disk"])


async def test_tiny_budget_fails_the_job_without_renting(control: World, provider: FakeProvider) -> None:
    provider.machines.insert(0, Machine("big", 8_000_000, gpu_name="H100 SXM"))
    provider.download_micros_gb = 0
    job_id = await control.create(budget_usd="0.01")
    learner = await control.ready_learner(job_id)
    for _ in range(3):
        await control.round(10)
        await learner.beat()
    assert learner.command == "abort"
    control.supervisor.running.clear()
    await control.rounds(4, 10)
    job = await control.job(job_id)
    assert job["status"] == "failed"
    assert job["status_reason"].startswith("the budget can't pay a node: $0.010000 is left, and RTX 4090 needs $0.02")
    assert provider.creates.total() == 0
    assert job["cost"]["spent_usd"] == "0.000000"


async def test_a_budget_that_pays_for_one_machine_rents_one_and_says_so_once(
    control: World, provider: FakeProvider
) -> None:
    provider.download_micros_gb = 0
    job_id = await control.create(budget_usd="0.03")
    learner = await control.ready_learner(job_id, nodes=2)
    for _ in range(3):
        await control.round(1)
        await learner.beat()
    assert provider.live_machines() == ["m1"]
    (told,) = [e for e in await control.events(job_id) if e.kind == "budget_holds"]
    assert told.message.startswith("renting stops: $0.019")
    assert "of the budget are not committed, too little for RTX 4090 at $0.40" in told.message
    await control.http.patch(f"/v1/jobs/{job_id}", json={"budget_usd": "5"})
    await control.rounds(3, 10, learner)
    assert provider.live_machines() == ["m1", "m2"]


async def test_a_budget_that_can_t_pay_the_best_machine_pays_another(control: World, provider: FakeProvider) -> None:
    provider.machines = [Machine("big", 8_000_000, gpu_name="H100 SXM"), *machines_of(small=0.2, other=0.3)]
    job_id = await control.create(budget_usd="0.10", fleet={"max_nodes": 1})
    learner = await control.ready_learner(job_id, nodes=3)
    await control.round(1)
    assert provider.live_machines() == ["small"], "the big one alone does what is needed, and can't be paid"
    await control.rounds(3, 10, learner)
    assert provider.live_machines() == ["small"]
    assert (await control.job(job_id))["status"] == "provisioning"


async def test_a_job_that_can_t_pay_what_an_account_lets_it_have_waits_for_what_it_could_pay(
    tmp_path: Path, database_url: str, clock: FakeClock, provider: FakeProvider
) -> None:
    provider.machines = [Machine("big", 8_000_000, gpu_name="H100 SXM")]
    other = FakeProvider(clock, machines_of(small=0.2), name="second", credit=AuthError("bad key"))
    async with world(tmp_path / "state", database_url, provider, others=[other]) as control:
        job_id = await control.create(budget_usd="0.10", fleet={"max_nodes": 1})
        learner = await control.ready_learner(job_id, nodes=3)
        await control.rounds(3, 10, learner)
        assert (await control.job(job_id))["status"] == "provisioning"
        assert (await control.kinds(job_id)).count("budget_holds") == 1
        other.credit = 10**9
        await control.rounds(3, 10, learner)
        assert other.live_machines() == ["small"]
        assert provider.creates.total() == 0


async def test_a_job_that_has_trained_and_can_t_pay_another_machine_has_used_its_budget_up(
    control: World, provider: FakeProvider
) -> None:
    provider.download_micros_gb = 0
    job_id = await control.create(budget_usd="0.03", stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    await learner.train(await node.produce(2))
    await control.rounds(13, 10, node, learner)
    assert (await control.job(job_id))["status"] == "running"
    provider.fail("1")
    await control.rounds(3, 10, learner)
    assert learner.command == "finish", "what was trained is saved"
    await learner.done("finished")
    await control.rounds(2, 10)
    job = await control.job(job_id)
    assert job["status"] == "budget_exhausted"
    assert job["status_reason"].startswith("the budget can't pay a node: $0.01")
    assert provider.creates.total() == 1


class Run:
    """A job on simulated time until its end, its promise checked at every round."""

    def __init__(self, control: World, job_id: str, learner: Learner) -> None:
        self.control = control
        self.job_id = job_id
        self.learner = learner
        self.nodes: dict[str, Node_] = {}
        self.most = 0.0

    async def until_over(self, rounds: int) -> str:
        for _ in range(rounds):
            self.control.clock.advance(10)
            await self._play()
            await self.control.round()
            job = await self.control.job(self.job_id)
            self.most = max(self.most, float(job["cost"]["committed_usd"]))
            assert self.most <= float(job["cost"]["budget_usd"])
            if job["finished_at"]:
                break
        return str(job["status"])

    async def _play(self) -> None:
        if self.learner.command == "finish" and self.control.supervisor.running:
            await self.learner.done("finished")
        elif self.control.supervisor.running:
            await self.learner.beat()
        leases = {x.instance_id: x for x in await self.control.leases()}
        for rented in self.control.provider.live():
            booted = rented.current(self.control.clock()) == "running" and rented.instance_id in leases
            if rented.instance_id not in self.nodes and booted and leases[rented.instance_id].state == "booting":
                self.nodes[rented.instance_id] = await self.control.join(rented)
            elif rented.instance_id in self.nodes:
                await self.nodes[rented.instance_id].beat()


@pytest.mark.parametrize(
    "fault", ["none", "slow_boot", "release_fails", "unknown", "listing_fails", "dear"], ids=lambda f: str(f)
)
async def test_budget_is_never_exceeded_and_its_end_is_orderly(
    control: World, provider: FakeProvider, fault: str
) -> None:
    provider.machines = machines_of(m1=0.9, m2=1.1, m3=1.3, m4=1.6)
    budget = "0.40"
    if fault == "slow_boot":
        provider.boot_s = 95
    elif fault == "unknown":
        outcomes: list[Outcome] = ["unknown_created", "unknown_nothing"]
        provider.outcomes, provider.listing_lag_s = deque(outcomes), 25
    elif fault == "dear":
        budget = "0.15"
    job_id = await control.create(budget_usd=budget, stop={"steps": 1000})
    learner = await control.ready_learner(job_id, nodes=2)
    run = Run(control, job_id, learner)
    if fault == "release_fails":
        for _ in range(120):
            if await run.until_over(1) == "draining":
                break
        provider.release_failures = 5
    elif fault == "listing_fails":
        await run.until_over(6)
        provider.list_error = Transient("502")
        await run.until_over(8)
        provider.list_error = None
    assert await run.until_over(120) == "budget_exhausted"
    assert provider.live() == []
    assert provider.creates.total() >= 1
    spent = sum(e.micros for e in await control.ledger())
    true = sum(provider.cost().values())
    assert spent <= micros(budget)
    assert true <= micros(budget)
    assert abs(spent - true) <= 2 * len(provider.rented) + 1
    # A good part was used: a promise kept by doing nothing is worth nothing.
    assert true >= 0.4 * micros(budget)


async def test_raised_budget_lets_the_job_go_on(control: World, provider: FakeProvider) -> None:
    job_id = await control.create(budget_usd="0.15", stop={"steps": 1000})
    learner, (node,) = await control.running(job_id)
    answer = await control.http.patch(f"/v1/jobs/{job_id}", json={"budget_usd": "5"})
    assert answer.json()["cost"]["budget_usd"] == "5.000000"
    await control.rounds(20, 120, node, learner)
    assert (await control.job(job_id))["status"] in ("provisioning", "running")
    assert float((await control.job(job_id))["cost"]["spent_usd"]) > 0.15


async def test_unknown_outcome_counts_against_the_budget(control: World, provider: FakeProvider) -> None:
    provider.outcomes = deque(["unknown_nothing"])
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    before = float((await control.job(job_id))["cost"]["committed_usd"])
    assert before > 0
    await control.round(60)
    assert float((await control.job(job_id))["cost"]["committed_usd"]) > before
    assert (await control.job(job_id))["cost"]["spent_usd"] == "0.000000"


async def test_closing_twice_writes_nothing_twice(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    await control.running(job_id)
    await control.round(100)
    before = [(e.kind, e.micros) for e in await control.ledger()]
    async with control.svc.core.db.write() as session:
        lease = await session.get_one(Lease, (await control.leases())[0].id)
        money.close(session, lease, control.clock(), control.svc.core.metrics)
        money.close(session, lease, control.clock(), control.svc.core.metrics)
    after = [(e.kind, e.micros) for e in await control.ledger()]
    assert before == after


@dataclass
class OneByOne(FakeProvider):
    """Takes a destroy call every minute."""

    @property
    def caps(self) -> Caps:
        """As vast.ai, only slower."""
        return replace(super().caps, release_each_s=60.0)


async def test_what_machines_cost_while_they_wait_to_be_destroyed_is_kept_back(
    tmp_path: Path, database_url: str, clock: FakeClock
) -> None:
    slow = OneByOne(clock, machines(0.2, 0.2, 0.2), download_micros_gb=0)
    async with world(tmp_path / "state", database_url, slow) as control:
        job_id = await control.create(fleet={"max_nodes": 3})
        await control.running(job_id, 3.0)
        rows = await control.leases()
        assert len(rows) == 3
        view = await control.get(f"/v1/jobs/{job_id}/cost")
        kept = float(view["committed_usd"]) - float(view["spent_usd"])
        hourly = sum(x.effective_micros_h for x in rows) / 1e6
        assert kept == pytest.approx(hourly * (120 + 60) / 3600, rel=0.01), "they wait 0, 60 and 120 s"
