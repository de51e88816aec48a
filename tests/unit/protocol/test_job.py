"""A job that can't run is refused when it is posted, with the field and what to change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.protocol.job import FINAL_STATUSES, JobSpec, JobStatus
from app.protocol.job_patch import JobPatch, SpotSelector

MINIMAL: dict[str, Any] = {"model": "tiny", "task": {"name": "reasoning_gym"}, "budget_usd": "5.00"}
CONTRACT: dict[str, Any] = {
    "name": "spell", "model": "tiny",
    "task": {"name": "reasoning_gym", "params": {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5}},
    "budget_usd": "5.00",
    "stop": {"steps": 120, "target_reward": None, "max_hours": None},
    "staleness_budget": 3, "publish_period": None, "safety_factor": 1.1,
    "batch": {"prompts": 32, "group_size": 8},
    "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8},
    "learner": {"placement": "local", "learning_rate": 6e-4},
    "fleet": {"providers": ["marketplace"], "gpu_names": [], "max_price_per_hour": None, "min_reliability": 0.9,
              "interruptible": True, "max_nodes": 8},
    "seed": 0, "notify_url": None,
}  # fmt: skip


def post(changes: dict[str, Any]) -> JobSpec:
    """As the API does: JSON text into the model. A dotted name is a nested field, an ellipsis takes the field away."""
    body = json.loads(json.dumps(MINIMAL))
    for name, value in changes.items():
        *parents, last = name.split(".")
        place = body
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return JobSpec.model_validate_json(json.dumps(body))


def test_the_contracts_example_and_the_minimum_are_valid() -> None:
    spec = JobSpec.model_validate(CONTRACT)
    assert (spec.kappa, spec.rollouts_per_step, spec.budget_micros) == (2, 256, 5_000_000)
    assert JobSpec.model_validate(MINIMAL).kappa == 2
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"model": ...}, "model", "required"),
        ({"model": ""}, "model", "at least 1"),
        ({"task": ...}, "task", "required"),
        ({"task.name": ""}, "task.name", "at least 1"),
        ({"task.params": [1]}, "task.params", "object"),
        ({"budget_usd": ...}, "budget_usd", "required"),
        ({"budget_usd": "0"}, "budget_usd", "more than 0"),
        ({"budget_usd": 0}, "budget_usd", "more than 0"),
        ({"budget_usd": "-5"}, "budget_usd", "more than 0"),
        ({"budget_usd": "0.0000001"}, "budget_usd", "more than 0"),
        ({"budget_usd": "NaN"}, "budget_usd", "finite"),
        ({"budget_usd": float("nan")}, "budget_usd", "finite"),
        ({"budget_usd": "Infinity"}, "budget_usd", "finite"),
        ({"budget_usd": "1e999999"}, "budget_usd", "at most"),
        ({"budget_usd": "10000000.01"}, "budget_usd", "at most"),
        ({"budget_usd": "five"}, "budget_usd", "decimal"),
        ({"budget_usd": None}, "budget_usd", "Decimal"),
        ({"staleness_budget": 0}, "staleness_budget", "greater than or equal to 1"),
        ({"staleness_budget": -1}, "staleness_budget", "greater than or equal to 1"),
        ({"staleness_budget": 1.5}, "staleness_budget", "integer"),
        ({"staleness_budget": 3, "publish_period": 3}, "publish_period", "at most max(1, staleness_budget - 1) = 2"),
        ({"staleness_budget": 1, "publish_period": 2}, "publish_period", "at most max(1, staleness_budget - 1) = 1"),
        ({"staleness_budget": 3, "staleness": {"max": 6}}, "staleness", "give one of them"),
        ({"staleness": {"max": 6, "adaptive": "often"}}, "staleness.adaptive", "boolean"),
        ({"publish_period": 0}, "publish_period", "greater than or equal to 1"),
        ({"safety_factor": 0.9}, "safety_factor", "greater than or equal to 1"),
        ({"safety_factor": float("nan")}, "safety_factor", "finite"),
        ({"batch.group_size": 1}, "batch.group_size", "greater than or equal to 2"),
        ({"batch.prompts": 0}, "batch.prompts", "greater than or equal to 1"),
        ({"sampling.top_p": 0.95}, "sampling.top_p", "must be 1.0"),
        ({"sampling.temperature": 0}, "sampling.temperature", "greater than 0"),
        ({"sampling.temperature": float("nan")}, "sampling.temperature", "finite"),
        ({"sampling.max_tokens": 0}, "sampling.max_tokens", "greater than or equal to 1"),
        ({"sampling.top_k": 50}, "sampling.top_k", "not permitted"),
        ({"stop": {"steps": None}}, "stop", "at least one of steps"),
        ({"stop.steps": 0}, "stop.steps", "greater than or equal to 1"),
        ({"stop": {"steps": None, "target_reward": float("nan")}}, "stop.target_reward", "finite"),
        ({"stop": {"steps": None, "max_hours": float("inf")}}, "stop.max_hours", "finite"),
        ({"stop.max_hours": 0}, "stop.max_hours", "greater than 0"),
        ({"stop.max_hours": 1e307}, "stop.max_hours", "less than or equal to 1000000"),
        ({"stop.steps": 10**400}, "stop.steps", "less than or equal to 1000000000"),
        ({"learner.placement": "moon"}, "learner.placement", "local"),
        ({"learner.learning_rate": 0}, "learner.learning_rate", "greater than 0"),
        ({"learner.learning_rate": 1.0}, "learner.learning_rate", "less than 1"),
        ({"learner.grad_clip": float("inf")}, "learner.grad_clip", "finite"),
        ({"fleet.max_nodes": 0}, "fleet.max_nodes", "greater than or equal to 1"),
        ({"fleet.max_price_per_hour": "0"}, "fleet.max_price_per_hour", "greater than 0"),
        ({"fleet.max_price_per_hour": "0.0000001"}, "fleet.max_price_per_hour", "more than 0"),
        ({"fleet.max_price_per_hour": "1e20"}, "fleet.max_price_per_hour", "at most"),
        ({"fleet.max_price_per_hour": "NaN"}, "fleet.max_price_per_hour", "finite"),
        ({"fleet.disk_gb": 1e18}, "fleet.disk_gb", "less than or equal to 1000000"),
        ({"fleet.min_reliability": 1.1}, "fleet.min_reliability", "less than or equal to 1"),
        ({"fleet.disk_gb": float("inf")}, "fleet.disk_gb", "finite"),
        ({"fleet.spot": True}, "fleet.spot", "not permitted"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"budget": "5"}, "budget", "not permitted"),
        ({"batch": {"prompts": 2_000, "group_size": 501}}, "batch", "1002000, more than 1000000 rollouts a step"),
    ],
)
def test_a_bad_field_is_named_with_what_is_wrong(changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        post(changes)
    errors = caught.value.errors()
    assert [".".join(map(str, e["loc"])) for e in errors] == [field]
    assert says in errors[0]["msg"]


def test_what_is_at_the_bounds_is_taken() -> None:
    spec = post({
        "stop": {"steps": 10**9, "max_hours": 1e6}, "budget_usd": "10000000",
        "fleet": {"max_price_per_hour": "10000000", "disk_gb": 1e6, "max_nodes": 10_000, "min_reliability": 1},
        "batch": {"prompts": 100_000}, "staleness_budget": 1000, "safety_factor": 10, "seed": 2**63 - 1,
    })  # fmt: skip
    assert spec.budget_micros == 10**13
    assert post({"budget_usd": "0.000001", "fleet": {"max_price_per_hour": "0.000001"}}).budget_micros == 1


def test_a_price_is_kept_with_six_places() -> None:
    for price in (0.4, "0.40", "4E-1", "0.3999999"):
        fleet = post({"fleet.max_price_per_hour": price}).model_dump(mode="json")["fleet"]
        assert fleet["max_price_per_hour"] == "0.400000"
    assert post({}).model_dump(mode="json")["fleet"]["max_price_per_hour"] is None


def test_every_bad_field_is_named_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        post({"budget_usd": "-1", "batch.group_size": 1, "fleet.max_nodes": 0})
    assert {".".join(map(str, e["loc"])) for e in caught.value.errors()} == {
        "budget_usd", "batch.group_size", "fleet.max_nodes",
    }  # fmt: skip


@given(staleness=st.integers(1, 1000), period=st.none() | st.integers(1, 1000))
def test_kappa(staleness: int, period: int | None) -> None:
    changes = {"staleness_budget": staleness, "publish_period": period}
    if period is not None and period > max(1, staleness - 1):
        with pytest.raises(ValidationError):
            post(changes)
        return
    kappa = post(changes).kappa
    assert 1 <= kappa <= max(1, staleness - 1)
    assert kappa == (period or max(1, staleness - 1))


@pytest.mark.parametrize(
    "body",
    [
        {"budget_usd": "0"},
        {"budget_usd": "0.0000001"},
        {"budget_usd": "NaN"},
        {"budget_usd": "1e999999"},
        {"staleness_budget": 0},
        {"staleness_budget": 1001},
        {"fleet": {"max_nodes": 0}},
        {"fleet": {"max_nodes": 10_001}},
        {"fleet": {"max_nodes": 1, "gpu_names": ["L4"]}},
        {"model": "tiny"},
    ],
)
def test_a_bad_patch_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        JobPatch.model_validate(body)


def test_a_patch_changes_what_it_names() -> None:
    patch = JobPatch.model_validate({"budget_usd": "7.5", "fleet": {"max_nodes": 3}})
    assert str(patch.budget_usd) == "7.5"
    assert patch.fleet is not None
    assert patch.fleet.max_nodes == 3
    assert patch.staleness_budget is None


def test_a_selector_refuses_what_it_does_not_know() -> None:
    assert SpotSelector.model_validate({"machine_id": 4242}).machine_id == 4242
    with pytest.raises(ValidationError):
        SpotSelector.model_validate({"machine": 4242})


def test_final_statuses() -> None:
    assert {s for s in JobStatus if s.final} == FINAL_STATUSES
    assert not JobStatus.DRAINING.final
