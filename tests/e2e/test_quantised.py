"""A job whose nodes get their weights in eight bits: files say so, and what the learner keeps is not rounded."""

from __future__ import annotations

import pytest
from safetensors import safe_open

from app.protocol import trajectory
from tests.e2e.stage import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_job_with_quantised_snapshots_is_trained_and_its_files_say_so(stage: Stage) -> None:
    changes = {"snapshot": {"quantise": "int8"}, "learner": {"learning_rate": 1e-3, "one_sided": True, "loss": "tis"}}
    job_id = stage.submit(stop={"steps": 6}, **changes)
    job = stage.ended(job_id)
    assert (job["status"], job["step"]) == ("succeeded", 6), job["status_reason"]
    assert stage.events(job_id, "trajectory_refused") == []
    sent = stage.get(f"/v1/jobs/{job_id}/fleet")["broadcast"]
    assert sent["quantise"] == "int8"

    files = sorted((stage.state_dir / "objects/jobs" / job_id / "trajectories").rglob("*.parquet"))
    assert files
    assert {trajectory.quantisation(trajectory.read_table(f.read_bytes())) for f in files} == {"int8"}

    final = stage.state_dir / "objects" / job["final_prefix"] / "model.safetensors"
    with safe_open(final, framework="pt") as model:
        kinds = {model.get_slice(name).get_dtype() for name in model.keys()}  # noqa: SIM118  (not a mapping)
    assert "I8" not in kinds
    largest = max(p["bytes"] for p in sent["publishes"])
    assert largest < 0.7 * final.stat().st_size / (2 if "F32" in kinds else 1)

    # Without lag the sampler differs from the policy by the rounding alone: 3.4e-5 was seen, and 1.5e-5 in bf16.
    kl = [
        s["metrics"]["mismatch_kl_lag_0"]
        for s in stage.all(f"/v1/jobs/{job_id}/steps")
        if "mismatch_kl_lag_0" in s["metrics"]
    ]
    assert kl
    assert all(0 < value < 1e-3 for value in kl), kl
