"""Jobs whose learner somebody else starts: what waits, what is kept, what is given back."""

from __future__ import annotations

import pytest

from app.fleet.attached import AWAY_S, SILENCE_S, Presence, presence
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import Learner, World

ATTACHED = {"placement": "attached"}


@pytest.mark.parametrize(
    ("seen", "now", "listening", "found"),
    [
        (None, 1e6, 0, Presence.NEVER),
        (100, 100 + SILENCE_S - 1, 0, Presence.HERE),
        (100, 100 + SILENCE_S, 0, Presence.AWAY),
        (100, 100 + AWAY_S, 0, Presence.GONE),
        (100, 1e6, 1e6 - 1, Presence.HERE),
        (100, 1e6, 1e6 - SILENCE_S, Presence.AWAY),
    ],
)
def test_silence_counts_while_somebody_listens(seen: float | None, now: float, listening: float, found: Presence):
    assert presence(seen, now, listening) is found


async def test_job_waits_for_its_learner_with_a_reason_and_rents_nothing(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create(learner=ATTACHED)
    assert (await control.job(job_id))["status_reason"] == "waits for an attached learner"
    await control.rounds(20, 600)
    job = await control.job(job_id)
    assert (job["status"], job["status_reason"]) == ("pending", "waits for an attached learner")
    assert (control.supervisor.started, provider.creates.total()) == ([], 0)
    learner = Learner(control, job_id)
    await learner.start()
    await control.round(1)
    assert "loads the model" in (await control.job(job_id))["status_reason"]
    assert provider.creates.total() == 0
    await learner.ready()
    await learner.publish(0)
    await control.rounds(2, 5, learner)
    assert (await control.job(job_id))["status"] == "provisioning"
    assert len(provider.live()) == 1
    assert control.supervisor.started == []


async def test_learner_that_comes_again_soon_finds_its_nodes_at_work(control: World, provider: FakeProvider) -> None:
    job_id = await control.create(learner=ATTACHED, stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    await learner.train(await node.produce(2))
    await control.rounds(5, 30, node)
    assert "learner_away" in await control.kinds(job_id)
    assert len(provider.live()) == 1
    heir = Learner(control, job_id)
    await heir.start()
    await heir.ready(resume_step=1)
    await heir.beat()
    await control.rounds(2, 5, node, heir)
    assert (await control.job(job_id))["status"] == "running"
    assert provider.creates.total() == 1
    assert (await learner.post("heartbeat", {"step": 1, "state": "training"})).status_code == 409


async def test_nodes_of_a_learner_that_stays_away_are_given_back_and_rented_again(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create(learner=ATTACHED, stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    await learner.train(await node.produce(2))
    await control.rounds(12, 30, node)
    await node.leave()
    await control.rounds(3, 30)
    job = await control.job(job_id)
    assert (job["status"], job["status_reason"]) == ("pending", "waits for an attached learner, which was at step 1")
    assert provider.live() == []
    heir = Learner(control, job_id)
    await heir.start()
    await control.rounds(2, 5)
    assert provider.live() == [], "it loads: there is nobody to work for"
    await heir.ready(resume_step=1)
    await heir.beat("waiting")
    await control.rounds(3, 5, heir)
    assert len(provider.live()) == 1
    assert (await control.job(job_id))["status"] in ("provisioning", "running")


async def test_cancelled_job_gives_an_absent_learner_time_to_come_and_save(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create(learner=ATTACHED, stop={"steps": 50})
    _, (node,) = await control.running(job_id)
    await control.rounds(2, 30, node)
    await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await node.leave()
    await control.rounds(3, 30)
    assert (await control.job(job_id))["status"] == "draining"
    assert provider.live() == []
    heir = Learner(control, job_id)
    await heir.start()
    await heir.ready(resume_step=0)
    await heir.beat()
    assert heir.command == "finish"
    await heir.done("finished")
    await control.rounds(2, 5)
    assert (await control.job(job_id))["status"] == "cancelled"


async def test_cancelled_job_ends_without_a_learner_that_never_was_or_never_comes(control: World) -> None:
    never, gone = await control.create(learner=ATTACHED), await control.create(learner=ATTACHED)
    await control.ready_learner(gone)
    for job_id in (never, gone):
        await control.http.post(f"/v1/jobs/{job_id}/cancel")
    await control.round(1)
    assert (await control.job(never))["status"] == "cancelled"
    await control.rounds(8, 90)
    assert (await control.job(gone))["status"] == "cancelled"


async def test_learner_token_opens_its_job_alone(control: World) -> None:
    job_id, other = await control.create(learner=ATTACHED), await control.create(learner=ATTACHED)
    told = (await control.http.post(f"/v1/jobs/{job_id}/learner-token")).json()
    assert told["job_id"] == job_id
    again = (await control.http.post(f"/v1/jobs/{job_id}/learner-token")).json()
    assert again == told
    headers = {"Authorization": f"Bearer {told['token']}"}
    body = {"pid": 1, "host": "box"}
    answer = await control.http.post(f"/v1/jobs/{job_id}/learner/start", json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["object_store_url"].startswith("file://")
    assert (await control.http.post(f"/v1/jobs/{other}/learner/start", json=body, headers=headers)).status_code == 401
    assert (await control.http.get(f"/v1/jobs/{job_id}", headers=headers)).status_code == 401


async def test_learner_token_is_for_attached_learners_of_jobs_that_go_on(control: World) -> None:
    ours, over = await control.create(), await control.create(learner=ATTACHED)
    await control.http.post(f"/v1/jobs/{over}/cancel")
    await control.round(1)
    for job_id, status in ((ours, 409), (over, 409), ("job_nothing", 404)):
        assert (await control.http.post(f"/v1/jobs/{job_id}/learner-token")).status_code == status
