"""What a staleness study tries beside the losses: other step sizes, and AdamW with another first beta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from app.learner.buffer import Group
from app.learner.metrics import Seen
from app.learner.optimizer import BETAS
from app.learner.trainer import GRPOTrainer
from app.protocol.job import JobSpec

StepSize = Literal["constant", "ess", "lag"]
STEP_SIZES: tuple[StepSize, ...] = get_args(StepSize)
_PER_LAG = 0.1


class StudyTrainer(GRPOTrainer):
    """`step_size`: the learning rate times the step's ESS (`ess`), or divided by 1 + 0.1·(lag − 1) (`lag`)."""

    lag = 0
    """t − x of the batch that comes next."""

    def __init__(self, model: Any, spec: JobSpec, *, step_size: StepSize = "constant", beta1: float = BETAS[0]) -> None:
        super().__init__(model, spec)
        self._step_size = step_size
        self._ess = 1.0
        for group in self._optimizer.param_groups:
            group["betas"] = (beta1, BETAS[1])

    def _metrics(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]], seen: Seen) -> dict[str, float]:
        values = super()._metrics(groups, advantages, seen)
        self._ess = values["ess"]
        return values

    def _rate(self, steps: int) -> float:
        factor = {"constant": 1.0, "ess": self._ess, "lag": 1 / (1 + _PER_LAG * max(0, self.lag - 1))}
        return super()._rate(steps) * factor[self._step_size]
