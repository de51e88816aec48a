"""A job that asks for proofs: its nodes give them, audits find them true, and it is trained as any other."""

from __future__ import annotations

import pytest

from app.protocol import proofs, trajectory
from tests.e2e.stage import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_job_with_proofs_is_trained_and_no_node_is_suspected(stage: Stage) -> None:
    trust = {"proofs": "toploc", "audit_share": 1.0}
    job_id = stage.submit(stop={"steps": 6}, learner={"learning_rate": 1e-3}, trust=trust)
    job = stage.ended(job_id)
    assert (job["status"], job["step"]) == ("succeeded", 6), job["status_reason"]
    for kind in ("trajectory_refused", "node_quarantined"):
        assert stage.events(job_id, kind) == []
    steps = stage.all(f"/v1/jobs/{job_id}/steps")
    assert steps[-1]["metrics"]["audits_passed"] > 0
    assert not {"audits_failed", "audits_suspect"} & set(steps[-1]["metrics"])

    files = sorted((stage.state_dir / "objects/jobs" / job_id / "trajectories").rglob("*.parquet"))
    rows = [row for f in files for row in trajectory.rollouts(trajectory.read_table(f.read_bytes()))]
    assert rows
    for row in rows:
        proofs.check(row.proofs or b"", row.written, row.span_starts)
