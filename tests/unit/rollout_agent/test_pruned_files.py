"""What a node sends of a group when the job wants only the most informative pairs."""

from __future__ import annotations

import pytest

from app.protocol import trajectory
from app.protocol.pruning import Prune, kept
from app.protocol.work import UploadSlot, WorkItem
from app.rollout_agent.delivery import Delivery, Scored
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.groups import Group
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.text_side import TextSide
from app.tasks.base import Prompt
from tests.unit.rollout_agent.fakes import Clock, Echo, Letters, Wire, accept, pool, rows_of

REWARDS = [0.5, 0.9, 0.4, 0.6, 0.0, 1.0, 0.5, 0.1]


@pytest.mark.parametrize(
    ("prune", "split", "samples"),
    [
        (None, "train", list(range(8))),
        ("shuffle_r1", "train", [1, 4, 5, 7]),
        ("shuffle_r1", "heldout", list(range(8))),  # an evaluation needs every answer
    ],
)
async def test_the_file_has_the_best_and_the_worst(prune: Prune | None, split: str, samples: list[int]) -> None:
    wire, clock = Wire({"trajectories": accept}), Clock()
    item = WorkItem.model_validate(
        {"id": "w0", "prompt_index": 3, "group_size": 8, "seed": 1, "deadline_s": 60, "split": split}
    )
    completions = [Completion([i + 1, 9], [-0.5, -0.5], "stop", [Span(4, 0)]) for i in range(8)]
    group = Group(item, Prompt(3, "p3", {}), [1, 2], clock.now + 60, completions)
    ledger = WorkLedger(clock)
    ledger.leased({"w0": clock.now + 60})
    with pool() as executor:
        delivery = Delivery(
            wire.client(clock), TextSide(Echo(), Letters()), ledger, executor,
            max_upload_bytes=1_000_000, prune=prune, clock=clock, sleep=clock.sleep, jitter=lambda: 1.0,
        )  # fmt: skip
        await delivery.hand_in([Scored(group, REWARDS)], UploadSlot(key="k", url="http://store/k"))
    [file] = wire.files
    rows = rows_of(file)
    assert [row.sample_index for row in rows] == samples
    assert [row.reward for row in rows] == pytest.approx([REWARDS[i] for i in samples])
    assert [row.completion_ids for row in rows] == [[i + 1, 9] for i in samples]
    rows_wanted = kept(8, prune) if split == "train" else 8
    expected = {"w0": trajectory.Expected(3, 8, rows=rows_wanted)}
    trajectory.validate(trajectory.read_table(file), expected, newest_version=4, max_tokens=2)
