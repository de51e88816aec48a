"""What a user sees of a job that is over: command line, model folder, event stream, metrics."""

from __future__ import annotations

import json
import re

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.stage import Stage, small_job
from tests.e2e.story import STEPS, Story

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
METRICS = {
    "echo2_mu_pool": "gauge",
    "echo2_mu_target": "gauge",
    "echo2_mu_min": "gauge",
    "echo2_bubble_ratio": "gauge",
    "echo2_dropped_rollouts_total": "counter",
    "echo2_accepted_rollouts_total": "counter",
    "echo2_staleness": "histogram",
    "echo2_broadcast_seconds": "histogram",
    "echo2_train_seconds": "histogram",
    "echo2_reward": "gauge",
    "echo2_spent_usd_total": "counter",
    "echo2_leases": "gauge",
    "echo2_nodes": "gauge",
    "echo2_provider_requests_total": "counter",
    "echo2_reconcile_seconds": "histogram",
}


def test_the_final_model_opens_and_is_the_learners_last(stage: Stage, story: Story) -> None:
    final = stage.state_dir / "objects" / str(story.end["final_prefix"])
    model = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(final)
    checkpoints = stage.state_dir / "learners" / story.job_id / "checkpoints"
    last = load_file(checkpoints / f"{STEPS:09d}" / "model.safetensors")
    own = model.state_dict()
    assert last
    assert all(torch.equal(own[name], tensor) for name, tensor in last.items())
    prompt = tokenizer("cat", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_the_event_stream_of_a_finished_job_ends(stage: Stage, story: Story) -> None:
    events = stage.events(story.job_id)
    seen: list[str] = []
    middle = str(events[len(events) // 2]["id"])
    headers = {"Accept": "text/event-stream", "Last-Event-ID": middle}
    with stage.http.stream("GET", f"/v1/jobs/{story.job_id}/events", headers=headers, timeout=20.0) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        seen = [line.removeprefix("id: ") for line in stream.iter_lines() if line.startswith("id: ")]
    assert seen == [str(e["id"]) for e in events[len(events) // 2 + 1 :]]
    assert events[-1]["kind"] == "job_succeeded"


def test_all_metrics_of_the_contract_are_there(stage: Stage, story: Story) -> None:
    text = httpx.get(f"{stage.control_url}/metrics", timeout=10.0, trust_env=False).text
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert {name: types.get(name) for name in METRICS} == METRICS
    assert f'echo2_staleness_bucket{{job="{story.job_id}",le="3.0"}}' in text
    assert re.search(r'^echo2_leases\{provider="marketplace",state="released"\} \d', text, re.MULTILINE)
    assert re.search(r'^echo2_spent_usd_total\{kind="gpu"\} 0\.\d', text, re.MULTILINE)


@pytest.mark.parametrize("what", [["job", "list"], ["job", "show", "ID"], ["fleet"], ["fleet", "ID"], ["cost", "ID"]])
def test_reading_on_the_command_line(stage: Stage, story: Story, what: list[str]) -> None:
    arguments = [story.job_id if word == "ID" else word for word in what]
    table = stage.cli(*arguments)
    assert (table.returncode, table.stderr) == (0, "")
    assert table.stdout.strip()
    assert "Traceback" not in table.stdout
    answer = stage.cli(*arguments, "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    path = {"job": "/v1/jobs", "fleet": "/v1/fleet", "cost": "/v1/cost"}[what[0]]
    path = path if what[-1] != "ID" else f"/v1/jobs/{story.job_id}" + ("" if what[0] == "job" else f"/{what[0]}")
    assert json.loads(answer.stdout).keys() == stage.get(path).keys()


def test_offers_on_the_command_line_are_ranked(stage: Stage, story: Story) -> None:
    table = stage.cli("offers")
    assert (table.returncode, table.stderr) == (0, "")
    assert "H100 SXM" in table.stdout
    answer = stage.cli("offers", story.job_id, "--json")
    offers = json.loads(answer.stdout)["items"]
    free = [o for o in offers if not o["excluded"]]
    # Its own machines may still cool down after what the story did to them.
    assert {o["gpu_name"] for o in free} <= {"RTX 3090"}, "as the job sees the market"
    assert any("gpu_names does not name" in (o["excluded"] or "") for o in offers)
    assert {"RTX 3090", "RTX 4090", "H100 SXM"} <= {o["gpu_name"] for o in offers}, "nothing is hidden"
    assert [o["rho"] for o in free] == sorted(o["rho"] for o in free)


def test_exit_statuses_of_the_command_line(stage: Stage, story: Story) -> None:
    assert stage.cli("job", "watch", story.job_id).returncode == 0
    missing = stage.cli("job", "show", "job_0")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("not_found: ")
    bad = stage.cli("job", "submit", "-", stdin=json.dumps(small_job(budget_usd="-1")))
    assert bad.returncode == 1
    assert "/budget_usd: " in bad.stderr
    assert stage.cli("job", "submit", "-", stdin="{").returncode == 2
    assert stage.cli("job", "show").returncode == 2
    over = stage.cli("job", "cancel", story.job_id)
    assert (over.returncode, over.stderr) == (1, "conflict: the job is succeeded\n")
    wrong = stage.cli("job", "list", ECHO2_API_KEY="ek_wrong")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("unauthorized: ")
    away = stage.cli("job", "list", ECHO2_URL="http://127.0.0.1:9")
    assert away.returncode == 1
    assert away.stderr.count("\n") == 1


def test_a_job_is_submitted_and_cancelled_on_the_command_line(stage: Stage) -> None:
    answer = stage.cli("job", "submit", "-", stdin=json.dumps(small_job(name="never mind")))
    assert answer.returncode == 0, answer.stderr
    job_id = answer.stdout.strip()
    assert stage.job(job_id)["name"] == "never mind"
    assert stage.cli("job", "cancel", job_id).returncode == 0
    job = stage.ended(job_id)
    assert (job["status"], job["step"]) == ("cancelled", 0)
    assert stage.cli("job", "watch", job_id).returncode == 1
    assert stage.rows("SELECT id FROM leases WHERE job_id = ?", job_id) == []


def test_a_key_is_made_used_and_revoked(stage: Stage) -> None:
    answer = json.loads(stage.cli("keys", "create", "colleague", "--json").stdout)
    with httpx.Client(
        base_url=stage.control_url,
        headers={"Authorization": f"Bearer {answer['key']}"},
        timeout=10.0,
        trust_env=False,
    ) as colleague:
        assert colleague.get("/v1/jobs").status_code == 200
        assert colleague.post("/v1/keys", json={"name": "another"}).status_code == 403
        assert stage.cli("keys", "revoke", answer["id"]).returncode == 0
        assert colleague.get("/v1/jobs").status_code == 401


@pytest.mark.parametrize(
    ("name", "value"), [("ECHO2_PORT", "99999"), ("ECHO2_PROVIDERS", "nimbus"), ("ECHO2_TICK_SECONDS", "soon")]
)
def test_a_bad_setting_stops_the_service_with_one_line(stage: Stage, name: str, value: str) -> None:
    answer = stage.cli("serve", **{name: value, "ECHO2_STATE_DIR": str(stage.folder / "unused")})
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"{name}: ")
    assert answer.stderr.count("\n") == 1
    assert "expected" in answer.stderr
