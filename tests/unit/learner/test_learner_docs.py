"""docs/learner.md names every loss, its parameters with their defaults, and every number of a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from app.learner.trainer import GRPOTrainer
from app.protocol.learner_spec import LearnerSpec, LossName
from tests.unit.learner.samples import batch, job, random_model

PAGE = (Path(__file__).parents[3] / "docs" / "learner.md").read_text()
ELSEWHERE = {"placement", "learning_rate", "micro_batch_tokens", "eval_prompts"}
"""Fields that are no matter of the objective."""


@pytest.mark.parametrize("loss", get_args(LossName))
def test_every_loss_has_a_row(loss: str):
    assert re.search(rf"^\| `{loss}`", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(LearnerSpec.model_fields.keys() - ELSEWHERE))
def test_every_setting_is_explained(name: str):
    assert f"`{name}`" in PAGE or f"`learner.{name}`" in PAGE
    for group in re.findall(rf"^\| .*((?:`\w+`, )*`{name}`) \(([\d.]+)\)", PAGE, re.MULTILINE):
        assert float(group[1]) == LearnerSpec.model_fields[name].default


def test_every_number_of_a_step_is_explained():
    trainer = GRPOTrainer(random_model(), job(learner={"grad_cosine": True}))
    values = [trainer.step(batch(i)).values for i in range(2)][1]
    listed = PAGE.partition("### What a step tells")[2].partition("### What staleness costs")[0]
    names = set(re.findall(r"`(\w+)`", listed))
    short = {"completion_tokens_max": "_max", "clip_share_low": "_low"}
    (of_lags,) = [line for line in listed.splitlines() if line.startswith("| `NAME_lag_k`")]
    by_lag = {n.partition("_lag_")[0] for n in values if "_lag_" in n}
    assert by_lag == set(re.findall(r"`(\w+)`", of_lags)) - {"NAME_lag_k"}
    missing = [n for n in values if "_lag_" not in n and n not in names and short.get(n) not in names]
    assert not missing
