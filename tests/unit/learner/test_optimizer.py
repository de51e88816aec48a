"""What AdamW takes of memory is its two moments."""

from __future__ import annotations

import pytest
import torch

from app.learner.optimizer import ONE_BY_ONE, adamw


@pytest.mark.parametrize(("numbers", "foreach"), [(ONE_BY_ONE - 1, None), (ONE_BY_ONE, False)])
def test_large_models_are_gone_through_one_tensor_at_a_time(numbers: int, foreach: bool | None):
    """On a GPU torch would make one more copy of them for each step."""
    parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in (numbers - 1000, 1000)]
    frozen = torch.nn.Parameter(torch.empty(1 << 31, device="meta"), requires_grad=False)
    (group,) = adamw([*parameters, frozen], 1e-3).param_groups
    assert group["foreach"] is foreach
    assert group["params"] == parameters
