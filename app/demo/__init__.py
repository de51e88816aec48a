"""`echo2 demo`: a whole job on this machine, with a machine that dies and a price that moves.

Invariant: it uses what every user has (the REST API, a signed webhook) and the marketplace's control side, nothing
inside; every number of its summary is read from the service or from the marketplace's own books.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live

from app.client import client, unwrap
from app.demo.incidents import Incidents
from app.demo.report import rerank_latency, show, summarise, verdict
from app.demo.stage import FOLDER, Stage, free_port, service
from app.protocol.errors import BadInput, Unavailable
from app.protocol.job import FINAL_STATUSES
from app.watch import Feed, harmless, view

DEADLINE_S = {"transformers": 900.0, "vllm": 2400.0}
NODES = {"transformers": 5, "vllm": 2}
"""Two cores start and feed no more servers."""
STEPS = {"transformers": 100, "vllm": 60}
BUDGET = "2.00"
VLLM_PYTHON = Path(".venv-vllm/bin/python")


def job_spec(steps: int, engine: str = "transformers") -> dict[str, Any]:
    """The demo's job. On such models ppo_clip learns faster at this lag than the default (docs/staleness.md). With
    `tiny` a step would take less time than a version needs to reach the machines: no pool keeps such a learner busy."""
    return {
        "name": "spell-backward",
        "model": "small",
        "task": {
            "name": "reasoning_gym",
            "params": {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5},
        },
        "budget_usd": BUDGET,
        "stop": {"steps": steps},
        "staleness_budget": 6,
        "batch": {"prompts": 32, "group_size": 8},
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8},
        "learner": {
            "placement": "local",
            "loss": "ppo_clip",
            "learning_rate": 3e-4,
            "eval_every": 25,
            "eval_prompts": 256,
        },
        "fleet": {
            "providers": ["marketplace"],
            "min_reliability": 0.9,
            "interruptible": True,
            "max_nodes": NODES[engine],
        },
        "seed": 0,
    }


def vllm_python() -> Path:
    """An interpreter that has vLLM: ECHO2_VLLM_PYTHON, else the one that `make test-vllm` makes. Raises BadInput."""
    found = Path(os.environ.get("ECHO2_VLLM_PYTHON", VLLM_PYTHON)).absolute()
    if not found.is_file():
        raise BadInput(
            f"{found} is not there: `make demo-vllm` makes it, or set ECHO2_VLLM_PYTHON to an interpreter with vLLM"
        )
    return found


def run(*, steps: int | None, plain: bool, engine: str = "transformers") -> int:
    """Run the demo, for `steps` or as many as it takes to show that something was learnt.

    Returns 0 only if the job succeeded and all promises were kept. Raises BadInput, Unavailable.
    """
    console = Console()
    steps = STEPS[engine] if steps is None else steps
    stage = Stage(free_port(), free_port(), engine, vllm_python() if engine == "vllm" else None)
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(service(stage))
        http = stack.enter_context(client(stage.control_url, stage.admin_key))
        market = stack.enter_context(
            httpx.Client(
                base_url=stage.market_url,
                headers={"Authorization": f"Bearer {stage.market_key}"},
                timeout=10,
                trust_env=False,
            )
        )
        job = unwrap(http.post("/v1/jobs", json=job_spec(steps, engine)))
        incidents = Incidents(stage, market, steps)
        feed = Feed(http, job["id"])
        _follow(feed, incidents, console, plain, DEADLINE_S[engine])
        summary = summarise(http, market, feed, job["id"], time.monotonic() - began)
        latency = rerank_latency(feed.events, incidents)
    (FOLDER / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    faults = verdict(summary, min(3, NODES[engine]))
    show(console, summary, faults, incidents, latency)
    return 1 if faults else 0


def _follow(feed: Feed, incidents: Incidents, console: Console, plain: bool, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    live = None if plain or not console.is_terminal else Live(console=console, refresh_per_second=4)
    shown = 0
    with live or ExitStack():
        while time.monotonic() < deadline:
            job, fleet = feed.read()
            incidents.update(job, fleet)
            if live is not None:
                live.update(view(job, fleet, feed.events))
            else:
                for event in feed.events[shown:]:
                    line = f"step {job['step']:>3} {event['at'][11:19]} {event['kind']}: {event['message']}"
                    console.print(harmless(line))
                shown = len(feed.events)
            if job["status"] in FINAL_STATUSES:
                return
            time.sleep(0.5)
    raise Unavailable(f"the demo did not end within {within_s:.0f} s")
