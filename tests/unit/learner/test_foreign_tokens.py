"""Tokens that the environment of a task with several turns wrote: the policy reads them and is not trained on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import get_args

import pytest
import torch

from app.learner.buffer import Group
from app.learner.lora import add_adapter
from app.learner.microbatch import row_of
from app.learner.reference import draws
from app.learner.trainer import GRPOTrainer
from app.protocol.learner_spec import LearnerSpec, LoraSpec, LossName
from app.protocol.trajectory import Rollout
from tests.unit.learner.samples import VOCABULARY, job, random_model
from tests.unit.learner.test_losses import slow

STEPS = 9
FREE = {"grad_clip": 1e9, "warmup_steps": 0}


def table(model, rollout: Rollout) -> torch.Tensor:
    """log π of each completion token, the answer alone in its row."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1], -1)
    return logprobs.gather(1, torch.tensor(list(rollout.completion_ids))[:, None])[:, 0]


def dialogue(name: str, index: int, rng: random.Random, prompt: list[int]) -> Rollout:
    """An answer in which two runs of tokens are the environment's, sampled by two versions."""
    marks = [
        mark
        for mark, size in zip((True, False, True, False), (rng.randint(1, 4) for _ in range(4)), strict=True)
        for _ in range(size)
    ]
    ids = [rng.randrange(VOCABULARY) for _ in marks]
    bare = Rollout(name, 0, index, prompt, ids, [], [4, 7], [0, len(ids) // 2], float(index % 2), "stop", None, marks)
    with torch.no_grad():
        own = table(random_model(), bare).tolist()
    return dataclasses.replace(
        bare, logprobs=[p + rng.gauss(0, 0.4) if mark else 0.0 for p, mark in zip(own, marks, strict=True)]
    )


def dialogues(number: int, prompts: int = 3) -> list[Group]:
    rng, made = random.Random(number), []
    for i in range(prompts):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 6))]
        made.append(Group(f"d{i}", tuple(dialogue(f"d{i}", j, rng, prompt) for j in range(3 + i % 2)), "n"))
    return made


def slow_loss(model, groups: list[Group], spec: LearnerSpec, seed: int) -> tuple[float, float]:
    """Loss and norm of its gradient, from the formulas of each token, tokens of the environment left out one by one."""
    new, columns, total = [], [], 0
    for g in groups:
        rewards = torch.tensor([r.reward for r in g.rollouts], dtype=torch.float64)
        scale = {"none": 1.0, "group": float(rewards.std()) + 1e-4}[spec.reward_scale]
        for r, reward in zip(g.rollouts, rewards.tolist(), strict=True):
            advantage = (reward - float(rewards.mean())) / scale
            lags = [STEPS - r.span_versions[i >= r.span_starts[1]] for i in range(len(r.completion_ids))]
            every = dataclasses.replace(row_of(r, advantage, STEPS), generated=None)
            drawn = draws([every], seed, STEPS).tolist()
            logprobs = table(model, r)
            answer = len(new)
            for i, mark in enumerate(r.written):
                if mark:
                    new.append(logprobs[i])
                    columns.append((r.logprobs[i], advantage, lags[i], answer, drawn[i]))
                    total += 1
    old, advantages, lags, answers, drawn = (list(c) for c in zip(*columns, strict=True))
    found = list(slow(spec.loss, torch.stack(new).tolist(), old, advantages, lags, answers, drawn))
    torch.autograd.backward(sum(-d / total * n for (_, d), n in zip(found, new, strict=True)))
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    return -sum(v for v, _ in found) / total, norm


def stepped(groups: list[Group], model=None, **learner):
    trainer = GRPOTrainer(model or random_model(), job(learner={**FREE, **learner}))
    trainer.steps = STEPS
    return trainer.step(groups).values


@pytest.mark.parametrize("how", [{"micro_batch_tokens": 1}, {"packing": True, "micro_batch_tokens": 40}, {}])
@pytest.mark.parametrize("loss", get_args(LossName))
def test_loss_and_gradient_are_those_of_a_slow_loop(loss: str, how: dict):
    groups, spec = dialogues(1), job(learner={"loss": loss})
    loss_value, norm = slow_loss(random_model(), groups, spec.learner, spec.seed)
    values = stepped(groups, loss=loss, **how)
    assert norm > 0.01
    assert values["loss"] == pytest.approx(loss_value, rel=1e-4, abs=1e-6)
    assert values["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_an_adapter_learns_from_own_tokens_alone():
    models = [random_model() for _ in range(2)]
    for model in models:
        add_adapter(model, LoraSpec(rank=2), name="m", seed=7)
    groups, spec = dialogues(2), job(learner={"loss": "tis"})
    _, norm = slow_loss(models[0], groups, spec.learner, spec.seed)
    assert stepped(groups, models[1], loss="tis")["grad_norm"] == pytest.approx(norm, rel=1e-4)


def shown(groups: list[Group], token: int) -> list[Group]:
    """The same dialogues as if the policy had the last word: the environment's last tokens taken off or replaced."""
    made = []
    for g in groups:
        rollouts = []
        for r in g.rollouts:
            own = max(i for i, mark in enumerate(r.written) if mark) + 1
            tail = [token] * (len(r.completion_ids) - own)
            rollouts.append(dataclasses.replace(r, completion_ids=[*r.completion_ids[:own], *tail]))
        made.append(Group(g.work_item, tuple(rollouts), g.node))
    return made


def test_what_the_environment_says_last_changes_no_number():
    groups = dialogues(3)
    for loss in ("dppo", "gspo", "m2po", "bapo"):
        one, two = (stepped(shown(groups, token), loss=loss) for token in (3, 11))
        assert one == two
    assert stepped(shown(groups, 3)) == pytest.approx(stepped(groups), rel=1e-5)


def test_metrics_count_what_the_policy_wrote():
    groups = dialogues(4)
    values = stepped(groups)
    own = [sum(r.written) for g in groups for r in g.rollouts]
    whole = [len(r.completion_ids) for g in groups for r in g.rollouts]
    assert values["tokens"] == values["active_tokens"] == sum(own) < sum(whole)
    assert values["completion_tokens_mean"] == pytest.approx(sum(own) / len(own))
    assert (values["completion_tokens_max"], values["answer_tokens_max"]) == (max(own), max(whole))
    assert values["answer_tokens_mean"] == pytest.approx(sum(whole) / len(whole))
    taken = [itertools.compress(r.logprobs, r.written) for g in groups for r in g.rollouts]
    assert values["entropy"] == pytest.approx(-sum(map(sum, taken)) / sum(own))
    assert values["mismatch_kl_node_n"] == pytest.approx(values["mismatch_kl"])
    lags = {k for k in values if k.startswith("mismatch_kl_lag")}
    assert lags == {"mismatch_kl_lag_2", "mismatch_kl_lag_5"}


def test_a_mark_for_every_token_is_no_mark():
    groups = [
        Group(g.work_item, tuple(dataclasses.replace(r, generated=None, logprobs=[-2.0] * len(r.logprobs))
                                 for r in g.rollouts))
        for g in dialogues(5)
    ]  # fmt: skip
    marked = [
        Group(g.work_item, tuple(dataclasses.replace(r, generated=[True] * len(r.logprobs)) for r in g.rollouts))
        for g in groups
    ]
    for loss in ("dppo", "obrs"):
        assert stepped(groups, loss=loss) == stepped(marked, loss=loss)
