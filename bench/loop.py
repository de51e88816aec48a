"""Whether the learner ever waits: the demo's loop without its incidents.

The service, the local marketplace and its machines run as in `make demo`. The machines are slowed down, so that a job
needs several of them and what is rented can come near to what is needed: by `--speed`, or by what the steps of a first,
short job say. A surplus is given back after seconds in place of minutes, as steps take a second in place of minutes.
Learner and service have one half of the cores, the machines the other: on shared cores a step takes the longer the more
machines there are, and what is needed would follow what is rented. Left out of the figures: the first `--warm` steps.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from app.client import client, unwrap
from app.demo import job_spec
from app.demo.report import pages
from app.demo.stage import FOLDER, Stage, free_port, service
from app.protocol.errors import Unavailable
from app.protocol.job import FINAL_STATUSES

DEADLINE_S = 900.0
CALIBRATION_STEPS, CALIBRATION_WARM = 16, 8
SPEED_BY_T_TRAIN = 0.4
"""At this speed times a second over T_train a machine makes a tenth to a third of what the learner consumes."""


def spec(steps: int, staleness: int, prompts: int) -> dict[str, Any]:
    """The demo's job, no evaluation on the way."""
    job = job_spec(steps)
    job["batch"]["prompts"] = prompts
    job["fleet"]["max_nodes"] = 8
    job |= {"name": "loop", "staleness_budget": staleness}
    job["learner"] |= {"learning_rate": 1e-4, "eval_every": 100_000, "eval_prompts": 64}
    # A learner's step takes much longer than what its rollouts cost the machines, as with models of a real size.
    job["learner"] |= {"activation_checkpointing": True, "kl_beta": 1e-3, "micro_batch_tokens": 96}
    return job


def halves() -> tuple[set[int], set[int]]:
    """The cores of the learner's side and of the machines; all for both where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    return set(cores[:half]), set(cores[half:] or cores)


@contextmanager
def marketplace(stage: Stage, speed: float, cores: set[int]) -> Iterator[None]:
    """A marketplace of our own, which the service finds at its address. Its machines stay on its cores."""
    command = [sys.executable, "-m", "app.cli", "marketplace", "--port", str(stage.market_port), "--control"]
    state = FOLDER.absolute() / "market"
    shutil.rmtree(state, ignore_errors=True)
    process = subprocess.Popen(
        [*command, "--speed", str(speed)],
        env={**stage.environment(), "ECHO2_STATE_DIR": str(state)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.sched_setaffinity(process.pid, cores)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None:
            try:
                httpx.get(f"{stage.market_url}/api/v0/gpu_names/unique/", timeout=2, trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(30)


def follow(http: Any, job_id: str, warm: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The job at its end, and the fleet's capacity as seen each second after `warm` steps."""
    seen: list[dict[str, Any]] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        job = unwrap(http.get(f"/v1/jobs/{job_id}"))
        if job["status"] in FINAL_STATUSES:
            return job, seen
        fleet = unwrap(http.get(f"/v1/jobs/{job_id}/fleet"))
        measured = [n["mu_measured"] for n in fleet["nodes"] if n["state"] == "active"]
        if job["step"] >= warm:
            seen.append({**fleet["capacity"], "measured": sum(m or 0.0 for m in measured), "nodes": len(measured)})
        print(
            f"step {job['step']:>3}  bubble {job['learner']['bubble_ratio'] or 0:.3f}  nodes {len(measured)}  "
            f"Σμ {sum(m or 0.0 for m in measured):.0f}/s  target {fleet['capacity']['mu_target'] or 0:.0f}/s",
            flush=True,
        )
        time.sleep(1.0)
    raise Unavailable(f"the job did not end within {DEADLINE_S:.0f} s")


def figures(
    job: dict[str, Any], steps: Sequence[dict[str, Any]], seen: Sequence[dict[str, Any]], warm: int
) -> dict[str, Any]:
    """What the last line says."""
    late = [row for row in steps if row["step"] > warm]
    train, idle = sum(row["t_train"] for row in late), sum(row["t_idle"] for row in late)
    need = statistics.mean(row["rollouts"] for row in late) / (train / len(late))
    running = [row for row in seen if row["nodes"]]
    pool = statistics.mean(row["measured"] for row in running)
    return {
        "status": job["status"],
        "steps": len(late),
        "t_train": round(train / len(late), 4),
        "t_bcast": job["learner"]["t_bcast"],
        "bubble": round(idle / (idle + train), 4),
        "dropped": job["learner"]["dropped_ratio"],
        "pool_vs_need": round(pool / need, 3),
        "nodes": round(statistics.mean(row["nodes"] for row in running), 2),
    }


def measured(
    speed: float, steps: int, warm: int, options: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """A whole job: how it ended, its steps, and the fleet's capacity as seen after `warm` of them."""
    own, others = halves()
    os.environ["OMP_NUM_THREADS"] = str(len(own))
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, own)
    stage = Stage(free_port(), free_port(), min_lease_s=8)
    try:
        with (
            marketplace(stage, speed, others),
            service(stage),
            client(stage.control_url, stage.admin_key) as http,
        ):
            posted = unwrap(http.post("/v1/jobs", json=spec(steps, options.staleness, options.prompts)))
            job, seen = follow(http, posted["id"], warm)
            return job, pages(http, f"/v1/jobs/{posted['id']}/steps"), seen
    finally:
        os.sched_setaffinity(0, everything)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if the job did not succeed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=170)
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--staleness", type=int, default=6)
    parser.add_argument("--speed", type=float, help="of the machines; by default what suits the learner's step here")
    parser.add_argument("--prompts", type=int, default=32)
    options = parser.parse_args(arguments)
    speed = options.speed
    if speed is None:
        job, steps, _ = measured(1.0, CALIBRATION_STEPS, CALIBRATION_WARM, options)
        t_train = statistics.median(row["t_train"] for row in steps if row["step"] > CALIBRATION_WARM)
        speed = round(SPEED_BY_T_TRAIN / t_train, 3)
        print(f"a step takes {t_train:.2f} s: the machines run at a speed of {speed}", flush=True)
    job, steps, seen = measured(speed, options.steps, options.warm, options)
    print(json.dumps({"speed": speed, **figures(job, steps, seen, options.warm)}))
    return 0 if job["status"] == "succeeded" else 1


if __name__ == "__main__":
    sys.exit(main())
