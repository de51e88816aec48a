"""Going on from a checkpoint: what an uninterrupted run would draw next is drawn next."""

from __future__ import annotations

from pathlib import Path

import torch

from app.learner.buffer import ReplayBuffer
from app.learner.checkpoints import save
from app.learner.outbox import Directives, Outbox
from app.learner.resume import resume
from app.protocol.learner import StartAnswer
from tests.unit.learner.fakes import FakeControl
from tests.unit.learner.samples import job
from tests.unit.learner.test_checkpoints import checkpoint
from tests.unit.learner.test_keeper import Remembering


def test_random_numbers_go_on_where_the_checkpoint_was_taken(tmp_path: Path):
    torch.manual_seed(1)
    save(tmp_path, checkpoint(6))
    wanted = torch.rand(4)
    torch.manual_seed(2)
    control = FakeControl()
    outbox = Outbox(control, Directives(control.word))  # type: ignore[arg-type]
    answer = StartAnswer(job_id="j", epoch=2, spec=job(), relay_token="t", last_step=6, published_version=6)
    resume(answer, tmp_path, Remembering(), ReplayBuffer(), outbox)
    assert torch.equal(torch.rand(4), wanted)
