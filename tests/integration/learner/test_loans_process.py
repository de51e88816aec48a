"""A whole job that borrows what another one was trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from app.learner.process import run
from tests.integration.learner.fake_control import JOB, FakeService, serving
from tests.integration.learner.test_learner_process import service_for, settings, spec


def made(tmp_path: Path, **learner) -> FakeService:
    torch.set_num_threads(1)
    tmp_path.mkdir(exist_ok=True)
    service = service_for(tmp_path, spec(learner=learner))
    with serving(service) as url:
        run(settings(tmp_path, url))
    return service


def test_a_job_borrows_from_one_that_has_ended_and_fails_at_once_where_there_is_none(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    loan = {"borrow": {"job": "other", "share": 1}}
    nothing = made(tmp_path / "nothing", **loan)
    assert nothing.ready == []
    assert nothing.done is not None
    assert "learner.lend" in nothing.done["reason"]
    assert "borrowed_groups" not in made(first, lend=True).steps[1]["metrics"]
    shutil.copytree(first / "objects" / "jobs" / JOB / "lent", second / "objects" / "jobs" / "other" / "lent")
    service = made(second, **loan)
    assert service.done is not None
    assert service.done["status"] == "succeeded"
    told = [service.steps[n] for n in (1, 2, 3, 4)]
    assert sum(s["metrics"]["borrowed_groups"] for s in told) > 0
    assert {s["metrics"]["borrowed_refused"] for s in told} == {0.0}
    assert all(len(s["trained"]) == 4 and not any(w.startswith("borrowed") for w in s["trained"]) for s in told)
