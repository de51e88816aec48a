"""How ranks find each other and part, and what the others do at each word of rank 0."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from app.learner.parallel import follow as following
from app.learner.parallel.follow import follow, serve
from app.learner.parallel.launch import alone, launch, leave
from app.learner.parallel.messages import Progress, Rehearsal, Sampling, packed
from app.learner.parallel.ranks import ALONE, Command
from app.protocol.errors import BadInput, LearnerError, Unavailable
from tests.unit.learner.samples import batch, job
from tests.unit.learner.test_follow import END, Second, load, settings


def environment(monkeypatch: pytest.MonkeyPatch, **more: str) -> dict[str, str]:
    """Of rank 1 of 2, where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
    made = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **more}
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    return made


def test_a_rank_that_finds_no_other_says_so(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Unavailable, match="the ranks did not find each other within 1 s"):
        launch(1.0, environment(monkeypatch))


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with pytest.raises(BadInput, match="rank 1 has no GPU: lower torchrun's --nproc-per-node"):
        launch(1.0, environment(monkeypatch))
    assert taken == []
    with pytest.raises(Unavailable):
        launch(1.0, environment(monkeypatch, LOCAL_RANK="0"))
    assert taken == [0]


def test_a_process_group_of_one_is_made_once_and_left_only_in_order():
    alone()
    alone()
    leave(ALONE, in_order=False)
    assert dist.is_initialized(), "others may still be at it: nobody waits for them"
    leave(ALONE)
    assert not dist.is_initialized()
    leave(ALONE)


class Trainer:
    """Writes down what it is told to do; a step is not finite."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def __getattr__(self, name: str):
        return lambda *given: self.done.append((name, *given))

    def step(self, groups) -> None:
        self.done.append(("step", [g.work_item for g in groups]))
        raise LearnerError("the loss of step 1 is not finite")


def test_each_word_of_rank_0_is_obeyed_and_what_all_have_in_common_is_survived(caplog: pytest.LogCaptureFixture):
    progress = Progress(steps=3, optimizer=["exp_avg/w"], skipped=True)
    rehearsal = Rehearsal(rollouts=8, prompts=[[1, 2]], completion_tokens=4)
    sampling = Sampling(prompts=[[1], [2, 3]], max_tokens=5)
    said = [
        Command("step", packed(batch(0, 2))),
        Command("rehearse", rehearsal.model_dump_json().encode()),
        Command("state"),
        Command("weights"),
        Command("restore", progress.model_dump_json().encode()),
        Command("sample", sampling.model_dump_json().encode()),
        Command("load"),
        END,
        Command("state"),
    ]
    ranks, trainer, asked = Second(*said), Trainer(), []
    serve(ranks, trainer, lambda *given: asked.append(given))  # type: ignore[arg-type]
    assert trainer.done == [
        ("step", ["0-0", "0-1"]), ("rehearse", 8, [[1, 2]], 4), ("state",), ("weights",), ("receive", progress),
    ]  # fmt: skip
    assert asked == [([[1], [2, 3]], 5)]
    assert ranks.said == [Command("state")], "nothing is heard after the end"
    assert "not finite" in caplog.text
    assert "rank 0 announced load, which has no place here" in caplog.text


def test_what_is_tried_of_a_model_is_tried_by_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Packing is tried in a forward pass, which takes them all."""
    tried: list[object] = []
    monkeypatch.setattr(following, "check_job", lambda model, spec: tried.append(spec.packing))
    ranks = Second(load(job(learner={"packing": True})), END)
    assert follow(ranks, settings(tmp_path)) == 0  # type: ignore[arg-type]
    assert tried == [True]
