"""Passes in another precision on one rank, activations that are computed again, and shards that come together."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import DTensor

from app.learner.lora import add_adapter
from app.learner.model import trained_weights
from app.learner.parallel.launch import leave
from app.learner.parallel.ranks import ALONE, Alone
from app.learner.parallel.shards import blocks, recomputing
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import BadInput
from app.protocol.learner_spec import LoraSpec
from tests.unit.learner.samples import batch, group, job, random_model
from tests.unit.learner.test_trainer import near_policy

ADAPTER = LoraSpec(rank=2)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    leave(ALONE)


def trainer_in(precision: str, adapter: LoraSpec | None = None, **learner) -> GRPOTrainer:
    model = random_model()
    if adapter is not None:
        add_adapter(model, adapter, name="m", seed=7)
    return GRPOTrainer(model, job(learner={"precision": precision, "learning_rate": 1e-3, **learner}))


def logits(trainer: GRPOTrainer) -> torch.Tensor:
    """Of a forward pass alone, as an evaluation makes them: what it put together stays on one rank."""
    with torch.no_grad():
        return trainer.model(input_ids=torch.tensor([[3, 1, 4, 1, 5]], device=trainer.model.device)).logits


def evaluate(trainer: GRPOTrainer) -> None:
    logits(trainer)


@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_an_evaluation_leaves_what_is_saved_and_published_as_it_was(adapter: LoraSpec | None):
    trainer = trainer_in("bfloat16", adapter)
    trainer.step(batch(1))
    before = trainer.weights()
    assert any(not torch.equal(t, t.bfloat16().float()) for t in before.values()), "bfloat16 would lose digits"
    for read in (trainer.weights, lambda: trainer.snapshot().weights, lambda: trainer.state().weights):
        evaluate(trainer)
        found = read()
        assert found.keys() == before.keys()
        assert {t.dtype for t in found.values()} == {torch.float32}
        assert all(torch.equal(t, before[name]) for name, t in found.items())


@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_weights_that_are_taken_in_after_an_evaluation_stay(adapter: LoraSpec | None):
    trainer = trainer_in("bfloat16", adapter)
    first = trainer.state()
    trainer.step(batch(1))
    evaluate(trainer)
    trainer.restore(first)
    evaluate(trainer)
    assert all(torch.equal(t, first.weights[name]) for name, t in trainer.weights().items())
    with torch.no_grad():
        assert {t.dtype for t in trained_weights(trainer.model).values()} == {torch.float32}


@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_passes_see_what_a_step_without_a_signal_changed_after_an_evaluation(adapter: LoraSpec | None):
    evaluated, plain = (trainer_in("bfloat16", adapter, learning_rate=1e-2) for _ in range(2))
    for trainer in (evaluated, plain):
        for number in range(3):
            trainer.step(batch(number))
    before = evaluated.weights()
    evaluate(evaluated)
    for trainer in (evaluated, plain):
        trainer.step([group("silent", rewards=(1.0,) * 4)])
    assert torch.equal(logits(evaluated), logits(plain))
    assert any(not torch.equal(t, before[name]) for name, t in evaluated.weights().items()), "AdamW's moments move it"


@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_passes_in_bfloat16_on_one_rank_are_close_and_masters_stay_float32(adapter: LoraSpec | None):
    exact, rounded = (trainer_in(precision, adapter, loss="ppo_clip") for precision in ("float32", "bfloat16"))
    groups = near_policy(1)
    wanted, found = (trainer.step(groups).values for trainer in (exact, rounded))
    for name in ("loss", "mismatch_kl", "grad_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=0.1, abs=0.01)
    assert found["loss"] != wanted["loss"], "passes are in bfloat16"
    state, plain = rounded.state(), exact.state()
    assert {t.dtype for t in [*state.weights.values(), *state.optimizer.values()]} == {torch.float32}
    # Steps of AdamW are at most the learning rate, 1e-3: a weight of bfloat16 would lose most of one.
    assert any(not torch.equal(t, t.bfloat16().float()) for t in state.weights.values())
    assert all((t - plain.weights[name]).abs().max() < 2.5e-3 for name, t in state.weights.items())


class Towers(torch.nn.Module):
    """A model with other lists of layers before the one that is meant, as one that sees has."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.vision = torch.nn.ModuleList(torch.nn.Identity() for _ in range(5))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(layers))
        self.config = random_model().config


def test_the_layers_are_the_list_that_has_as_many_as_the_model_says():
    model = Towers(2)
    assert blocks(model) == list(model.layers)
    with pytest.raises(BadInput, match="no list of 2 layers was found in Towers"):
        blocks(Towers(3))


def forwards_of_a_layer(*, again: bool) -> int:
    """How often one step calls what is inside of the first layer."""
    trainer = GRPOTrainer(random_model(), job(learner={"activation_checkpointing": again}))
    calls: list[object] = []
    blocks(trainer.model)[0].mlp.register_forward_pre_hook(lambda *given: calls.append(given[0]))
    trainer.step(near_policy(1))
    return len(calls)


def test_activations_are_computed_again_only_if_the_job_asks_for_it():
    plain = forwards_of_a_layer(again=False)
    assert plain > 0
    assert forwards_of_a_layer(again=True) == 2 * plain


def test_layers_are_in_training_mode_within_a_pass_alone():
    """Outside they answer prompts, from a cache that a layer which is to be computed again can't have."""
    trainer = GRPOTrainer(random_model(), job(learner={"activation_checkpointing": True}))
    trainer.step(near_policy(1))
    assert not any(module.training for module in trainer.model.modules())

    def fail() -> None:
        with recomputing(trainer.model, job(learner={"activation_checkpointing": True}).learner):
            assert all(layer.training for layer in blocks(trainer.model))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any(module.training for module in trainer.model.modules())


class Second(Alone):
    """Another rank than the first."""

    rank = 1


def test_only_the_first_rank_keeps_what_is_put_together():
    trainer = GRPOTrainer(random_model(), job(), ranks=Second())
    assert (trainer.state().weights, trainer.weights()) == ({}, {})


def test_no_more_than_one_tensor_is_whole_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """What a gather of several ranks makes is a tensor of its own; here it is a copy of the only rank's shard."""
    trainer = trainer_in("bfloat16")
    trainer.step(batch(1))
    gathered: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def full_tensor(self: DTensor) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in gathered))
        made = self.to_local().clone()
        gathered.append(weakref.ref(made))
        return made

    monkeypatch.setattr(DTensor, "full_tensor", full_tensor)
    state = trainer.state()
    assert len(alive) > len(state.weights) > 1, "the moments as well"
    assert len(trainer.weights()) == len(state.weights)
    assert max(alive) == 0
