"""A copy that is made beside the training holds what was there when it was begun."""

from __future__ import annotations

import threading

import pytest
import torch

from app.learner.copier import Copier
from app.learner.laps import Laps
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import LearnerError
from tests.unit.learner.samples import batch, job, random_model


def test_a_snapshot_is_the_state_of_its_moment_whatever_comes_next():
    trainer = GRPOTrainer(random_model(), job())
    for number in range(3):
        wanted, got = trainer.state(), trainer.snapshot()
        trainer.step(batch(number))
        assert got.steps == wanted.steps == number
        assert got.weights.keys() == wanted.weights.keys()
        assert all(torch.equal(got.weights[n], t) for n, t in wanted.weights.items())
        assert got.optimizer.keys() == wanted.optimizer.keys()
        assert all(torch.equal(got.optimizer[n], t) for n, t in wanted.optimizer.items())


def test_a_slow_copy_is_waited_for_before_the_weights_change():
    trainer = GRPOTrainer(random_model(), job())
    go, begin = threading.Event(), trainer._copier.begin

    def slow(*makes):
        return begin(*(lambda make=make: (go.wait(20), make())[1] for make in makes))

    trainer._copier.begin = slow  # type: ignore[method-assign]
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    snapshot = trainer.snapshot()
    thread = threading.Thread(target=lambda: trainer.step(batch(0)))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    go.set()
    thread.join(20)
    assert all(torch.equal(t, before[n]) for n, t in snapshot.weights.items() if n in before)
    assert any(not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


def test_a_copy_that_fails_is_told_to_whoever_needs_it():
    copier = Copier()

    def fail() -> dict[str, torch.Tensor]:
        raise LearnerError("no memory")

    (copy,) = copier.begin(fail)
    with pytest.raises(LearnerError, match="no memory"):
        copier.settle()
    with pytest.raises(LearnerError, match="no memory"):
        copy["w"]
    copier.settle()


def test_laps_cover_the_step_without_a_gap():
    now = [0.0]
    laps = Laps(lambda: now[0], lambda before, after: after - before)
    laps.start()
    for name, seconds in (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("forward", 8.0)):
        now[0] += seconds
        laps.lap(name)
    assert laps.metrics() == {"t_data": 1.0, "t_forward": 10.0, "t_backward": 4.0}
    laps.start()
    assert laps.metrics() == {}


def test_a_step_says_where_its_seconds_went():
    done = GRPOTrainer(random_model(), job()).step(batch(0))
    parts = [v for name, v in done.times.items() if name.startswith("t_")]
    names = {"t_data", "t_forward", "t_backward", "t_metrics", "t_publish", "t_optimizer"}
    assert {n for n in done.times if n.startswith("t_")} == names
    assert sum(parts) == pytest.approx(done.t_train, abs=0.01)
    assert done.times["tokens_per_s"] > 0


def test_a_copy_that_nobody_needs_is_given_back_and_others_keep_theirs():
    copier = Copier()
    (first,) = copier.begin(lambda: {"w": torch.ones(4)})
    kept = first["w"]
    (second,) = copier.begin(lambda: {"w": torch.zeros(4)})
    del first
    copier.settle()
    assert kept.tolist() == [1.0] * 4
    assert second["w"].tolist() == [0.0] * 4
    (third,) = copier.begin(lambda: {"w": torch.ones(2)})
    del third
    copier.settle()
