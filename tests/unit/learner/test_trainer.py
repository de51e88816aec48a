"""One step, and a run that is cut in two."""

from __future__ import annotations

import dataclasses
import math
import random
import tracemalloc
from typing import get_args

import pytest
import torch

from app.learner.buffer import Group
from app.learner.model import unique_weights
from app.learner.trainer import GRPOTrainer, TrainerState
from app.protocol.errors import LearnerError
from app.protocol.learner_spec import LossName
from app.protocol.trajectory import Rollout
from tests.unit.learner.samples import batch, group, job, random_model


def weights(model):
    return {name: t.clone() for name, t in unique_weights(model).items()}


def same(one, two) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def trained(limit: int, groups, steps: int = 2, **learner):
    trainer = GRPOTrainer(random_model(), job(learner={"micro_batch_tokens": limit, **learner}))
    metrics = [trainer.step(groups) for _ in range(steps)]
    return weights(trainer.model), metrics


def near_policy(number: int, prompts: int = 5, noise: float = 0.3):
    """A batch whose recorded log-probs are about the model's own, so that every loss has something to keep."""
    model, rng, made = random_model(), random.Random(number), []
    for g in batch(number, prompts):
        rollouts = []
        for r in g.rollouts:
            ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])
            with torch.no_grad():
                table = torch.log_softmax(model(input_ids=ids).logits[0], -1)
            start = len(r.prompt_ids) - 1
            own = [float(table[start + i, token]) for i, token in enumerate(r.completion_ids)]
            rollouts.append(dataclasses.replace(r, logprobs=[p + rng.gauss(0, noise) for p in own]))
        made.append(Group(g.work_item, tuple(rollouts)))
    return made


@pytest.mark.parametrize("loss", get_args(LossName))
@pytest.mark.parametrize("limit", [1, 60])
def test_the_split_into_micro_batches_does_not_matter(limit: int, loss: str):
    # AdamW's first steps magnify rounding in gradients near 0, up to the learning rate; a wrong one shows at any rate.
    changes = {"loss": loss, "learning_rate": 1e-3}
    groups = near_policy(1)
    whole, whole_metrics = trained(100_000, groups, **changes)
    cut, cut_metrics = trained(limit, groups, **changes)
    assert all((whole[k] - cut[k]).abs().max() < 1e-5 for k in whole)
    assert whole_metrics[0].values["grad_norm"] > 0
    for one, two in zip(whole_metrics, cut_metrics, strict=True):
        assert one.values == pytest.approx(two.values, abs=1e-5)


@pytest.mark.parametrize("loss", get_args(LossName))
def test_without_a_learning_rate_ratios_stay(loss: str):
    trainer = GRPOTrainer(random_model(), job(learner={"learning_rate": 1e-38, "loss": loss}))
    first, *others = [trainer.step(near_policy(3)).values for _ in range(3)]
    names = ["ratio_mean", "ratio_p99", "mismatch_kl", "log_ratio_squared", "ess"]
    # decoupled goes by lags, which grow from step to step, and obrs draws anew.
    for name in names if loss in ("decoupled", "obrs") else [*names, "loss"]:
        assert [o[name] for o in others] == pytest.approx([first[name]] * 2, rel=1e-6)


def test_mismatch_is_told_by_the_lag_of_each_token():
    trainer = GRPOTrainer(random_model(), job())
    trainer.steps = 9
    rollouts = [
        Rollout("a", 0, i, [1, 2], [3, 4], [-4.0, -1.0], [2, 7], [0, 1], float(i), ("stop", "length")[i])
        for i in range(2)
    ]
    values = trainer.step([Group("a", tuple(rollouts))]).values
    assert {k for k in values if k.startswith("mismatch_kl_lag")} == {"mismatch_kl_lag_2", "mismatch_kl_lag_7"}
    assert values["mismatch_kl"] == pytest.approx((values["mismatch_kl_lag_2"] + values["mismatch_kl_lag_7"]) / 2)
    assert values["mismatch_kl_lag_2"] > values["mismatch_kl_lag_7"]
    assert values["truncated_share"] == 0.5


def test_gradient_cosine_is_with_the_step_before():
    trainer = GRPOTrainer(random_model(), job(learner={"learning_rate": 1e-38, "grad_cosine": True}))
    groups = [Group(g.work_item, g.rollouts) for g in near_policy(4, noise=0.0)]
    turned = [
        Group(g.work_item, tuple(dataclasses.replace(r, reward=1 - r.reward) for r in g.rollouts)) for g in groups
    ]
    found = [trainer.step(b).values.get("grad_cosine") for b in (groups, groups, turned)]
    assert found[0] is None
    assert found[1:] == pytest.approx([1.0, -1.0], abs=1e-4)
    for asked, told in (({}, False), ({"staleness": {"max": 3, "adaptive": True}}, True)):
        plain = GRPOTrainer(random_model(), job(**asked))
        assert [("grad_cosine" in plain.step(groups).values) for _ in range(2)] == [False, told]


def pushed(loss: str, logprob, behaviour: float, advantage: float):
    """What one token counts, slowly."""
    ratio = torch.exp(logprob - behaviour)
    if loss == "ppo_clip":
        return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    moved = math.exp(float(logprob.detach())) - math.exp(behaviour)
    masked = (advantage > 0 and moved > 0.2) or (advantage < 0 and moved < -0.2)
    return (0.0 if masked else ratio * advantage) - 1e-3 * (logprob - behaviour) ** 2


@pytest.mark.parametrize("loss", ["ppo_clip", "dppo"])
def test_gradient_is_that_of_a_slow_loop_over_tokens(loss: str):
    groups = [*batch(2, 3), group("silent", rewards=(1.0, 1.0, 1.0, 1.0))]
    spec = job(learner={"grad_clip": 1e9, "warmup_steps": 0, "loss": loss})
    model, slow = random_model(), random_model()
    total = sum(len(r.completion_ids) for g in groups for r in g.rollouts)
    want = torch.zeros(())
    for g in groups:
        rewards = torch.tensor([r.reward for r in g.rollouts], dtype=torch.float64)
        if len(set(rewards.tolist())) == 1:
            continue
        for r, reward in zip(g.rollouts, rewards, strict=True):
            advantage = float((reward - rewards.mean()) / (rewards.std() + 1e-4 if loss == "ppo_clip" else 1.0))
            for i, token in enumerate(r.completion_ids):
                seen = torch.tensor([[*r.prompt_ids, *r.completion_ids[:i]]])
                logprob = torch.log_softmax(slow(input_ids=seen).logits[0, -1], -1)[token]
                want = want - pushed(loss, logprob, r.logprobs[i], advantage) / total
    want.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in slow.parameters()))
    metrics = GRPOTrainer(model, spec).step(groups)
    assert metrics.values["loss"] == pytest.approx(want.item(), rel=1e-4)
    assert metrics.values["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_reference_is_v0_also_after_a_restart():
    spec = job(learner={"kl_beta": 0.1})
    first = GRPOTrainer(random_model(), spec)
    values = [first.step(near_policy(1)).values for _ in range(3)]
    assert values[0]["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert values[2]["reference_kl"] > values[1]["reference_kl"] > 1e-6
    second = GRPOTrainer(random_model(), spec)
    second.restore(first.state())
    assert second.step(near_policy(1)).values["reference_kl"] == first.step(near_policy(1)).values["reference_kl"]
    assert same(weights(first.model), weights(second.model))
    assert "reference_kl" not in GRPOTrainer(random_model(), job()).step(near_policy(1)).values


def test_a_pull_to_v0_holds_the_policy_back():
    apart = []
    for beta in (1e-9, 10.0):
        trainer = GRPOTrainer(random_model(), job(learner={"kl_beta": beta, "learning_rate": 1e-3}))
        apart.append([trainer.step(near_policy(1, noise=0.0)).values for _ in range(15)][-1]["reference_kl"])
    assert 0 < apart[1] < apart[0] / 3


def test_gac_bends_a_gradient_that_repeats_the_one_before_and_skips_a_copy_of_it():
    frozen = {"learning_rate": 1e-38, "gac": True, "grad_clip": 1e9}
    groups, others = near_policy(4, noise=0.0), near_policy(5, noise=0.0)
    plain = GRPOTrainer(random_model(), job(learner={**frozen, "gac": False, "grad_cosine": True}))
    free = [plain.step(b).values for b in (groups, [*groups, *others])][1]
    bent = GRPOTrainer(random_model(), job(learner={**frozen, "gac_low": 0.1, "gac_high": 1.0}))
    values = [bent.step(b).values for b in (groups, [*groups, *others])][1]
    cosine = free["grad_cosine"]
    assert 0.1 < values["grad_cosine"] == cosine < 1.0
    assert values["gac_removed"] == pytest.approx(1 - 0.1 / cosine)
    # What is across stays, what is along is 0.1 of the length that there was.
    want = free["grad_norm"] * math.sqrt(1 - cosine**2 + 0.1**2)
    assert values["grad_norm"] == pytest.approx(want, rel=1e-3)


def test_gac_skips_a_step_but_never_two_in_a_row():
    trainer = GRPOTrainer(random_model(), job(learner={"gac": True, "gac_high": 0.3, "learning_rate": 1e-4}))
    groups = near_policy(4, noise=0.0)
    moved, skips = [], []
    for _ in range(5):
        before = weights(trainer.model)
        skips.append(trainer.step(groups).values.get("gac_skipped", 0.0))
        moved.append(not same(before, weights(trainer.model)))
    assert skips == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert moved == [True, False, True, False, True]


def test_groups_without_signal_change_nothing_but_the_denominator():
    silent = [group(f"s{i}", rewards=(0.0,) * 4) for i in range(3)]
    spec = job(learner={"grad_clip": 1e9})
    alone = GRPOTrainer(random_model(), spec).step(batch(3))
    diluted = GRPOTrainer(random_model(), spec).step([*batch(3), *silent])
    share = alone.values["tokens"] / diluted.values["tokens"]
    assert diluted.values["grad_norm"] == pytest.approx(alone.values["grad_norm"] * share, rel=1e-4)
    assert diluted.values["zero_variance_share"] == 3 / 8


def test_a_batch_without_any_signal_is_a_step_with_zero_gradient():
    trainer = GRPOTrainer(random_model(), job())
    before = weights(trainer.model)
    metrics = trainer.step([group("s", rewards=(1.0,) * 4)])
    assert metrics.values["grad_norm"] == 0.0
    assert metrics.reward == 1.0
    assert trainer.steps == 1
    assert same(before, weights(trainer.model))


def test_a_rehearsal_of_many_long_answers_does_not_hold_each_of_them():
    trainer = GRPOTrainer(random_model(), job(learner={"micro_batch_tokens": 1, "loss": "ppo_clip"}))
    tracemalloc.start()
    try:
        assert trainer.rehearse(5_000, [[1, 2, 3]], 1_000) > 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000 * 1_000 * 8, "one list of its numbers for each"


@pytest.mark.parametrize("loss", ["ppo_clip", "m2po"])
def test_a_rehearsal_leaves_no_trace(loss: str):
    trainer, untouched = (
        GRPOTrainer(random_model(), job(learner={"loss": loss, "grad_cosine": True})) for _ in range(2)
    )
    for t in (trainer, untouched):
        t.step(batch(1))
    before, state, rng = weights(trainer.model), trainer.state(), torch.random.get_rng_state()
    assert trainer.rehearse(40, [[1, 2, 3], [4, 5]], 6) > 0
    assert same(before, weights(trainer.model))
    assert same(state.optimizer, trainer.state().optimizer)
    assert torch.equal(rng, torch.random.get_rng_state())
    assert trainer.step(batch(2)).values == untouched.step(batch(2)).values
    assert same(weights(trainer.model), weights(untouched.model))


def test_learning_rate_warms_up_over_the_first_steps():
    trainer = GRPOTrainer(random_model(), job(learner={"learning_rate": 0.004, "warmup_steps": 4}))
    rates = [trainer.step(batch(i)).values["learning_rate"] for i in range(6)]
    assert rates == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.004, 0.004])


def test_a_step_that_is_not_finite_changes_nothing():
    trainer = GRPOTrainer(random_model(), job())
    trainer.step(batch(1))
    before, optimizer = weights(trainer.model), trainer.state().optimizer
    bad = Group("bad", tuple(Rollout("bad", 0, i, [1], [2], [math.nan], [0], [0], float(i), "stop") for i in range(2)))
    with pytest.raises(LearnerError, match="step 2 is not finite"):
        trainer.step([bad])
    assert same(before, weights(trainer.model))
    assert same(optimizer, trainer.state().optimizer)
    assert trainer.steps == 1


def test_resumed_run_equals_the_uninterrupted_one_bit_by_bit():
    whole = GRPOTrainer(random_model(), job())
    losses = [whole.step(batch(i)).values["loss"] for i in range(6)]
    first = GRPOTrainer(random_model(), job())
    cut = [first.step(batch(i)).values["loss"] for i in range(3)]
    state = first.state()
    first.step(batch(99))  # the state must be a copy
    second = GRPOTrainer(random_model(seed=5), job())
    second.restore(state)
    cut += [second.step(batch(i)).values["loss"] for i in range(3, 6)]
    assert cut == losses
    assert same(weights(second.model), weights(whole.model))


def test_the_state_of_another_model_is_refused():
    trainer = GRPOTrainer(random_model(), job())
    state = trainer.state()
    state.weights.popitem()
    with pytest.raises(LearnerError, match="another model"):
        trainer.restore(state)


def test_temperature_is_part_of_the_distribution():
    from app.learner.sampling import sample

    spec = job(sampling={"temperature": 2.0, "max_tokens": 5})
    model = random_model()
    made = sample(
        model, [[1, 2, 3]] * 8, max_tokens=5, temperature=2.0, eos=frozenset({0}), generator=torch.Generator()
    )
    rows = [
        Rollout("a", 0, i, [1, 2, 3], c.ids, c.logprobs, [0], [0], float(i % 2), c.finish_reason)
        for i, c in enumerate(made)
    ]
    values = GRPOTrainer(model, spec).step([Group("a", tuple(rows))]).values
    assert values["mismatch_kl"] < 1e-9
    assert values["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_a_state_from_before_the_first_step_leaves_nothing_of_later_ones():
    trainer, untouched = GRPOTrainer(random_model(), job()), GRPOTrainer(random_model(), job())
    first = trainer.state()
    trainer.step(batch(1))
    trainer.restore(first)
    for t in (trainer, untouched):
        t.step(batch(2))
    assert same(weights(trainer.model), weights(untouched.model))


def test_a_state_with_an_optimizer_of_another_model_is_refused_before_anything_is_changed():
    trainer = GRPOTrainer(random_model(), job())
    trainer.step(batch(1))
    state, before = trainer.state(), weights(trainer.model)
    moments = {**state.optimizer, "exp_avg/no.such.weight": torch.zeros(1)}
    other = {name: torch.zeros_like(t) for name, t in state.weights.items()}
    with pytest.raises(LearnerError, match="optimizer is of another model"):
        trainer.restore(TrainerState(7, other, moments))
    assert trainer.steps == 1
    assert same(before, weights(trainer.model))


def test_groups_of_different_sizes_each_have_their_own_mean():
    groups = [group("a", rewards=(0.0, 1.0)), group("b", rewards=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)), group("c")]
    values = GRPOTrainer(random_model(), job(learner={"grad_clip": 1e9})).step(groups).values
    assert values["rollouts"] == 12
    assert values["advantage_max"] == pytest.approx(5 / 6)
    alone = [GRPOTrainer(random_model(), job(learner={"grad_clip": 1e9})).step([g]).values for g in groups]
    total = sum(v["loss"] * v["tokens"] for v in alone)
    assert values["loss"] * values["tokens"] == pytest.approx(total, rel=1e-4)


def test_a_step_without_a_signal_has_no_cosine_and_neither_has_the_next_one():
    for learner in ({"gac": True}, {"grad_cosine": True}):
        trainer = GRPOTrainer(random_model(), job(learner={**learner, "learning_rate": 1e-4}))
        silent = [group("s", rewards=(1.0,) * 4)]
        told = ["grad_cosine" in trainer.step(g).values for g in (batch(1), silent, silent, batch(1), batch(2))]
        assert told == [False, False, False, False, True]
