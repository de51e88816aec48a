"""A node that sends the best of several answers, with true log-probs and rewards: twins find it, no audit would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.liars import BEST, HONEST, Lab
from tests.e2e.stage import Stage, running, small_job, wait
from tests.e2e.test_liars import Street, quarantined

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A service of its own: the machine of the liar is left alone for hours."""
    with running(tmp_path) as made:
        yield made


def test_who_sends_the_best_of_several_answers_is_in_quarantine_and_nobody_else(stage: Stage) -> None:
    # It takes seconds to load, in which machines would start.
    lab = Lab(small_job()["task"], 8, stage.state_dir / "learners")
    job_id = stage.submit(
        name="chosen", budget_usd="20.00", safety_factor=10, stop={"steps": 5000}, staleness_budget=4, publish_period=1,
        batch={"prompts": 16, "group_size": 8}, learner={"learning_rate": 1e-4}, fleet={"max_nodes": 4},
        trust={"audit_share": 0, "probation": 0, "each_version": False, "twin_share": 1.0},
    )  # fmt: skip
    lab.follow(job_id)
    street = Street(stage, job_id, lab)
    try:
        street.take_over(HONEST)
        street.take_over("another honest one")
        street.take_over(BEST)
        honest, liar = street.nodes[HONEST], street.nodes[BEST]
        wait(lambda: street.look() and liar.id in quarantined(stage, job_id), "who chooses is in quarantine", 240)
        assert liar.over.wait(20), "and was told to go"
        assert not honest.over.is_set()
        stage.goes_on(job_id)
    finally:
        for node in street.nodes.values():
            node.close()
    events = quarantined(stage, job_id)
    assert set(events) == {liar.id}, "nobody else"
    assert "chosen: its rewards are higher" in events[liar.id]["message"]
    pairs = stage.rows("SELECT first_node, second_node FROM twins WHERE job_id = ? AND compared_at > 0", job_id)
    mine = [pair for pair in pairs if liar.id in pair.values()]
    # 30 suffice where half of the answers are right and one of four is chosen.
    assert 10 < len(mine) < 300
    assert honest.trouble == []
