"""Learner, node and control service are killed under a job; nobody who pays for it notices."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime
from typing import Any

import pytest

from tests.e2e.stage import Stage
from tests.e2e.story import GROUP, PROMPTS, STEPS, Story

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
LETTING_GO = ("lease_releasing", "lease_released", "node_draining", "node_lost", "preempted", "lease_adopted")


def test_the_job_succeeds_all_the_same(stage: Stage, story: Story) -> None:
    assert (story.end["status"], story.end["step"]) == ("succeeded", STEPS), story.end["status_reason"]
    assert story.end["final_prefix"] == f"jobs/{story.job_id}/final/"
    assert stage.get(f"/v1/jobs/{story.job_id}/fleet")["nodes"] == []


def test_a_killed_learner_goes_on_without_a_gap_or_a_repetition(stage: Stage, story: Story) -> None:
    first, second = story.learner_pids
    assert first != second
    assert 0 < story.step_at_kill < STEPS
    steps = stage.all(f"/v1/jobs/{story.job_id}/steps")
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    # A step may take further whole groups where some have no signal.
    assert all(PROMPTS * GROUP <= s["rollouts"] <= 2 * PROMPTS * GROUP for s in steps)
    assert all(s["rollouts"] % GROUP == 0 for s in steps)
    # What was accepted meanwhile is there at once, however much was consumed before.
    assert steps[story.resumed_step]["t_idle"] < 8.0
    trained = stage.rows("SELECT trained_step FROM work_items WHERE job_id = ? AND status = 'trained'", story.job_id)
    assert Counter(row["trained_step"] for row in trained) == {s["step"]: s["rollouts"] // GROUP for s in steps}
    assert len(stage.events(story.job_id, "learner_started")) == 2, "the second one outlived the control service"


def test_a_killed_node_is_replaced_and_its_work_done_by_others(stage: Stage, story: Story) -> None:
    [lease] = [x for x in stage.get(f"/v1/jobs/{story.job_id}/cost")["leases"] if x["id"] == story.victim["lease_id"]]
    assert lease["state"] == "released"
    assert lease["to"] < story.restarted_at
    assert len(story.before) == 2
    assert story.victim["lease_id"] not in story.before
    items = stage.rows("SELECT id, status, node_id, attempts FROM work_items WHERE job_id = ?", story.job_id)
    again = [x for x in items if x["id"] in story.victims_work]
    assert {x["status"] for x in again} == {"trained"}
    assert all(x["attempts"] > 1 and x["node_id"] != story.victim["id"] for x in again)


def test_a_killed_control_service_goes_on_with_the_same_leases(stage: Stage, story: Story) -> None:
    assert story.machines_without_service == 2, "the marketplace and its machines do not die with the service"
    assert story.after == story.before
    assert all(story.before.values())
    drained = next(e["at"] for e in stage.events(story.job_id, "job_draining"))
    since = [e for e in stage.events(story.job_id, *LETTING_GO) if story.restarted_at < e["at"] < drained]
    assert since == []


def test_nothing_is_rented_twice(stage: Stage, story: Story) -> None:
    labels = {row["label"] for row in stage.rows("SELECT label FROM leases WHERE job_id = ?", story.job_id)}
    creates = {k: n for k, n in stage.asked()["creates_by_label"].items() if k in labels}
    assert creates == dict.fromkeys(labels, 1)
    assert len(labels) == 3


def test_the_ledger_has_every_second_once_and_agrees_with_the_bill(stage: Stage, story: Story) -> None:
    leases = stage.rows("SELECT * FROM leases WHERE job_id = ?", story.job_id)
    entries = defaultdict(list)
    corrections: list[dict[str, Any]] = []
    for row in stage.rows("SELECT * FROM ledger WHERE job_id = ? ORDER BY start, id", story.job_id):
        # A correction by the provider's bill has no length; what we counted ourselves has.
        (entries[row["lease_id"], row["kind"]] if row["end"] > row["start"] else corrections).append(row)
    for lease in leases:
        disk_rate = lease["disk_micros_gb_month"] * lease["disk_gb"] / 720 / 3600
        # The GPU of a machine that was found dead is paid until then, of any other until it was given back.
        assert (lease["gpu_until"] < lease["ended_at"]) == bool(lease["interrupted"])
        gpu, disk = entries[lease["id"], "gpu"], entries[lease["id"], "disk"]
        # The bids of the two that worked on were raised: another rate is another entry.
        assert len(gpu) >= (1 if lease["interrupted"] else 2)
        _contiguous(gpu, lease["gpu_since"], lease["gpu_until"], lease["rate_micros_h"] / 3600)
        _contiguous(disk, lease["exists_since"], lease["ended_at"], disk_rate)
        seconds = lease["ended_at"] - lease["exists_since"]
        assert sum(r["micros"] for r in disk) == pytest.approx(disk_rate * seconds, abs=2)
    counted = sum(row["micros"] for rows in entries.values() for row in rows)
    ours = counted + sum(row["micros"] for row in corrections)
    cost = stage.get(f"/v1/jobs/{story.job_id}/cost")
    assert ours == round(float(cost["spent_usd"]) * 1e6)
    bill = sum(i["billed_micros"] for i in stage.instances(story.job_id).values())
    # That a machine is dead is seen when its list is asked next, a second later; the bill corrects that.
    unseen = sum(lease["rate_micros_h"] for lease in leases if lease["interrupted"]) / 3600
    assert counted == pytest.approx(bill, abs=0.01 * bill + unseen)
    assert ours == pytest.approx(bill, rel=0.01)


def _contiguous(rows: list[dict[str, Any]], begin: float, end: float, rate: float) -> None:
    """Entries follow each other from begin to end. What costs less than a micro-dollar is carried over without one."""
    ends, starts = [begin, *(r["end"] for r in rows)], [*(r["start"] for r in rows), end]
    gaps = [start - before for before, start in zip(ends, starts, strict=True)]
    assert all(0 <= gap < 1 / rate + 1e-6 for gap in gaps), gaps


def test_a_webhook_is_acted_on_at_once_and_only_once(stage: Stage, story: Story) -> None:
    assert [a.status_code for a in story.hook_answers] == [202, 202]
    assert [a.json()["replay"] for a in story.hook_answers] == [False, True]
    told = [e for e in stage.events(story.job_id, "reranked") if "$0.110000/h" in e["message"]]
    assert len(told) == 1
    raised = [e["data"]["lease"] for e in stage.events(story.job_id, "bid_raised")]
    assert sorted(raised) == sorted(story.after), "machines that would be lost are bid for anew, once"
    assert story.hook_answered_at is not None
    # A second on a quiet machine. That no round is waited for, tests/integration/control/test_hooks.py shows.
    assert (datetime.fromisoformat(told[0]["at"]) - story.hook_answered_at).total_seconds() < 15.0
