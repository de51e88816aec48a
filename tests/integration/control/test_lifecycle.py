"""What owners do to their jobs: pause, resume, cancel, change."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from app.fleet.watchdog import Watchdog, judge
from app.storage.models import Job
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import Learner, World


async def test_pause_gives_every_machine_back_and_resume_rents_anew(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    items, _ = await node.work(1)
    assert (await control.http.post(f"/v1/jobs/{job_id}/pause")).status_code == 202
    await learner.beat()
    assert learner.command == "pause"
    await control.round(1)
    await node.beat()
    assert node.directives["drain"]
    assert (await node.ask())["items"] == []
    await control.rounds(3, 10, learner)
    assert provider.live() == []
    assert {x.state for x in await control.leases()} == {"released"}
    assert (await control.job(job_id))["status"] == "paused"
    assert [i.status for i in await control.items(job_id)] == ["pending"]
    await control.rounds(10, 60, learner)
    assert provider.creates.total() == 1

    assert (await control.http.post(f"/v1/jobs/{job_id}/resume")).status_code == 202
    await control.rounds(2, 10, learner)
    assert learner.command == "run"
    (rented,) = provider.live()
    heir = await control.join(rented)
    assert await heir.produce(1) == [items[0].id]
    assert (await control.http.post(f"/v1/jobs/{job_id}/resume")).status_code == 202


async def test_cancel_lets_the_learner_finish_and_gives_everything_back(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, _ = await control.running(job_id)
    answer = await control.http.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code == 202
    await learner.beat()
    assert learner.command == "finish"
    await control.rounds(3, 10, learner)
    assert provider.live() == []
    assert (await control.job(job_id))["status"] == "draining"
    await learner.done("finished")
    await control.round(1)
    job = await control.job(job_id)
    assert (job["status"], job["status_reason"]) == ("cancelled", "cancelled by its owner")
    assert job["finished_at"] is not None
    assert (await control.http.post(f"/v1/jobs/{job_id}/cancel")).status_code == 202
    assert (await control.http.patch(f"/v1/jobs/{job_id}", json={"budget_usd": "9"})).status_code == 409
    assert (await control.http.post(f"/v1/jobs/{job_id}/pause")).status_code == 409
    await control.rounds(3, 60)
    assert provider.creates.total() == 1


async def test_pending_job_can_be_cancelled_and_not_paused(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    assert (await control.http.post(f"/v1/jobs/{job_id}/pause")).status_code == 409
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await control.round(1)
    assert (await control.job(job_id))["status"] == "cancelled"
    assert control.supervisor.started == []
    assert provider.creates.total() == 0


async def test_max_nodes_is_held_and_can_be_changed(control: World, provider: FakeProvider) -> None:
    job_id = await control.create(fleet={"max_nodes": 1})
    learner, nodes = await control.running(job_id, nodes=3)
    assert len(provider.live()) == 1
    assert "at_max_nodes" in await control.kinds(job_id)
    answer = await control.http.patch(f"/v1/jobs/{job_id}", json={"fleet": {"max_nodes": 3}})
    assert (answer.status_code, answer.json()["fleet"]["max_nodes"]) == (200, 3)
    await control.rounds(2, 10, learner, *nodes)
    assert len(provider.live()) == 3


async def test_staleness_budget_can_be_changed_and_reaches_the_learner(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, _ = await control.running(job_id)
    answer = await control.http.patch(f"/v1/jobs/{job_id}", json={"staleness_budget": 6})
    assert (answer.json()["staleness_budget"], answer.json()["publish_period"]) == (6, 5)
    told = (await learner.post("heartbeat", {"step": 0, "state": "waiting"})).json()
    assert (told["staleness_budget"], told["publish_period"]) == (6, 5)


async def test_staleness_budget_too_small_for_the_publish_period_is_refused(control: World) -> None:
    job_id = await control.create(staleness_budget=5, publish_period=4)
    answer = await control.http.patch(f"/v1/jobs/{job_id}", json={"staleness_budget": 3})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/staleness_budget"
    assert (await control.job(job_id))["staleness_budget"] == 5


@pytest.mark.parametrize("body", [{"model": "x"}, {"budget_usd": "-1"}, {"fleet": {"max_nodes": 0}}, {"fleet": {}}])
async def test_change_that_is_not_possible_is_refused(control: World, body: dict[str, object]) -> None:
    job_id = await control.create()
    assert (await control.http.patch(f"/v1/jobs/{job_id}", json=body)).status_code == 422


async def test_jobs_have_their_own_machines_and_money(control: World, provider: FakeProvider) -> None:
    one, two = await control.create(name="one"), await control.create(name="two")
    for job_id in (one, two):
        await control.ready_learner(job_id)
    await control.round()
    await control.round(60)
    assert provider.live_machines() == ["m1", "m2"]
    costs = [await control.get(f"/v1/jobs/{j}/cost") for j in (one, two)]
    assert [c["leases"][0]["machine_id"] for c in costs] == ["m1", "m2"]
    whole = await control.get("/v1/cost")
    assert float(whole["spent_usd"]) == pytest.approx(sum(float(c["spent_usd"]) for c in costs))
    assert [len((await control.get(f"/v1/jobs/{j}/fleet"))["nodes"]) for j in (one, two)] == [1, 1]
    assert len((await control.get("/v1/fleet"))["nodes"]) == 2


async def test_learner_that_never_gets_ready_fails_the_job(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    await control.round()
    learner = Learner(control, job_id)
    await learner.start()
    await control.rounds(31, 60)
    assert learner.command == "run"
    job = await control.job(job_id)
    assert job["status"] in ("draining", "failed")
    assert "not ready within" in job["status_reason"]
    control.supervisor.running.clear()
    await control.rounds(2, 60)
    assert (await control.job(job_id))["status"] == "failed"
    assert provider.creates.total() == 0


async def test_budget_lowered_below_what_is_spent_ends_the_job(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    await control.rounds(3, 60, node, learner)
    assert (await control.http.patch(f"/v1/jobs/{job_id}", json={"budget_usd": "0.001"})).status_code == 200
    await control.rounds(1, 1, node, learner)
    await learner.beat()
    assert learner.command == "finish"
    await learner.done("finished")
    await node.leave()
    await control.rounds(2, 5)
    assert (await control.job(job_id))["status"] == "budget_exhausted"
    assert provider.live() == []


async def test_learner_that_dies_is_started_again_and_the_machines_stay(control: World, provider: FakeProvider) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    await learner.train(await node.produce(2))
    control.supervisor.running.clear()
    await control.rounds(3, 10, node)
    assert control.supervisor.started == [job_id, job_id]
    assert "learner_restarted" in await control.kinds(job_id)
    heir = Learner(control, job_id)
    await heir.start()
    await heir.ready(resume_step=1)
    await heir.train(await node.produce(2))
    assert (await control.job(job_id))["step"] == 2
    assert provider.creates.total() == 1


async def test_learner_that_dies_while_it_saves_is_started_once_more(control: World, provider: FakeProvider) -> None:
    job_id = await control.create(stop={"steps": 1})
    learner, (node,) = await control.running(job_id)
    await learner.train(await node.produce(2))
    await learner.beat("finishing")
    await control.rounds(1, 1, node)
    control.supervisor.running.clear()
    await control.rounds(4, 10)
    assert control.supervisor.started == [job_id, job_id]
    heir = Learner(control, job_id)
    await heir.start()
    await heir.ready(resume_step=1)
    await heir.done()
    await control.rounds(2, 10)
    assert (await control.job(job_id))["status"] == "succeeded"
    assert provider.live() == []


async def test_standstill_is_told_with_what_each_part_does_and_ends_the_job_at_last(control: World) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    for _ in range(10):
        control.clock.advance(45)
        await node.beat()
        await learner.beat("waiting")
        await control.round()
    (told,) = [e for e in await control.events(job_id) if e.kind == "no_progress"]
    assert "learner waiting" in told.message
    assert "1 active" in told.message
    assert (await control.job(job_id))["status"] == "provisioning"
    for _ in range(70):
        control.clock.advance(50)
        await node.beat()
        await learner.beat("waiting")
        await control.round()
        if (await control.job(job_id))["status"] == "draining":
            break
    job = await control.job(job_id)
    assert job["status"] == "draining"
    assert "no step for" in job["status_reason"]


async def test_a_standstill_is_told_once_a_step_and_counts_from_whatever_moved_last(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    core = control.svc.core
    watchdog = Watchdog(core)

    async def look(seconds: float, **changed: object) -> tuple[str, int]:
        """Why the job has to fail, and how often somebody was told so far."""
        control.clock.advance(seconds)
        async with core.db.write() as session:
            job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
            for name, value in changed.items():
                setattr(job, name, value)
            why = await watchdog.check(session, job)
        return why or "", (await control.kinds(job_id)).count("no_progress")

    await learner.train(await node.produce(2))
    assert await look(299) == ("", 0)
    assert await look(2) == ("", 1)
    assert await look(10) == ("", 1), "once"
    await learner.train(await node.produce(2))
    assert await look(290) == ("", 1), "it has moved"
    assert await look(11) == ("", 2)
    last = (await control.events(job_id))[-1].message
    assert last.startswith("no step for 301 s; learner waiting, heard from 301 s ago; ")
    assert last.endswith("nodes: 1 active; work items: 4 trained")
    core.held[job_id] = "a cap"
    assert await look(4000) == ("", 2), "it waits for money, and does not fail"
    del core.held[job_id]
    assert (await look(1))[0].startswith("no step for 4302 s")
    core.started_at = control.clock()
    assert await look(200) == ("", 2), "nobody could work while the service was down"
    assert await look(9000, status="paused") == ("", 2)
    assert await look(0, status="running", status_since=control.clock()) == ("", 2), "it was paused until now"


@pytest.mark.parametrize(
    ("still", "t_train", "verdict"),
    [
        (299, 1, "ok"),
        (301, 1, "warn"),
        (3601, 1, "fail"),
        (3601, 400, "ok"),
        (4001, 400, "warn"),
        (24001, 400, "fail"),
        (301, None, "warn"),
    ],
)
def test_standstill_is_measured_in_steps(still: float, t_train: float | None, verdict: str) -> None:
    assert judge(still, t_train) == verdict


@pytest.mark.parametrize("status", ["failed", "succeeded"])
async def test_nothing_is_rented_between_the_learner_s_last_word_and_the_next_round(
    control: World, provider: FakeProvider, status: str
) -> None:
    """A price that is told at that moment makes a decision of its own."""
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    await node.leave()
    await learner.done(status, "that is it")
    before = provider.creates.total()
    await control.svc.controller.decide(job_id, "a spot price")
    await control.svc.controller.leases.drain_tasks()
    assert provider.creates.total() == before
    await control.rounds(3)
    assert (await control.job(job_id))["status"] == status
    assert provider.creates.total() == before
