"""Adaptive staleness at the control service: what the learner asks for holds for all, within the owner's bound."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.control.rig import Learner, World, job_body


def adaptive(bound: int) -> dict[str, Any]:
    """The part of a job."""
    return {"staleness_budget": bound, "staleness": {"max": bound, "adaptive": True}}


async def asked(learner: Learner, staleness: int, period: int = 1, reason: str = "ESS 0.1 is below 0.5") -> Any:
    """A step whose report asks for an S; the answer."""
    learner.step += 1
    body = {
        "step": learner.step,
        "t_train": 1.0,
        "t_idle": 0.0,
        "reward": 0.5,
        "trained": [],
        "lags": {},
        "staleness": {"staleness_budget": staleness, "publish_period": period, "reason": reason},
    }
    answer = await learner.post("steps", body)
    assert answer.is_success, answer.text
    return answer.json()


async def test_a_move_holds_for_learner_admission_and_capacity_and_is_an_event(control: World) -> None:
    job_id = await control.create(**adaptive(6), stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    job = await control.job(job_id)
    assert (job["staleness_budget"], job["publish_period"], job["staleness"]["max"]) == (3, 2, 6)
    told = await asked(learner, 2, 1)
    assert (told["staleness_budget"], told["publish_period"], told["staleness_bound"]) == (2, 1, 6)
    job = await control.job(job_id)
    assert (job["staleness_budget"], job["publish_period"]) == (2, 1)
    events = (await control.get(f"/v1/jobs/{job_id}/events?limit=1000"))["items"]
    (event,) = [e for e in events if e["kind"] == "staleness_changed"]
    assert event["message"] == "S 3 → 2, κ 1: ESS 0.1 is below 0.5"
    assert event["data"] == {"staleness_budget": 2, "publish_period": 1, "reason": "ESS 0.1 is below 0.5"}
    await learner.publish(1)
    control.clock.advance(0.25)
    node.version = 1
    await node.beat()
    short = await minimum(control, job_id, learner)
    await asked(learner, 6, 5, "10 calm steps")
    assert await minimum(control, job_id, learner) < short


async def minimum(control: World, job_id: str, learner: Learner) -> float:
    """μ_min after a round, which is κR / (κT − T_bcast) of the κ in force."""
    await control.rounds(1, 1, learner)
    job = await control.job(job_id)
    kappa, rollouts = job["publish_period"], job["batch"]["prompts"] * job["batch"]["group_size"]
    assert job["learner"]["t_bcast"] == pytest.approx(0.25)
    expected = kappa * rollouts / (kappa * job["learner"]["t_train"] - 0.25)
    assert job["capacity"]["mu_min"] == pytest.approx(expected)
    return float(expected)


async def test_admission_follows_a_lower_s(control: World) -> None:
    job_id = await control.create(**adaptive(3), stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    await asked(learner, 1)
    assert (await node.ask())["items"]
    await learner.train([])
    answer = await node.ask()
    assert (answer["items"], "admission" in answer["reason"]) == ([], True)


async def test_no_move_goes_beyond_the_owners_bound_or_publish_period(control: World) -> None:
    job_id = await control.create(**adaptive(4), publish_period=2, stop={"steps": 50})
    learner, _ = await control.running(job_id)
    told = await asked(learner, 40, 39)
    assert (told["staleness_budget"], told["publish_period"]) == (4, 2)
    await asked(learner, 40, 39)
    assert (await control.kinds(job_id)).count("staleness_changed") == 1
    told = await asked(learner, 2, 9)
    assert (told["staleness_budget"], told["publish_period"]) == (2, 1)
    told = await asked(learner, 4, 3)
    assert (told["staleness_budget"], told["publish_period"]) == (4, 2)


async def test_a_job_with_a_fixed_s_keeps_it(control: World) -> None:
    job_id = await control.create(stop={"steps": 50})
    learner, _ = await control.running(job_id)
    told = await asked(learner, 1)
    assert (told["staleness_budget"], told["staleness_bound"]) == (3, None)


async def test_the_owner_moves_the_bound_of_an_adaptive_job(control: World) -> None:
    job_id = await control.create(**adaptive(6), stop={"steps": 50})
    learner, _ = await control.running(job_id)
    await asked(learner, 2)
    for bound, effective in ((8, 2), (1, 1)):
        answer = await control.http.patch(f"/v1/jobs/{job_id}", json={"staleness_budget": bound})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["staleness_budget"], answer.json()["staleness"]["max"]) == (effective, bound)
        told = (await learner.post("heartbeat", {"step": 1, "state": "waiting"})).json()
        assert (told["staleness_budget"], told["staleness_bound"]) == (effective, bound)


async def test_a_learner_that_goes_back_takes_the_s_of_then_with_it_within_the_bound(control: World) -> None:
    job_id = await control.create(**adaptive(6), stop={"steps": 50})
    learner, _ = await control.running(job_id)
    await asked(learner, 1)
    before = {"staleness_budget": 3, "publish_period": 2, "reason": "it was so"}
    heir = Learner(control, job_id)
    await heir.start()
    await heir.ready(resume_step=0, staleness=before)
    job = await control.job(job_id)
    assert (job["staleness_budget"], job["publish_period"]) == (3, 2)
    await control.http.patch(f"/v1/jobs/{job_id}", json={"staleness_budget": 2})
    await heir.ready(resume_step=0, staleness=before)
    assert (await control.job(job_id))["staleness_budget"] == 2
    await heir.ready(resume_step=0)
    assert (await control.job(job_id))["staleness_budget"] == 2


async def test_staleness_and_budget_that_differ_are_refused(control: World) -> None:
    body = job_body(staleness_budget=3, staleness={"max": 6, "adaptive": True})
    answer = await control.http.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert [e["pointer"] for e in answer.json()["errors"]] == ["/staleness"]
    assert "give one of them" in answer.text
