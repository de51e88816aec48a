"""One job that everything happens to, told as what was seen from outside; the tests of the folder read it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.e2e.stage import Stage, wait

STEPS = 36
PROMPTS, GROUP = 16, 8


@dataclass
class Story:
    """What was seen."""

    job_id: str
    victim: dict[str, Any] = field(default_factory=dict)
    """The node whose process was killed."""
    victims_work: set[str] = field(default_factory=set)
    """Work items that it held then."""
    step_at_kill: int = 0
    resumed_step: int = 0
    """Where the second learner began."""
    learner_pids: list[int] = field(default_factory=list)
    before: dict[str, str | None] = field(default_factory=dict)
    """Lease → instance, just before the control service was killed."""
    after: dict[str, str | None] = field(default_factory=dict)
    """The same once it was back and two more steps were trained."""
    machines_without_service: int = 0
    """Machines that ran while there was no control service."""
    restarted_at: str = ""
    hook_answers: list[Any] = field(default_factory=list)
    hook_answered_at: datetime | None = None
    end: dict[str, Any] = field(default_factory=dict)
    """The job as read at its end."""


def tell(stage: Stage) -> Story:
    """Run the job: learner and a node are killed, then the control service, then a price moves."""
    job_id = stage.submit(
        name="story",
        budget_usd="5.00",
        stop={"steps": STEPS},
        batch={"prompts": PROMPTS, "group_size": GROUP},
        fleet={"gpu_names": ["RTX 3090"]},
    )
    story = Story(job_id)
    stage.at_work(job_id, 2)
    _kill_learner_and_node(stage, story)
    _kill_control_service(stage, story)
    _move_a_price(stage, story)
    story.end = stage.ended(job_id)
    wait(lambda: stage.books()["running"] == 0, "all machines have ended")
    return story


def _kill_learner_and_node(stage: Stage, story: Story) -> None:
    learner = stage.learner(story.job_id)
    assert learner is not None
    story.learner_pids.append(learner.pid)
    story.victim = stage.nodes(story.job_id)[0]
    pid = stage.pid(story.job_id, story.victim)
    story.step_at_kill = stage.job(story.job_id)["step"]
    story.victims_work = wait(lambda: _stopped_at_work(stage, story, pid), "the node is stopped while it holds work")
    learner.kill()
    os.killpg(pid, signal.SIGKILL)
    wait(lambda: len(stage.events(story.job_id, "learner_ready")) == 2, "the learner is ready again")
    words = stage.events(story.job_id, "learner_ready")[1]["message"]
    story.resumed_step = int(words.removeprefix("learner ready at step ").partition(":")[0])
    nodes = stage.at_work(story.job_id, 2)
    assert story.victim["id"] not in {n["id"] for n in nodes}
    again = wait(lambda: stage.learner(story.job_id), "the learner's process is there")
    story.learner_pids.append(again.pid)


def _stopped_at_work(stage: Stage, story: Story, pid: int) -> set[str]:
    """Stop the node's process; what it holds once all that it had sent has arrived. Nothing: it goes on."""
    os.killpg(pid, signal.SIGSTOP)
    items = wait(lambda: _held_and_nothing_on_its_way(stage, story), "what the node had sent has been dealt with")
    if not items[0]:
        os.killpg(pid, signal.SIGCONT)
    return items[0]


def _held_and_nothing_on_its_way(stage: Stage, story: Story) -> tuple[set[str]] | None:
    """What it holds, if that stays the same for a second: a file that it handed in is read beside other requests."""
    held = "SELECT id FROM work_items WHERE node_id = ? AND status = 'leased'"
    seen, until = [], time.monotonic() + 1.0
    while time.monotonic() < until:
        stage.job(story.job_id)
        seen.append({str(row["id"]) for row in stage.rows(held, story.victim["id"])})
    return (seen[0],) if all(items == seen[0] for items in seen) else None


def _leases(stage: Stage, job_id: str) -> dict[str, str | None]:
    open_leases = "SELECT id, instance_id FROM leases WHERE job_id = ? AND state IN ('booting', 'active')"
    return {row["id"]: row["instance_id"] for row in stage.rows(open_leases, job_id)}


def _kill_control_service(stage: Stage, story: Story) -> None:
    story.before = _leases(stage, story.job_id)
    stage.kill()
    story.machines_without_service = stage.books()["running"]
    story.restarted_at = datetime.now(UTC).isoformat()
    stage.start()
    stage.goes_on(story.job_id)
    story.after = _leases(stage, story.job_id)


def _move_a_price(stage: Stage, story: Story) -> None:
    """The price of the job's machines rises above its bids; that is told twice."""
    message = {
        "provider": "marketplace",
        "selector": {"gpu_name": "RTX 3090"},
        "price_per_hour": "0.11",
        "effective_at": datetime.now(UTC).isoformat(),
    }
    first = stage.hook(message, webhook_id="msg_story")
    story.hook_answered_at = datetime.now(UTC)
    wait(lambda: stage.events(story.job_id, "reranked"), "the loop has re-ranked")
    story.hook_answers = [first, stage.hook(message, webhook_id="msg_story")]
