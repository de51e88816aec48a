"""Going on from a checkpoint: what an uninterrupted run would draw next is drawn next."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app.learner.adaptive import State
from app.learner.buffer import ReplayBuffer
from app.learner.checkpoints import MARKER, save
from app.learner.files import hash_file
from app.learner.outbox import Directives, Outbox
from app.learner.position import Position
from app.learner.resume import fetch_checkpoint, resume
from app.protocol.errors import EchoError, LearnerError, Unavailable
from app.protocol.learner import DroppedGroup, EvalReport, StartAnswer, StepReport
from app.storage.stores import FolderStore
from tests.unit.learner.fakes import FakeControl
from tests.unit.learner.samples import group, job
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


def going_on(
    root: Path,
    fetch: Callable[[], None] = lambda: None,
    *,
    last_step: int = 6,
    error: EchoError | None = None,
    **learner,
) -> tuple[Position, Remembering, ReplayBuffer, FakeControl]:
    """What comes of `resume` on a machine with these checkpoints. `error`: of the control service."""
    control, buffer, trainer = FakeControl(), ReplayBuffer(), Remembering()
    control.error = error
    outbox = Outbox(control, Directives(control.word))  # type: ignore[arg-type]
    outbox.start()
    answer = StartAnswer(
        job_id="j", epoch=2, spec=job(learner=learner), relay_token="t", last_step=last_step, published_version=None
    )
    try:
        position = resume(answer, root, trainer, buffer, outbox, fetch)
    finally:
        outbox.stop()
    return position, trainer, buffer, control


def test_reports_that_were_under_way_are_handed_in_before_anything_and_their_groups_are_refused(tmp_path: Path):
    gone = DroppedGroup(work_item="c", reason="stale", lag=4)
    report = StepReport(step=6, t_train=1.0, t_idle=0.0, reward=0.5, trained=["a"], dropped=[gone], lags={0: 4})
    evaluation = EvalReport(step=6, reward=0.25, prompts=10)
    where = State(4, 2, (0.5,))
    save(
        tmp_path,
        checkpoint(6, steps=[report], evals=[evaluation], evaluated=6, active_s=9.0, candidates=(4, 6), adaptive=where),
    )
    position, trainer, buffer, control = going_on(tmp_path, last_step=5)
    assert control.log == [report, evaluation]
    assert [buffer.add(group(name)) for name in "abc"] == [False, True, False]
    assert trainer.steps == 6
    assert position == Position(
        evaluated=6, active_s=9.0, last_publish=6, best=None, candidates=(4, 6), adaptive=where
    )  # fmt: skip


def test_without_an_answer_to_those_reports_nothing_begins(tmp_path: Path):
    """The index would hand out what they consumed."""
    save(tmp_path, checkpoint(6, evals=[EvalReport(step=6, reward=0.25, prompts=10)]))
    with pytest.raises(Unavailable, match="away"):
        going_on(tmp_path, error=Unavailable("away"))


@pytest.mark.parametrize(
    ("fields", "best"),
    [({"best_step": 2, "best_reward": 0.0}, (2, 0.0)), ({"best_step": 2}, None), ({"best_reward": 0.5}, None)],
)
def test_the_best_evaluation_is_a_step_with_a_reward(tmp_path: Path, fields: dict[str, float], best: object):
    save(tmp_path, checkpoint(6, **fields))
    assert going_on(tmp_path)[0].best == best


def test_the_store_is_asked_once_and_once_more_only_if_something_here_does_not_count(tmp_path: Path):
    asked: list[int] = []

    def nothing() -> None:
        asked.append(1)

    assert going_on(tmp_path, nothing, last_step=0)[0] == Position()
    save(tmp_path, checkpoint(4))
    folder = save(tmp_path, checkpoint(6))
    assert going_on(tmp_path, nothing)[1].steps == 6
    assert len(asked) == 2
    (folder / "model.safetensors").write_bytes(b"")
    assert going_on(tmp_path, nothing)[1].steps == 4
    assert len(asked) == 4

    def whole() -> None:
        asked.append(1)
        if len(asked) == 6:
            save(tmp_path, checkpoint(6))

    (tmp_path / "000000004" / "model.safetensors").write_bytes(b"")
    assert going_on(tmp_path, whole)[1].steps == 6, "the one that came, and not the one that counted before"
    with pytest.raises(LearnerError, match="holds no checkpoint"):
        going_on(tmp_path / "other", last_step=1)


@pytest.mark.parametrize(
    ("format", "step", "learner", "warns"),
    [(3, 6, {"gac": True}, True), (4, 6, {"gac": True}, False), (3, 6, {}, False), (3, 0, {"gac": True}, False)],
)
def test_a_step_that_can_not_be_made_exactly_again_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: int, step: int, learner: dict[str, bool], warns: bool
):
    folder = save(tmp_path, checkpoint(step))
    state = json.loads((folder / "state.json").read_text()) | {"format": format}
    (folder / "state.json").write_text(json.dumps(state))
    marker = json.loads((folder / MARKER).read_text())
    path = folder / "state.json"
    marker["state.json"] = {"size": path.stat().st_size, "blake3": hash_file(path)}
    (folder / MARKER).write_text(json.dumps(marker))
    going_on(tmp_path, **learner)
    assert ("not bit by bit" in caplog.text) == warns


def test_a_store_that_is_away_is_waited_for_only_where_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, root = FolderStore(tmp_path / "objects"), tmp_path / "checkpoints"

    def away(prefix: str) -> None:
        raise Unavailable("away")

    monkeypatch.setattr(store, "list", away)
    with pytest.raises(Unavailable):
        fetch_checkpoint(store, "p/", root)
    save(root, checkpoint(1))
    fetch_checkpoint(store, "p/", root)
