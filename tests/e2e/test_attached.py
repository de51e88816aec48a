"""A learner that the user starts elsewhere trains an adapter; it and the control service come and go in any order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stage import CACHE, FINAL, REPOSITORY, Stage, wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@contextlib.contextmanager
def attached(stage: Stage, job_id: str, token: str, folder: Path, log: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m app.learner` with a learner token on another machine, as far as it can tell."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")}
    where = ["--job", job_id, "--url", stage.control_url, "--state-dir", str(folder)]
    with (folder / log).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.learner", *where],
            cwd=REPOSITORY,
            env={**own, "ECHO2_LEARNER_TOKEN": token, "ECHO2_CACHE_DIR": str(CACHE), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def test_attached_learner_and_service_are_started_in_any_order(stage: Stage, tmp_path: Path) -> None:
    learner = {"placement": "attached", "lora": {"rank": 4, "alpha": 8}, "final_merged": True, "learning_rate": 1e-3}
    job_id = stage.submit(learner=learner, stop={"steps": 12})
    told = stage.cli("job", "learner-token", job_id)
    assert told.returncode == 0, told.stderr
    token = told.stdout.strip()
    assert stage.job(job_id)["status_reason"] == "waits for an attached learner"
    stage.kill()
    # It is there before the service is.
    with attached(stage, job_id, token, tmp_path, "first.log") as first:
        stage.start()
        wait(lambda: stage.job(job_id)["step"] >= 3, "step 3")
        first.send_signal(signal.SIGKILL)
        first.wait(20)
    at_kill = stage.job(job_id)["step"]
    assert at_kill < 12
    with attached(stage, job_id, token, tmp_path, "second.log") as second:
        wait(lambda: stage.job(job_id)["status"] in FINAL, "the job ends")
        job = stage.job(job_id)
        assert (job["status"], job["step"]) == ("succeeded", 12), job["status_reason"]
        assert wait(lambda: second.poll() == 0, "the learner ends by itself", 30)
    assert [s["step"] for s in stage.all(f"/v1/jobs/{job_id}/steps")] == list(range(1, 13))
    assert len(stage.events(job_id, "learner_started")) == 2
    assert not (stage.state_dir / "learners" / job_id).exists(), "the service started none of its own"
    check_final(stage.state_dir / "objects" / job["final_prefix"])


def check_final(final: Path) -> None:
    """An adapter that PEFT opens, the merged model beside it; a version had a fraction of the model's size."""
    names = {path.name for path in final.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert {"config.json", "model.safetensors"} <= {path.name for path in (final / "merged").iterdir()}
    assert (final / "adapter_model.safetensors").stat().st_size < (
        final / "merged/model.safetensors"
    ).stat().st_size / 3
