"""Five nodes that lie, each in its own way: each is in quarantine before anything of it was trained on to speak of."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.liars import HONEST, KINDS, Impostor, Lab
from tests.e2e.stage import Stage, running, small_job, wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
FAULTS = {
    "rewards": ("reward",),
    "noise": ("drift",),
    # At the door, or by an audit before that: log-probs and rewards are those of another prompt's answers.
    "copies": ("copied", "replayed", "log-probs", "reward"),
    "stale": ("log-probs",),
    "version": ("log-probs",),
}
"""What the event says of each: one of these is in it."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A service of its own: the machines of liars are left alone for hours."""
    with running(tmp_path) as made:
        yield made


def join_token(pid: int) -> str:
    """The join token of a machine that was stopped before its agent could use it; empty if it was given back since."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    found = (line for line in environment if line.startswith(b"ECHO2_JOIN_TOKEN="))
    return next(found, b"").decode().partition("=")[2]


class Street:
    """The machines of a job as they come: the first one is left to its own agent, the others are stopped at once."""

    def __init__(self, stage: Stage, job_id: str, lab: Lab) -> None:
        self._stage, self._job_id, self._lab = stage, job_id, lab
        self._seen: set[int] = set()
        self._stopped: list[int] = []
        self.nodes: dict[str, Impostor] = {}
        wait(self.look, "the first machine runs", 60)

    def look(self) -> bool:
        """Stop what is new; whether there is any machine."""
        for machine in self._stage.instances(self._job_id).values():
            pid = machine["pid"]
            if pid and pid not in self._seen:
                if self._seen:
                    os.killpg(pid, signal.SIGSTOP)
                    self._stopped.append(pid)
                self._seen.add(pid)
        return bool(self._seen)

    def take_over(self, kind: str) -> None:
        """The next machine, as a node of this kind."""

        def another() -> str:
            self.look()
            return join_token(self._stopped.pop(0)) if self._stopped else ""

        token = wait(another, f"there is a machine for {kind}", 60)
        self.nodes[kind] = Impostor(self._stage, token, kind, self._lab)


def quarantined(stage: Stage, job_id: str) -> dict[str, dict[str, Any]]:
    """Node → the event of its quarantine."""
    return {e["data"]["node"]: e for e in stage.events(job_id, "node_quarantined")}


def test_each_liar_is_in_quarantine_before_it_was_trained_on(stage: Stage) -> None:
    # It takes seconds to load, in which machines would start.
    lab = Lab(small_job()["task"], 8, stage.state_dir / "learners")
    job_id = stage.submit(
        name="liars", budget_usd="20.00", safety_factor=10, stop={"steps": 2000}, staleness_budget=4, publish_period=1,
        batch={"prompts": 30, "group_size": 8}, learner={"learning_rate": 1e-3}, fleet={"max_nodes": 4},
    )  # fmt: skip
    lab.follow(job_id)
    street = Street(stage, job_id, lab)
    with ExitStack() as ends:
        ends.callback(lambda: [node.close() for node in street.nodes.values()])
        street.take_over(HONEST)
        honest = street.nodes[HONEST]
        wait(lambda: street.look() and stage.job(job_id)["step"] >= 5, "the policy has moved")
        for kind in KINDS:
            street.take_over(kind)
        liars = {kind: street.nodes[kind].id for kind in KINDS}
        wait(lambda: quarantined(stage, job_id).keys() >= set(liars.values()), "all liars are in quarantine", 120)
        assert all(street.nodes[kind].over.wait(10) for kind in KINDS), "each was told to go"
        assert not honest.over.is_set()
        stage.goes_on(job_id)
    check(stage, job_id, liars, honest)
    stage.http.post(f"/v1/jobs/{job_id}/cancel").raise_for_status()
    assert stage.ended(job_id)["status"] == "cancelled"


def check(stage: Stage, job_id: str, liars: dict[str, str], honest: Impostor) -> None:
    """What the books say."""
    events = quarantined(stage, job_id)
    assert set(events) == set(liars.values()), "nobody else"
    for kind, node in liars.items():
        said = events[node]["message"]
        assert any(word in said for word in FAULTS[kind]), (kind, said)
    trained = stage.rows(
        "SELECT trained_step, node_id, count(*) AS groups FROM work_items WHERE job_id = ? AND status = 'trained' "
        "GROUP BY trained_step, node_id",
        job_id,
    )
    whole: dict[int, int] = {}
    false: dict[tuple[int, str], int] = {}
    for row in trained:
        whole[row["trained_step"]] = whole.get(row["trained_step"], 0) + row["groups"]
        if row["node_id"] in liars.values():
            false[row["trained_step"], row["node_id"]] = row["groups"]
    assert all(groups < 0.05 * whole[step] for (step, _), groups in false.items()), false
    held = "SELECT count(*) AS n FROM work_items WHERE job_id = ? AND node_id = ? AND status IN ('accepted', 'leased')"
    nodes = {n["id"]: n for n in stage.rows("SELECT * FROM nodes WHERE job_id = ?", job_id)}
    for node in liars.values():
        assert stage.rows(held, job_id, node)[0]["n"] == 0, "what it brought is somebody else's work"
        lease = stage.rows("SELECT * FROM leases WHERE id = ?", nodes[node]["lease_id"])[0]
        assert lease["reason"].startswith("quarantined: ")
        cooled = stage.rows("SELECT * FROM cooldowns WHERE machine_id = ?", lease["machine_id"])
        assert cooled, "its machine is left alone"
    for node in nodes.keys() - set(liars.values()):
        assert nodes[node]["audit_failures"] == 0
    assert nodes[honest.id]["audits_passed"] >= 8
    assert honest.trouble == []
    metrics = stage.http.get("/metrics").text
    assert f'echo2_quarantined_nodes_total{{job="{job_id}"}} 5.0' in metrics
