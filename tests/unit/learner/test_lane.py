"""What a GPU is asked to do for a copy, on one that is made up: it runs ahead, or lags behind, as far as it may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.learner.device import host_copies
from app.learner.trainer import GRPOTrainer
from tests.unit.learner.samples import batch, job, random_model


class Mark:
    """Comes when a GPU has done so many things."""

    def __init__(self, gpu: FakeGpu, count: int) -> None:
        self._gpu, self._count = gpu, count

    def synchronize(self) -> None:
        self._gpu.go_on(self._count - self._gpu.done)


class FakeGpu:
    """Does what it is given, in order: what somebody waits for, and with each new thing as many as `eager` says."""

    device = torch.device("cpu")

    def __init__(self, eager: Iterator[int]) -> None:
        self._eager = eager
        self._given: deque[Callable[[], object]] = deque()
        self._count = 0
        self.done = 0
        self.stages: list[torch.Tensor] = []
        self.bytes = 0

    def go_on(self, things: int) -> None:
        for _ in range(min(things, len(self._given))):
            self._given.popleft()()
            self.done += 1

    def work(self) -> AbstractContextManager[object]:
        return nullcontext()

    def after(self, moment: Callable[[], object] | None) -> None:
        self._give(moment or (lambda: None))

    def stage(self, size: int) -> torch.Tensor:
        self.stages.append(torch.full((size,), 255, dtype=torch.uint8))
        return self.stages[-1]

    def fill(self, stage: torch.Tensor, sources: list[torch.Tensor]) -> Mark:
        self.bytes += len(stage)
        return self._give(lambda: stage.copy_(torch.cat(sources)))

    def _give(self, thing: Callable[[], object]) -> Mark:
        self._given.append(thing)
        self._count += 1
        self.go_on(next(self._eager))
        return Mark(self, self._count)


EAGER = st.lists(st.integers(0, 4), max_size=40)


def gpu(eager: list[int] | None = None) -> FakeGpu:
    return FakeGpu(chain(eager or [], repeat(0)))


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 64), EAGER)
def test_copies_are_whole_however_far_the_gpu_is_ahead_or_behind(sizes: list[int], most: int, eager: list[int]):
    lane = gpu(eager)
    tensors = {f"t{i}": torch.arange(n, dtype=torch.float32) + 1000 * i for i, n in enumerate(sizes)}
    copies = host_copies(tensors, None, lane, most)
    assert list(copies) == list(tensors)
    assert all(torch.equal(copies[name], t) for name, t in tensors.items())
    assert all(copies[name].data_ptr() != t.data_ptr() for name, t in tensors.items() if len(t))
    assert len(lane.stages) <= 2
    assert sum(map(len, lane.stages)) <= 2 * most


@pytest.mark.parametrize("eager", [[], [9] * 9])
def test_what_is_copied_is_what_there_is_after_the_moment(eager: list[int]):
    weights = torch.zeros(5)
    # The optimizer's kernel has been launched and has not run yet.
    copies = host_copies({"w": weights, "t": weights.view(5, 1).t()}, lambda: weights.add_(1), gpu(eager), 8)
    assert copies["w"].tolist() == [1.0] * 5
    assert copies["t"].tolist() == [[1.0] * 5]


@pytest.mark.parametrize("eager", [[], [1, 0, 2] * 200])
def test_a_step_does_not_touch_what_a_lagging_gpu_still_copies(eager: list[int]):
    trainer = GRPOTrainer(random_model(), job(), lane=gpu(eager))
    for number in range(3):
        wanted, got = trainer.state(), trainer.snapshot()
        trainer.step(batch(number))
        assert all(torch.equal(got.weights[n], t) for n, t in wanted.weights.items())
        assert got.optimizer.keys() == wanted.optimizer.keys()
        assert all(torch.equal(got.optimizer[n], t) for n, t in wanted.optimizer.items())


def test_a_publish_without_a_checkpoint_copies_the_weights_alone():
    lane = gpu()
    trainer = GRPOTrainer(random_model(), job(), lane=lane)
    trainer.step(batch(0))
    state = trainer.snapshot(optimizer=False)
    wanted = trainer.weights()
    assert all(torch.equal(state.weights[n], t) for n, t in wanted.items())
    assert state.optimizer == {}
    assert lane.bytes == sum(t.nbytes for t in wanted.values())
