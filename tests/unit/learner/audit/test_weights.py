"""The auditor's copy of the model has what nodes were sent, whatever kind of job it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.learner.audit.scoring import score
from app.learner.audit.weights import MOST, Versions, audit_device, kept
from app.learner.lora import add_adapter
from app.learner.model import load, trained_weights
from app.learner.parallel.ranks import ALONE, Alone
from app.learner.sink import RelaySink
from app.learner.tiny import tiny_model
from app.protocol.errors import BadInput, LearnerError
from app.protocol.job import JobSpec
from app.protocol.trajectory import Rollout
from tests.e2e.stage import CACHE
from tests.integration.snapshots.helpers import MemoryObjects
from tests.unit.learner.samples import job, random_model

ROLLOUTS = [
    Rollout("w", 0, i, list(range(3, 3 + n)), list(range(9, 9 + m)), [-1.0] * m, [0], [0], 0.0, "stop")
    for i, (n, m) in enumerate([(4, 3), (2, 7), (9, 1), (4, 4)])
]
CPU = torch.device("cpu")


def sink(folder: Path, spec: JobSpec, keep: int = 3) -> RelaySink:
    return RelaySink(
        folder, job_id="j", relay_token="t", host="127.0.0.1", uplink_bytes_per_s=None, objects=MemoryObjects(),
        assets=[], snapshots=spec.snapshot, keep=keep,
    )  # fmt: skip


def moved(model, seed: int):
    """Other weights, as if trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in trained_weights(model).values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    "changes", [{}, {"snapshot": {"quantise": "int8"}}, {"learner": {"lora": {"rank": 4, "alpha": 8}}}]
)
def test_each_version_is_computed_with_as_it_was_published(tmp_path: Path, changes):
    spec = job(**changes)
    loaded = load(tiny_model(CACHE), device=CPU)
    if spec.learner.lora is not None:
        add_adapter(loaded.model, spec.learner.lora, name="tiny", seed=spec.seed)
    shelf = sink(tmp_path, spec)
    versions = Versions(loaded.folder, spec, CPU, shelf.weights)
    expected = {}
    for version in (0, 2):
        shelf.publish(version, trained_weights(moved(loaded.model, version)))
        sent = shelf.weights(version)
        assert sent is not None
        before = {n: t.clone() for n, t in trained_weights(loaded.model).items()}
        with torch.no_grad():
            for name, tensor in trained_weights(loaded.model).items():
                tensor.copy_(sent[name])
        expected[version] = score(loaded.model, ROLLOUTS, 1.0, 4096)
        with torch.no_grad():
            for name, tensor in trained_weights(loaded.model).items():
                tensor.copy_(before[name])
    for version in (2, 0, 2):
        found = versions.score(version, ROLLOUTS)
        assert found is not None
        for one, other in zip(found, expected[version], strict=True):
            assert torch.allclose(one.logprob, other.logprob, atol=1e-6)
    assert not torch.allclose(expected[0][1].logprob, expected[2][1].logprob, atol=1e-2)
    assert versions.score(1, ROLLOUTS) is None


def test_a_payload_of_another_model_is_an_error():
    spec = job()
    versions = Versions(tiny_model(CACHE), spec, CPU, lambda _: {"w": torch.zeros(1)})
    with pytest.raises(LearnerError, match="lacks"):
        versions.score(0, ROLLOUTS)


@pytest.mark.parametrize("limit", [1, 20, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_entropies_and_variances_are_those_of_each_row_alone(limit: int, temperature: float):
    model = random_model()
    for rollout, found in zip(ROLLOUTS, score(model, ROLLOUTS, temperature, limit), strict=True):
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / temperature
        p = torch.softmax(logits.double(), -1)
        entropy = -(p * p.log()).sum(-1)
        token = torch.tensor(rollout.completion_ids)[:, None]
        assert torch.allclose(found.logprob, p.log().gather(1, token)[:, 0], atol=1e-5)
        assert torch.allclose(found.entropy, entropy, atol=1e-5)
        assert torch.allclose(found.variance, (p * p.log().square()).sum(-1) - entropy.square(), atol=1e-4)


def test_the_shelf_keeps_what_admissible_rollouts_may_be_of(tmp_path: Path):
    shelf = sink(tmp_path, job(), keep=3)
    for version in (0, 2, 4, 6):
        shelf.publish(version, {"w": torch.full((64,), float(version))})
    assert shelf.weights(0) is None
    assert [float(shelf.weights(v)["w"][0]) for v in (2, 4, 6)] == [2, 4, 6]  # type: ignore[index]
    assert [v for v in range(9) if shelf.never_published(v)] == [1, 3, 5]
    again = sink(tmp_path, job(), keep=3)
    assert not any(again.never_published(v) for v in range(9)), "another process published those"
    assert again.weights(4) is not None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5),
        ({"staleness_budget": 1}, 3),
        ({"publish_period": 2}, 3),
        ({"staleness_budget": 2}, 4),
        ({"staleness_budget": 6, "publish_period": 2}, 5),
        ({"staleness_budget": 1000, "publish_period": 1}, MOST),
        ({"staleness": {"max": 8, "adaptive": True}}, 10),
        ({"staleness": {"max": 1, "adaptive": True}}, 3),
        ({"trust": {"probation": 0, "audit_share": 0, "each_version": False}}, 2),
    ],
)
def test_how_many_versions_are_kept(changes, expected: int):
    assert kept(job(**changes)) == expected


class Two(Alone):
    """Rank 0 of two."""

    size = 2


def test_where_audits_compute(monkeypatch: pytest.MonkeyPatch):
    assert audit_device("cpu", ALONE) == CPU
    for number in (torch.cuda.device_count(), 63):
        with pytest.raises(BadInput, match="ECHO2_LEARNER_AUDIT_DEVICE"):
            audit_device(f"cuda:{number}", ALONE)
    for there, alone in ((False, CPU), (True, torch.device("cuda"))):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert audit_device("", Two()) == CPU, "of a model that is spread over several GPUs none has the room for sure"
        assert audit_device("", ALONE) == alone
