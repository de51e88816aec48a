"""How far back a learner may have to go, and so whose files stay."""

from __future__ import annotations

import pytest

from app.fleet.litter import behind, checkpoint_of, done_before
from app.protocol.job import JobSpec


def job(staleness: int = 6, **learner: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": "tiny",
            "task": {"name": "reasoning_gym", "params": {"dataset": "gcd"}},
            "budget_usd": "1",
            "staleness_budget": staleness,
            "learner": learner,
        }
    )


def test_uploads_are_as_far_apart_as_the_longest_period_of_the_job_lets_them_be() -> None:
    assert behind(job(), 6, 0) == 50, "every fifth checkpoint, one in five steps"
    assert behind(job(), 2, 0) == 50, "S was lowered meanwhile"
    assert behind(job(), 11, 0) == 100, "or raised"
    assert behind(job(checkpoint_every=3), 6, 0) == 30
    assert behind(job(checkpoint_upload_every=None), 6, 0) == 10
    assert behind(job(), 6, 70) == 70


@pytest.mark.parametrize(
    ("step", "stored", "before"),
    [
        (62, [], 12),
        # Uploads of the checkpoints after step 50 are not there yet, or fail.
        (110, [50], 50),
        (400, [25, 50], 25),
        (400, [50, 25, 5], 25),
        (400, [395, 400], 350),
        # It went back to a checkpoint before the newest one.
        (60, [25, 100], 10),
    ],
)
def test_files_stay_that_the_last_two_checkpoints_in_the_store_need(step: int, stored: list[int], before: int) -> None:
    assert done_before(job(), 2, step, stored, 0) == before


def test_the_best_checkpoint_does_not_keep_the_files_of_the_whole_job() -> None:
    assert done_before(job(checkpoint_keep=1), 6, 400, [10, 300], 0) == 300
    assert done_before(job(checkpoint_keep=3), 6, 400, [10, 250, 300], 0) == 250


@pytest.mark.parametrize(
    ("key", "step"),
    [
        ("jobs/j/checkpoints/50/COMMIT", 50),
        ("jobs/j/checkpoints/50/state.json", None),
        ("jobs/j/checkpoints/metrics.jsonl", None),
        ("jobs/j/checkpoints/x/COMMIT", None),
        ("jobs/j/trajectories/50/COMMIT", None),
    ],
)
def test_a_checkpoint_counts_by_its_marker(key: str, step: int | None) -> None:
    assert checkpoint_of(key) == step
