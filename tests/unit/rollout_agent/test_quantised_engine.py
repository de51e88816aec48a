"""A quantised snapshot in an engine: the log-probs that a node records are those of the policy that it samples from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.protocol import trajectory
from app.protocol.job import SamplingSpec
from app.protocol.work import UploadSlot, WorkItem
from app.rollout_agent.batch import sample
from app.rollout_agent.engines.base import Completion, GenRequest, Tainted
from app.rollout_agent.engines.check import check_loaded
from app.rollout_agent.engines.paced import PacedEngine
from app.rollout_agent.engines.transformers import TransformersEngine
from app.rollout_agent.files import to_file
from app.rollout_agent.groups import Batch
from app.snapshots import Snapshot, quantise
from app.snapshots.codec import decode
from app.snapshots.manifest import new_key
from app.tasks.base import Prompt
from tests.unit.rollout_agent.tiny import make_model, new_store, write_model_files

torch.set_num_threads(1)
PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 80, 90, 100], [11]]


@pytest.fixture(autouse=True)
def small_matrices_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "LEAST_ELEMENTS", 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_files(tmp_path / "model")


@pytest.fixture
def snapshot(folder: Path, tmp_path: Path) -> Snapshot:
    key = new_key()
    store = new_store(tmp_path / "snapshots", key)
    state = make_model(folder, seed=0).state_dict()
    return store.publish(state, version=3, key=key, quantise="int8").snapshot


class OnePrompt:
    """The text side of a task with one prompt."""

    def encode(self, items: Sequence[WorkItem]) -> tuple[list[Prompt], list[list[int]]]:
        return [Prompt(0, "", {}) for _ in items], [[10, 20] for _ in items]

    def answer(self, prompt: Prompt, max_tokens: int) -> Callable[[Completion], Completion]:
        return lambda episode: episode


def installed(folder: Path, snapshot: Snapshot) -> TransformersEngine:
    engine = TransformersEngine(threads=1)
    engine.load(folder)
    engine.install(snapshot.payload_path, snapshot.manifest, snapshot.version)
    return engine


def forced(model: Any, prompt: list[int], completion: Completion) -> list[float]:
    """Log-probs by one forward pass without a cache, as the learner makes it."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0], dim=-1)
    start = len(prompt) - 1
    return [float(logprobs[start + i, token]) for i, token in enumerate(completion.token_ids)]


def test_logprobs_are_those_of_the_restored_weights_and_not_of_the_learners(folder: Path, snapshot: Snapshot) -> None:
    engine = installed(folder, snapshot)
    assert sum(t.dtype == "I8" for t in snapshot.manifest.tensors) == 14, "two layers of seven matrices"
    made = engine.generate([GenRequest(p, 4, i, SamplingSpec(max_tokens=12)) for i, p in enumerate(PROMPTS)])
    policy, restored = make_model(folder, seed=0), make_model(folder, seed=1)
    restored.load_state_dict({n: t.float() for n, t in decode(snapshot.payload_path).items()})
    apart = 0.0
    for i, completion in enumerate(made):
        prompt = PROMPTS[i // 4]
        assert completion.logprobs == pytest.approx(forced(restored, prompt, completion), abs=1e-5)
        own = forced(policy, prompt, completion)
        apart = max(apart, *(abs(a - b) for a, b in zip(completion.logprobs, own, strict=True)))
    assert apart > 1e-2, "the quantised policy is another one, and its log-probs say so"


def test_the_file_says_what_was_sampled_from(folder: Path, snapshot: Snapshot) -> None:
    engine = PacedEngine(installed(folder, snapshot), 1e6)
    assert engine.quantisation == "int8"
    item = WorkItem(id="w", prompt_index=0, group_size=1, seed=0, deadline_s=60)
    batch = Batch([item], UploadSlot(key="k", url="http://x"), {"w": 1.0})
    sampled = sample(engine, OnePrompt(), batch, SamplingSpec(max_tokens=4))  # type: ignore[arg-type]
    table = trajectory.read_table(to_file(sampled.groups, {"w": [1.0]}, "k").data)
    assert trajectory.quantisation(table) == "int8"
    assert table.schema.metadata[b"echo2.trajectory"] == b"2"
    plain = to_file([replace(sampled.groups[0], quantisation=None)], {"w": [1.0]}, "k").data
    assert trajectory.quantisation(trajectory.read_table(plain)) is None


def one_bit(tensor: torch.Tensor) -> None:
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.view(-1).view(kind)[5] ^= 1


def a_third_of_a_step(tensor: torch.Tensor) -> None:
    tensor.view(-1)[5] += tensor[0].abs().max() / 127 / 3


def two_rows_changed_places(tensor: torch.Tensor) -> None:
    tensor[[0, 1]] = tensor[[1, 0]].clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("harm", [one_bit, a_third_of_a_step, two_rows_changed_places])
@pytest.mark.parametrize("kind", ["I8", "BF16"])
def test_a_wrong_tensor_is_found_whatever_it_was_stored_as(
    harm: Callable[[torch.Tensor], None], dtype: torch.dtype, kind: str, snapshot: Snapshot
) -> None:
    weights = {n: t.to(dtype, copy=True) for n, t in decode(snapshot.payload_path, dtype).items()}
    check_loaded(snapshot.payload_path, snapshot.manifest, weights)
    name = next(t.name for t in snapshot.manifest.tensors if t.dtype == kind and len(t.shape) == 2)
    harm(weights[name])
    with pytest.raises(Tainted, match="v3"):
        check_loaded(snapshot.payload_path, snapshot.manifest, weights)


def test_a_file_whose_scales_were_changed_is_found(snapshot: Snapshot, tmp_path: Path) -> None:
    scales = next(t for t in snapshot.manifest.tensors if t.dtype == "F32")
    data = bytearray(snapshot.payload_path.read_bytes())
    data[scales.begin] ^= 1
    (tmp_path / "changed").write_bytes(data)
    with pytest.raises(Tainted):
        check_loaded(tmp_path / "changed", snapshot.manifest, decode(tmp_path / "changed"))


def test_plain_and_quantised_versions_follow_each_other(folder: Path, snapshot: Snapshot, tmp_path: Path) -> None:
    engine = installed(folder, snapshot)
    key = new_key()
    plain = new_store(tmp_path / "plain", key).publish_full(make_model(folder, seed=2).state_dict(), version=4, key=key)
    engine.install(plain.payload_path, plain.manifest, 4)
    marks = [engine.quantisation]
    engine.install(snapshot.payload_path, snapshot.manifest, 3)
    assert [*marks, engine.quantisation] == [None, "int8"]
