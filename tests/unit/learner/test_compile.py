"""Compiled layers do what layers do, for any length."""

from __future__ import annotations

import logging
from functools import partialmethod

import pytest
import torch
from torch._dynamo.utils import counters

from app.learner.trainer import GRPOTrainer
from tests.unit.learner.samples import batch, job, random_model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_give_the_same_losses_and_gradients(monkeypatch: pytest.MonkeyPatch):
    # Everything but the code generator, which takes the better part of a minute for a model of any size.
    compiled = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch.compiler.reset()
    counters.clear()
    plain = GRPOTrainer(random_model(), job())
    trainer = GRPOTrainer(random_model(), job(learner={"compile": True, "micro_batch_tokens": 40}))
    for number in range(3):
        wanted, found = plain.step(batch(number)).values, trainer.step(batch(number)).values
        for name in ("loss", "grad_norm", "mismatch_kl"):
            assert found[name] == pytest.approx(wanted[name], abs=1e-5, rel=1e-4)
    assert 0 < counters["stats"]["unique_graphs"] <= 4, "compiled, and not again for each length"
    torch.compiler.reset()
