"""The losses against TRL's GRPO loss on the same tensors."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import trl

from app.learner.losses import Tokens, surrogate
from app.protocol.learner_spec import LearnerSpec

ROWS, WIDTH = 6, 9


def tensors(seed: int):
    """Log-probs of policy and sampler, a right-padded mask and an advantage an answer."""
    generator = torch.Generator().manual_seed(seed)
    new = -torch.rand(ROWS, WIDTH, generator=generator) * 3
    old = new + torch.randn(ROWS, WIDTH, generator=generator) * 0.4
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    mask = (torch.arange(WIDTH) < lengths[:, None]).int()
    return new.requires_grad_(), old, mask, torch.randn(ROWS, generator=generator)


def reference(new, old, mask, advantages, spec: LearnerSpec) -> torch.Tensor:
    """TRL's loss of one batch in one process, without accumulation or entropy bonus."""
    cap = {"cispo": spec.cispo_cap, "gspo": spec.gspo_high}.get(spec.loss, spec.clip_high)
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        beta=spec.kl_beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=cap,
        epsilon_low=spec.gspo_low if spec.loss == "gspo" else spec.clip_low,
        importance_sampling_level="sequence" if spec.loss == "gspo" else "token",
        loss_type="cispo" if spec.loss == "cispo" else "dapo",
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": old * 0.8,
    }
    return trl.GRPOTrainer._compute_loss(stub, None, inputs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("loss", "beta"), [("ppo_clip", 0.0), ("cispo", 0.0), ("gspo", 0.0), ("ppo_clip", 0.04), ("cispo", 0.04)]
)
def test_loss_and_gradient_are_those_of_trl(loss: str, beta: float, seed: int):
    spec = LearnerSpec(loss=loss, gspo_low=0.05, gspo_high=0.1, cispo_cap=1.5, kl_beta=beta)
    new, old, mask, advantages = tensors(seed)
    want = reference(new, old, mask, advantages, spec)
    (want_gradient,) = torch.autograd.grad(want, new)
    row, column = mask.nonzero(as_tuple=True)
    mine, theirs = new[row, column], old[row, column]
    tokens = Tokens(mine, theirs, advantages[row], torch.ones_like(row), row, theirs * 0.8)
    found = surrogate(spec, tokens)
    loss_value = -found.objective.sum() / mask.sum()
    (gradient,) = torch.autograd.grad(loss_value, new)
    assert loss_value.item() == pytest.approx(want.item(), abs=1e-5)
    assert (gradient - want_gradient).abs().max() < 1e-5
    assert want_gradient.abs().max() > 1e-3
    assert (found.high | found.low).any()
