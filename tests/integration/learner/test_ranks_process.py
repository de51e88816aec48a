"""A whole learner on two ranks against a control service over HTTP: a job, and the death of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from app.learner.process import run
from app.learner.tiny import tiny_model
from tests.integration.learner.fake_control import JOB, TOKEN, serving
from tests.integration.learner.test_learner_process import CACHE, service_for, settings, spec
from tests.integration.learner.test_parallel import TOP, torchrun


def spawn(tmp_path: Path, url: str, log: str) -> subprocess.Popen:
    """`torchrun -m app.learner` as a user would."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")} | {"ECHO2_CACHE_DIR": str(CACHE)}
    where = ["--job", JOB, "--url", url, "--token", TOKEN, "--state-dir", str(tmp_path)]
    with (tmp_path / log).open("w") as out:
        return subprocess.Popen(torchrun(2, "-m", "app.learner", *where), cwd=TOP, env=env, stdout=out, stderr=out)


def ranks_of(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """The two learner processes by rank."""
    children = psutil.Process(process.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


@pytest.mark.timeout(180)
def test_a_whole_job_on_two_ranks(tmp_path: Path):
    service = service_for(tmp_path, spec(stop={"steps": 3}, learner={"packing": True}, snapshot={"keyframe_every": 1}))
    with serving(service) as url:
        process = spawn(tmp_path, url, "job.log")
        try:
            assert process.wait(150) == 0, (tmp_path / "job.log").read_text()[-5000:]
        finally:
            process.kill()
    assert sorted(service.steps) == [1, 2, 3]
    assert service.epoch == len(service.ready) == 1, "only rank 0 talks to the control service"
    assert service.done is not None
    assert service.done["status"] == "succeeded"
    for step in service.steps.values():
        assert step["metrics"]["mismatch_kl"] < 0.05
    final = service.store.path(service.done["final_prefix"] + "config.json").parent
    trained, start = (AutoModelForCausalLM.from_pretrained(folder) for folder in (final, tiny_model(CACHE)))
    assert not torch.equal(trained.model.norm.weight, start.model.norm.weight)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_all_and_one_process_goes_on_from_their_checkpoint(tmp_path: Path, victim: int):
    service = service_for(tmp_path, spec(stop={"steps": 7}, snapshot={"keyframe_every": 1}))
    with serving(service) as url:
        process = spawn(tmp_path, url, "job.log")
        try:
            service.wait(lambda: max(service.steps, default=0) >= 3 and max(v for v, _ in service.published) >= 2, 150)
            ranks = ranks_of(process)
            ranks[victim].send_signal(signal.SIGKILL)
            assert process.wait(60) != 0
            gone, alive = psutil.wait_procs(ranks.values(), timeout=5)
            assert (len(gone), alive) == (2, [])
        finally:
            process.kill()
        assert service.done is None, "the job has not failed: a learner started again goes on"
        assert run(settings(tmp_path, url)) == 0
    assert service.ready[1]["resume_step"] >= 2
    assert sorted(service.steps) == [1, 2, 3, 4, 5, 6, 7]
    used = [w for s in service.steps.values() for w in s["trained"]]
    assert len(used) == len(set(used)) == 28
