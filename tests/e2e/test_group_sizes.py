"""Jobs whose groups differ in size, and whose nodes send only a part of each."""

from __future__ import annotations

from collections import Counter

import pytest

from app.protocol import trajectory
from tests.e2e.stage import Stage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def _files(stage: Stage, job_id: str) -> list[trajectory.Rollout]:
    files = (stage.state_dir / "objects/jobs" / job_id / "trajectories").rglob("*.parquet")
    return [row for f in files for row in trajectory.rollouts(trajectory.read_table(f.read_bytes()))]


def test_a_job_is_trained_on_groups_of_different_sizes(stage: Stage) -> None:
    # So few prompts that they come again, with what is known of them.
    params = {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5, "size": 40}
    task = {"name": "reasoning_gym", "params": params}
    batch = {"prompts": 8, "group_size": 4, "group_policy": "cures", "max_group": 8}
    job_id = stage.submit(stop={"steps": 12}, batch=batch, task=task, learner={"learning_rate": 1e-3})
    job = stage.ended(job_id)
    assert (job["status"], job["step"]) == ("succeeded", 12), job["status_reason"]
    assert stage.events(job_id, "trajectory_refused") == []
    sizes = Counter(Counter(row.work_item for row in _files(stage, job_id)).values())
    assert len(sizes) > 1
    assert all(2 <= size <= 8 for size in sizes), sizes
    # Every window of a batch that was made has R completions, whatever became of them.
    items = stage.rows(
        "SELECT ordinal, group_size FROM work_items WHERE job_id = ? AND ordinal >= 0 ORDER BY ordinal", job_id
    )
    windows = [items[i : i + 8] for i in range(0, len(items), 8)]
    assert {sum(item["group_size"] for item in window) for window in windows} == {32}
    steps = stage.all(f"/v1/jobs/{job_id}/steps")
    trained = stage.rows(
        "SELECT trained_step AS step, SUM(group_size) AS n FROM work_items WHERE job_id = ? AND status = 'trained' "
        "GROUP BY trained_step", job_id,
    )  # fmt: skip
    assert {row["step"]: row["n"] for row in trained} == {step["step"]: step["rollouts"] for step in steps}
    known = stage.rows("SELECT tries, successes, mean_length FROM prompt_stats WHERE job_id = ?", job_id)
    assert known
    assert all(1 <= row["mean_length"] <= 8 and 0 <= row["successes"] <= row["tries"] for row in known)


def test_a_job_whose_nodes_send_half_of_each_group_is_trained(stage: Stage) -> None:
    job_id = stage.submit(stop={"steps": 4}, batch={"prompts": 4, "group_size": 8, "prune": "shuffle_r1"})
    job = stage.ended(job_id)
    assert (job["status"], job["step"]) == ("succeeded", 4), job["status_reason"]
    assert stage.events(job_id, "trajectory_refused") == []
    assert set(Counter(row.work_item for row in _files(stage, job_id)).values()) == {4}
    totals = stage.get(f"/v1/jobs/{job_id}/fleet")["totals"]
    assert totals["rollouts_accepted"] % 8 == 0
    assert totals["tokens_generated"] >= totals["rollouts_accepted"]
