"""AdamW as the learner uses it.

Invariant: beside its two moments it takes no more than one tensor's memory, where a model is so large that it matters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from app.learner.parallel.shards import local

BETAS = (0.9, 0.95)
ONE_BY_ONE = 1 << 30
"""Parameters of one rank from which they are gone through one tensor at a time. All at once, as torch does it on a GPU,
takes 4 bytes a parameter more; with so many the time for launching kernels doesn't matter."""


def adamw(parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Without weight decay, over the parameters that are trained."""
    trained = [p for p in parameters if p.requires_grad]
    foreach = False if sum(local(p).numel() for p in trained) >= ONE_BY_ONE else None
    return torch.optim.AdamW(trained, lr=lr, betas=BETAS, weight_decay=0.0, foreach=foreach)
