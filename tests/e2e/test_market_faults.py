"""The marketplace misbehaves while we rent and give back: nothing is orphaned, nothing is rented twice."""

from __future__ import annotations

import pytest

from tests.e2e.stage import Stage, wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
STEPS = 4


def test_every_fault_of_renting_is_survived_without_an_orphan(stage: Stage) -> None:
    for kind in ("429", "500", "never_starts", "outbid_loading", "drop_after_process"):
        stage.fault(kind)
    for kind in ("500", "drop_after_process"):
        stage.fault(kind, call="destroy")
    stage.fault("500", call="list")
    stage.fault("list_truncated", call="list")
    job_id = stage.submit(name="faults", budget_usd="5.00", stop={"steps": STEPS}, fleet={"max_nodes": 1})

    job = stage.ended(job_id)
    assert (job["status"], job["step"]) == ("succeeded", STEPS), job["status_reason"]
    books = wait(lambda: _empty(stage), "the marketplace is empty")
    assert books["pids"] == []

    leases = stage.rows("SELECT * FROM leases WHERE job_id = ? ORDER BY created_at", job_id)
    assert {x["state"] for x in leases} <= {"released", "refused"}
    limited, failed, broken, outbid, lost = leases
    assert (limited["state"], limited["instance_id"]) == ("refused", None)
    assert (failed["state"], failed["instance_id"]) == ("refused", None)
    for lease in (broken, outbid):
        assert lease["state"] == "released"
        assert lease["interrupted"]
        assert lease["gpu_since"] is None, "a machine that never ran is not paid by the hour"
    assert lost["state"] == "released"
    assert lost["join_token_used_at"] is not None
    tried = [x["machine_id"] for x in (failed, broken, outbid, lost)]
    assert len(set(tried)) == 4, "a machine that failed is left alone; being asked too often is nobody's fault"

    adopted = stage.events(job_id, "lease_adopted")
    assert [e["data"]["lease"] for e in adopted] == [lost["id"]], "the answer was lost, the machine was not"
    asked = stage.asked()["creates_by_label"]
    assert {x["label"]: asked.get(x["label"]) for x in leases} == {x["label"]: 1 for x in leases}
    assert stage.events(job_id, "release_failed"), "a destroy that failed is tried again"
    ours = sum(x[f"spent_{kind}"] for x in leases for kind in ("gpu", "disk", "download", "upload"))
    bill = sum(i["billed_micros"] for i in stage.instances(job_id).values())
    assert ours == pytest.approx(bill, rel=0.01, abs=10)


def _empty(stage: Stage) -> dict[str, object] | None:
    books = stage.books()
    return books if books["running"] == books["live"] == 0 else None
