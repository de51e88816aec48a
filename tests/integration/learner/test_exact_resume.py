"""Killed at ten random points a learner ends as one that was not: the same losses, the same weights, bit by bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from starlette.responses import JSONResponse

from app.learner.model import LoadedModel, load
from app.learner.sampling import eos_ids, sample
from app.learner.tiny import tiny_model
from app.protocol.job import JobSpec
from app.protocol.trajectory import Rollout, encode
from app.storage.stores import FolderStore
from app.tasks.base import Task
from app.tasks.prompts import encode_prompt
from app.tasks.registry import load_task
from tests.integration.learner.fake_control import JOB, TOKEN, FakeService, serving
from tests.integration.learner.test_learner_process import CACHE
from tests.integration.learner.zygote import Zygote

STEPS, PROMPTS, GROUP = 20, 2, 4
KILLS = 10
SPEC = JobSpec.model_validate(
    {
        "model": "tiny",
        "task": {"name": "reasoning_gym", "params": {"dataset": "spell_backward", "min_word_len": 3}},
        "budget_usd": "1",
        "stop": {"steps": STEPS},
        "staleness_budget": 100,
        "publish_period": 3,
        "batch": {"prompts": PROMPTS, "group_size": GROUP},
        "sampling": {"max_tokens": 8},
        # Rewards and versions are made up here.
        "trust": {"audit_share": 0, "probation": 0, "each_version": False},
        "learner": {
            "learning_rate": 6e-4,
            "refill": False,
            "eval_every": 1000,
            "eval_prompts": 4,
            "checkpoint_every": 4,
            "checkpoint_upload_every": 2,
        },
    }
)


def stock() -> list[tuple[dict, bytes]]:
    """A file for each step: its entry in the index, and its bytes."""
    task, loaded, versions = load_task(SPEC.task, SPEC.seed), load(tiny_model(CACHE)), random.Random(5)
    return [_file(task, loaded, number, [versions.randrange(0, 60) for _ in range(PROMPTS)]) for number in range(STEPS)]


def _file(task: Task, loaded: LoadedModel, number: int, versions: list[int]) -> tuple[dict, bytes]:
    rollouts = []
    for place, version in enumerate(versions):
        prompt = task.train(number * PROMPTS + place)
        ids = encode_prompt(loaded.tokenizer, prompt)
        made = sample(
            loaded.model, [ids] * GROUP, max_tokens=8, temperature=1.0, eos=eos_ids(loaded.model, loaded.tokenizer),
            generator=torch.Generator().manual_seed(number * PROMPTS + place),
        )  # fmt: skip
        # Rewards at random, so that every group has a signal.
        rewards = [float(i == number % GROUP) for i in range(GROUP)]
        rollouts += [
            Rollout(f"w{number}-{place}", prompt.index, i, ids, c.ids, c.logprobs, [version], [0], rewards[i],
                    c.finish_reason)
            for i, c in enumerate(made)
        ]  # fmt: skip
    data = encode(rollouts)
    entry = {
        "seq": number + 1, "key": f"jobs/{JOB}/trajectories/0/{number}.parquet", "size": len(data),
        "blake3": blake3(data).hexdigest(), "node_id": f"node-{number % 2}",
        "work_items": list(dict.fromkeys(r.work_item for r in rollouts)),
    }  # fmt: skip
    return entry, data


class StockService(FakeService):
    """Hands out the file of step t + 1 as soon as step t is on record, and never takes one back.

    In an undisturbed run every batch is forced. A learner that went back sees several batches at once, whose versions
    are such that the oldest ones are not those that come first.
    """

    def __init__(self, store: FolderStore, stock: list[tuple[dict, bytes]]) -> None:
        super().__init__(SPEC, store, tiny_model(CACHE))
        self._visible = 1
        for entry, data in stock:
            store.put(entry["key"], data)
            self.index.append(entry)

    def trajectories(self, after: int) -> JSONResponse:
        """What is visible and not consumed."""
        with self.lock:
            self._visible = max(self._visible, max(self.steps, default=0) + 1)
            used = {w for s in self.steps.values() for w in s["trained"]}
            items = [
                {**e, "work_items": left}
                for e in self.index[: self._visible]
                if e["seq"] > after and (left := [w for w in e["work_items"] if w not in used])
            ]
            if not items:
                self.changed.wait(0.2)
            return JSONResponse({"items": items, "cursor": max([after, *(i["seq"] for i in items)])})


def start(zygote: Zygote, folder: Path, url: str) -> int:
    env = {
        "ECHO2_CONTROL_URL": url, "ECHO2_LEARNER_TOKEN": TOKEN, "ECHO2_STATE_DIR": str(folder),
        "ECHO2_CACHE_DIR": str(CACHE), "ECHO2_JOB_ID": JOB,
    }  # fmt: skip
    return zygote.start(env, folder / "learner.log")


def finish(zygote: Zygote, folder: Path, url: str) -> None:
    assert zygote.wait(start(zygote, folder, url)) == 0, (folder / "learner.log").read_text()[-3000:]


def kill_later(service: FakeService, zygote: Zygote, pid: int, more: int | None, delay: float) -> None:
    """Kill it while it loads, or `more` steps later; a little later still, at whatever it does then."""
    epoch, reports = service.epoch, len(service.history)
    if more is None:
        service.wait(lambda: service.epoch > epoch, 120)
    else:
        service.wait(lambda: len(service.history) >= reports + more and service.epoch > epoch, 120)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    assert zygote.wait(pid) == -signal.SIGKILL


def outcome(folder: Path) -> tuple[str, str]:
    """Hashes of the final model and of the last checkpoint's optimizer."""
    final = folder / "objects" / "jobs" / JOB / "final" / "model.safetensors"
    optimizer = folder / "learners" / JOB / "checkpoints" / f"{STEPS:09d}" / "optimizer.safetensors"
    return blake3(final.read_bytes()).hexdigest(), blake3(optimizer.read_bytes()).hexdigest()


def run_wild(zygote: Zygote, service: StockService, folder: Path, rng: random.Random) -> None:
    """Kill it ten times, then let it end."""
    with serving(service) as url:
        for _ in range(KILLS):
            pid = start(zygote, folder, url)
            kill_later(service, zygote, pid, rng.choice([None, 0, 1, 2, 3]), rng.uniform(0, 0.2))
        finish(zygote, folder, url)


def losses(service: FakeService) -> dict[int, float]:
    return {step: s["metrics"]["loss"] for step, s in sorted(service.steps.items())}


@pytest.mark.timeout(1200)
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    (tmp_path / "wild").mkdir()
    files, rng = stock(), random.Random(20)
    calm = StockService(FolderStore(tmp_path / "calm" / "objects"), files)
    wild = StockService(FolderStore(tmp_path / "wild" / "objects"), files)
    zygote = Zygote(CACHE)
    with closing(zygote), serving(calm) as url:
        finish(zygote, tmp_path / "calm", url)
        run_wild(zygote, wild, tmp_path / "wild", rng)
    assert wild.epoch == KILLS + 1
    # Some steps were made more than once, or the test shows nothing.
    assert len(wild.history) > STEPS
    assert losses(wild) == losses(calm)
    assert all(s["metrics"]["loss"] == calm.steps[s["step"]]["metrics"]["loss"] for s in wild.history)
    batches = {step: s["trained"] for step, s in wild.steps.items()}
    assert batches == {step: s["trained"] for step, s in calm.steps.items()}
    used = [w for items in batches.values() for w in items]
    assert len(used) == len(set(used)) == STEPS * PROMPTS
    assert outcome(tmp_path / "wild") == outcome(tmp_path / "calm")
    lines = (tmp_path / "wild" / "learners" / JOB / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [r["step"] for r in rows if r["kind"] == "step"] == list(range(1, STEPS + 1))
