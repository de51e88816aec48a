"""A learner against a control service over HTTP: a whole job, a kill, a failure, a replacement."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import torch

from app.learner.config import LearnerSettings
from app.learner.evaluate import Evaluator
from app.learner.process import run
from app.learner.tiny import tiny_model
from app.protocol.errors import TaskFailed
from app.protocol.job import JobSpec
from app.snapshots.manifest import Probe
from app.storage.stores import FolderStore
from tests.integration.learner.fake_control import JOB, TOKEN, FakeService, serving
from tests.unit.learner.test_boards import Wandb, shown

CACHE = Path(__file__).parents[3] / ".echo2" / "test-cache"


def spec(**changes) -> JobSpec:
    learner = {"learning_rate": 6e-4, "eval_every": 2, "eval_by": "learner", "eval_prompts": 32}
    learner |= changes.pop("learner", {})
    return JobSpec.model_validate(
        {
            "model": "tiny",
            "task": {
                "name": "reasoning_gym",
                "params": {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5},
            },
            "budget_usd": "1",
            "stop": {"steps": 4},
            "batch": {"prompts": 4, "group_size": 4},
            "sampling": {"max_tokens": 8},
            "learner": learner,
            **changes,
        }
    )


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def service_for(tmp_path: Path, job: JobSpec) -> FakeService:
    return FakeService(job, FolderStore(tmp_path / "objects"), tiny_model(CACHE))


def settings(tmp_path: Path, url: str) -> LearnerSettings:
    return LearnerSettings(
        control_url=url,
        learner_token=TOKEN,
        job_id=JOB,
        state_dir=tmp_path,
        cache_dir=CACHE,  # type: ignore[arg-type]
    )


class Background:
    """A learner in a thread of this process."""

    def __init__(self, tmp_path: Path, url: str) -> None:
        self._code: list[int] = []
        self._thread = threading.Thread(target=lambda: self._code.append(run(settings(tmp_path, url))), daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def exit_code(self) -> int:
        self._thread.join(60)
        return self._code[0]


def spawn(tmp_path: Path, url: str, log: str) -> subprocess.Popen:
    env = {
        **os.environ,
        "ECHO2_CONTROL_URL": url,
        "ECHO2_LEARNER_TOKEN": TOKEN,
        "ECHO2_STATE_DIR": str(tmp_path),
        "ECHO2_CACHE_DIR": str(CACHE),
    }
    with (tmp_path / log).open("w") as out:
        return subprocess.Popen([sys.executable, "-m", "app.learner", "--job", JOB], env=env, stderr=out)


def test_a_whole_job(tmp_path: Path):
    service = service_for(tmp_path, spec())
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 0
    assert sorted(service.steps) == [1, 2, 3, 4]
    used = [w for s in service.steps.values() for w in s["trained"]]
    assert len(used) == len(set(used)) == 16
    for step in service.steps.values():
        assert set(map(int, step["lags"])) <= {0, 1, 2, 3}
        assert step["t_train"] > 0
        # Log-probs of a node that holds the bf16 snapshot are close to the learner's own.
        assert step["metrics"]["mismatch_kl"] < 0.05
    assert [(e["step"], e["initial"], e["final"]) for e in service.evals] == [
        (0, True, False),
        (2, False, False),
        (4, False, False),
        (4, False, True),
    ]
    ready = service.ready[0]
    assert ready["resume_step"] == 0
    assert ready["t_train_prior"] > 0
    assert {a["path"] for a in ready["assets"]} >= {"config.json", "tokenizer.json"}
    assert service.done is not None
    assert service.done["status"] == "succeeded"
    check_order(service)
    check_store(service, ready)


def check_order(service: FakeService) -> None:
    """v0 can be pulled before `ready`; `done` is the last word but for the index's poll."""
    order = [name for name in service.order if name != "heartbeat"]
    assert order[:4] == ["start", "published", "published", "ready"]
    assert order[-1] == "done"
    assert service.published[:2] == [(0, False), (0, True)]
    assert service.beats[0]["state"] == "loading"


def check_store(service: FakeService, ready: dict) -> None:
    """Snapshots are signed by the announced key; the final model opens and differs from the first."""
    version = max(v for v, _ in service.published)
    manifest = service.manifest(version, ready["manifest_public_key"])
    assert manifest.version == version
    assert abs(manifest.payload_bytes - ready["snapshot_bytes"]) < 10_000
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert service.done is not None
    final = service.store.path(service.done["final_prefix"] + "config.json").parent
    trained = AutoModelForCausalLM.from_pretrained(final)
    start = AutoModelForCausalLM.from_pretrained(tiny_model(CACHE))
    assert not torch.equal(trained.model.norm.weight, start.model.norm.weight)
    assert AutoTokenizer.from_pretrained(final).chat_template
    check_probe(manifest.probe, trained)
    for asset in ready["assets"]:
        assert service.store.head(f"jobs/{JOB}/model/{asset['path']}").size == asset["size"]


def check_probe(probe: Probe | None, model) -> None:
    """An engine that holds these weights in bfloat16 says what the manifest says."""
    assert probe is not None
    ids = torch.tensor([probe.token_ids])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
    found = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    assert found.tolist() == pytest.approx(probe.logprobs, abs=1e-4)


@pytest.mark.parametrize("rewards", ["learner", "both"])
def test_a_job_whose_rewards_the_learner_computes(tmp_path: Path, rewards: str):
    service = service_for(tmp_path, spec(rewards=rewards, stop={"steps": 2}))
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 0
    # With `learner` nodes hand in 0; the model gets about one answer in five right.
    assert 0 < sum(s["reward"] for s in service.steps.values()) < 2
    assert all(s["dropped"] == [] for s in service.steps.values())


def test_what_was_trained_is_saved_although_its_last_evaluation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    evaluate, asked = Evaluator.run, []

    def fails(self: Evaluator) -> float:
        asked.append(self)
        if len(asked) > 1:
            raise TaskFailed("not one answer could be scored")
        return evaluate(self)

    monkeypatch.setattr(Evaluator, "run", fails)
    service = service_for(tmp_path, spec(stop={"steps": 2}, learner={"eval_by": "fleet"}))
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 1
    assert service.done is not None
    assert service.done["status"] == "failed"
    assert service.done["reason"].startswith("not one answer could be scored; the model is saved all the same")
    for kept in ("final/model.safetensors", "final/tokenizer.json", "checkpoints/2/COMMIT"):
        assert service.store.head(f"jobs/{JOB}/{kept}") is not None, kept


def test_every_step_and_evaluation_goes_to_tensorboard_and_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", package)
    service = service_for(tmp_path, spec(stop={"steps": 2}, learner={"tensorboard": True, "wandb": True}))
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 0
    folder = tmp_path / "learners" / JOB
    curves = shown(folder / "tensorboard")
    assert [step for step, _ in curves["train/loss"]] == [1, 2]
    assert [step for step, _ in curves["eval/reward"]] == [0, 2]
    assert (package.given["id"], package.given["dir"]) == (JOB, str(folder / "wandb"))
    assert [row["step"] for row in package.rows if "train/loss" in row] == [1, 2]
    assert package.finished


@pytest.mark.parametrize(
    ("board", "package", "says"),
    [("tensorboard", "torch.utils.tensorboard", "echo2[tensorboard]"), ("wandb", "wandb", "pip install wandb")],
)
def test_a_board_without_its_package_fails_before_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, board: str, package: str, says: str
):
    monkeypatch.setitem(sys.modules, package, None)
    service = service_for(tmp_path, spec(learner={board: True}))
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 1
    assert service.ready == []
    assert service.done is not None
    assert service.done["status"] == "failed"
    assert says in service.done["reason"]


@pytest.mark.timeout(400)
def test_a_killed_learner_goes_on_where_its_checkpoint_was(tmp_path: Path):
    service = service_for(tmp_path, spec(stop={"steps": 9}))
    with serving(service) as url:
        first = spawn(tmp_path, url, "first.log")
        try:
            service.wait(lambda: max(service.steps, default=0) >= 3 and max(v for v, _ in service.published) >= 2, 150)
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait(20)
        with service.lock:
            before = dict(service.steps)
            newest = max(v for v, _ in service.published)
        second = spawn(tmp_path, url, "second.log")
        try:
            assert second.wait(240) == 0, (tmp_path / "second.log").read_text()
        finally:
            second.kill()
    assert service.epoch == 2
    resumed = service.ready[1]["resume_step"]
    # A checkpoint may be on the disk before its step's report has arrived.
    assert newest <= resumed <= max(before) + 1
    assert sorted(service.steps) == list(range(1, 10))
    for step in range(1, min(resumed, max(before)) + 1):
        assert service.steps[step] == before[step]
    used = [w for s in service.steps.values() for w in s["trained"]]
    assert len(used) == len(set(used)) == 36
    assert [e["step"] for e in service.evals if e["initial"]] == [0]
    assert service.done is not None
    assert service.done["step"] == 9


def test_a_learner_that_goes_on_says_the_s_of_its_checkpoint(tmp_path: Path):
    service = service_for(tmp_path, spec(stop={"steps": 2}, staleness={"max": 3, "adaptive": True}))
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 0
        assert run(settings(tmp_path, url)) == 0
    kept = json.loads((tmp_path / "learners" / JOB / "checkpoints" / "000000002" / "state.json").read_bytes())
    first, second = service.ready
    assert (first["staleness"], second["resume_step"]) == (None, 2)
    assert second["staleness"]["staleness_budget"] == kept["adaptive"]["staleness"]


def test_a_damaged_checkpoint_costs_steps_but_no_version_is_published_twice(tmp_path: Path):
    service = service_for(tmp_path, spec())
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 0
        first = list(service.published)
        manifest = service.store.get(f"jobs/{JOB}/snapshots/4/manifest.json")
        (tmp_path / "learners" / JOB / "checkpoints" / "000000004" / "model.safetensors").write_bytes(b"gone")
        service.store.put(f"jobs/{JOB}/checkpoints/4/model.safetensors", b"gone")
        service.spec = spec(stop={"steps": 6})
        assert run(settings(tmp_path, url)) == 0
    assert service.ready[1]["resume_step"] == 2
    assert sorted(service.steps) == [1, 2, 3, 4, 5, 6]
    again = service.published[len(first) :]
    assert again[0] == (4, False)
    assert {v for v, _ in again} == {4, 5}
    assert service.store.get(f"jobs/{JOB}/snapshots/4/manifest.json") == manifest
    used = [w for s in service.steps.values() for w in s["trained"]]
    assert len(used) == len(set(used)) == 24


def test_a_learner_on_another_machine_goes_on_from_the_object_store(tmp_path: Path):
    service = service_for(tmp_path, spec())
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 0
        shutil.rmtree(tmp_path / "learners")
        service.spec = spec(stop={"steps": 6}, learner={"final": "best"})
        assert run(settings(tmp_path, url)) == 0
        assert service.store.head(f"jobs/{JOB}/checkpoints/4/COMMIT") is not None
    assert service.ready[1]["resume_step"] == 4
    assert sorted(service.steps) == [1, 2, 3, 4, 5, 6]
    used = [w for s in service.steps.values() for w in s["trained"]]
    assert len(used) == len(set(used))
    lines = service.store.get(f"jobs/{JOB}/metrics.jsonl").decode().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [r["step"] for r in rows if r["kind"] == "step"] == [5, 6]
    assert {"mismatch_kl_node_node-1", "t_forward", "t_optimizer", "advantage_std", "tokens_per_s"} <= rows[0].keys()


def test_reports_survive_a_service_that_is_away(tmp_path: Path):
    """Steps go on while `/steps` is refused; killed then, the next process hands in what was in the checkpoint."""
    service = service_for(tmp_path, spec(stop={"steps": 6}))
    with serving(service) as url:
        service.refuse_steps = True
        first = spawn(tmp_path, url, "first.log")
        checkpoint = tmp_path / "learners" / JOB / "checkpoints" / "000000002" / "COMMIT"
        try:
            service.wait(checkpoint.exists)
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait(20)
        assert service.steps == {}
        service.refuse_steps = False
        assert run(settings(tmp_path, url)) == 0
    assert service.ready[1]["resume_step"] >= 2
    assert sorted(service.steps) == [1, 2, 3, 4, 5, 6]
    used = [w for s in service.steps.values() for w in s["trained"]]
    assert len(used) == len(set(used)) == 24


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "/no/such/model"}, "does not exist"),
        ({"task": {"name": "reasoning_gym", "params": {"dataset": "spel_backward"}}}, "did you mean spell_backward"),
        ({"sampling": {"max_tokens": 1000}}, "256 positions"),
    ],
)
def test_what_only_loading_shows_fails_before_ready(tmp_path: Path, changes: dict, says: str):
    service = service_for(tmp_path, spec())
    service.spec = spec(**changes)
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 1
    assert service.ready == []
    assert service.published == []
    assert service.done is not None
    assert service.done["status"] == "failed"
    assert says in service.done["reason"]


def test_a_lost_checkpoint_is_not_a_fresh_start(tmp_path: Path):
    service = service_for(tmp_path, spec())
    service.published = [(2, True)]
    service.steps = {1: {"trained": [], "dropped": []}}
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 1
    assert service.done is not None
    assert "holds no checkpoint" in service.done["reason"]


def test_a_replaced_learner_ends_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    service = service_for(tmp_path, spec(stop={"steps": 1000}))
    with serving(service) as url, Background(tmp_path, url) as learner:
        service.wait(lambda: len(service.steps) >= 1)
        with service.lock:
            service.epoch += 1
        assert learner.exit_code() == 1
    assert service.done is None
    assert "another has taken over" in caplog.text


def test_finish_saves_the_model(tmp_path: Path):
    service = service_for(tmp_path, spec(stop={"steps": 1000}))
    service.command = "finish"
    with serving(service) as url:
        assert run(settings(tmp_path, url)) == 0
    assert service.done is not None
    assert (service.done["status"], service.done["reason"]) == ("finished", "said so")
    assert service.store.head(service.done["final_prefix"] + "model.safetensors") is not None


def test_a_wrong_setting_is_one_line(tmp_path: Path):
    env = {**os.environ, "ECHO2_CONTROL_URL": "localhost", "ECHO2_LEARNER_TOKEN": "t", "ECHO2_STATE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "app.learner", "--job", "j"], env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "ECHO2_CONTROL_URL" in result.stderr.strip().splitlines()[-1]


def test_the_relay_serves_the_version_to_token_holders_and_abort_ends_without_a_word(tmp_path: Path):
    service = service_for(tmp_path, spec(stop={"steps": 1000}))
    with serving(service) as url, Background(tmp_path, url) as learner:
        service.wait(lambda: len(service.ready) == 1)
        link = f"{service.relay_url}/snapshots/next?after=-1&wait_s=0"
        assert httpx.get(link, timeout=10).status_code == 401
        answer = httpx.get(link, headers={"Authorization": "Bearer relay-token"}, timeout=10)
        assert answer.status_code == 200
        service.command = "abort"
        assert learner.exit_code() == 0
    assert service.done is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(link, timeout=10)
