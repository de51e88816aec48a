"""A node that answers held-out prompts falsely is out before its word counts; answers of honest ones pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.liars import CHEAT, Lab
from tests.e2e.stage import Stage, running, small_job, wait
from tests.e2e.test_liars import Street, quarantined

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A service of its own: the machine of the liar is left alone for hours."""
    with running(tmp_path) as made:
        yield made


def test_an_evaluation_by_the_fleet_counts_nothing_that_a_liar_said(stage: Stage) -> None:
    # It takes seconds to load, in which machines would start.
    lab = Lab(small_job()["task"], 8, stage.state_dir / "learners")
    job_id = stage.submit(
        name="cheat", budget_usd="20.00", safety_factor=10, stop={"steps": 2000}, staleness_budget=4, publish_period=1,
        batch={"prompts": 8, "group_size": 4}, fleet={"max_nodes": 2},
        learner={"learning_rate": 1e-4, "eval_every": 5, "eval_prompts": 24, "eval_samples": 1},
    )  # fmt: skip
    lab.follow(job_id)
    street = Street(stage, job_id, lab)
    street.take_over(CHEAT)
    liar = street.nodes[CHEAT]
    try:
        wait(lambda: liar.id in quarantined(stage, job_id), "who cheats is in quarantine", 200)
        assert liar.over.wait(20), "and was told to go"
    finally:
        liar.close()
    event = quarantined(stage, job_id)[liar.id]
    assert "a held-out reward is" in event["message"] or "a reward is" in event["message"]
    assert "-eval-" in event["message"]
    assert quarantined(stage, job_id).keys() == {liar.id}, "nobody else"

    def evaluated() -> list[str]:
        return [e["message"] for e in stage.events(job_id, "evaluated") if "by the fleet" in e["message"]]

    wait(lambda: len(evaluated()) >= 2, "others are believed", 200)
    assert not [said for said in evaluated() if "fleet: 1.0000" in said]
    rows = stage.rows(
        "SELECT node_id, verdict, fault FROM audits WHERE job_id = ? AND work_item LIKE '%-eval-%'", job_id
    )
    honest = [row for row in rows if row["node_id"] != liar.id]
    assert len(honest) >= 2
    assert {(row["verdict"], row["fault"]) for row in honest} == {("passed", "")}
    waiting = "SELECT count(*) AS n FROM exam_items WHERE job_id = ? AND node_id = ?"
    assert stage.rows(waiting, job_id, liar.id)[0]["n"] == 0
    stage.http.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
    assert stage.ended(job_id)["status"] == "cancelled"
