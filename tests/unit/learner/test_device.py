"""Copies to host memory: what goes through the little page-locked memory of a GPU is whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.learner.device import host_copies, lane_of, loads, moment, sent, stopwatch

CPU = torch.device("cpu")
SIZES = st.lists(st.integers(0, 50), max_size=12)


@given(SIZES, st.integers(1, 64))
def test_loads_carry_every_byte_once_and_are_full_but_for_the_last(sizes: list[int], most: int):
    sources = [torch.arange(n, dtype=torch.float32) + 100 * i for i, n in enumerate(sizes)]
    targets = [torch.full_like(s, -1.0) for s in sources]
    turns = list(loads(list(zip(sources, targets, strict=True)), most))
    for source, target in turns:
        # What a GPU does: gather, one copy, and scatter.
        stage = torch.cat(source)
        torch._foreach_copy_(target, list(torch.split(stage, [len(t) for t in target])))
    assert all(torch.equal(s, t) for s, t in zip(sources, targets, strict=True))
    lengths = [sum(map(len, source)) for source, _ in turns]
    assert sum(lengths) == 4 * sum(sizes)
    assert all(n == most for n in lengths[:-1])
    assert all(0 < n <= most for n in lengths)


def test_a_copy_on_the_cpu_is_one():
    tensors = {"w": torch.ones(3, 4).t(), "step": torch.tensor(2.0)}
    copies = host_copies(tensors, moment(CPU), lane_of(CPU))
    for tensor in tensors.values():
        tensor.zero_()
    assert torch.equal(copies["w"], torch.ones(4, 3))
    assert copies["step"].item() == 2.0


def test_the_stopwatch_of_a_cpu_is_the_clock():
    now = [1.0]
    mark, between = stopwatch(CPU, lambda: now[0])
    before = mark()
    now[0] = 3.5
    assert between(before, mark()) == 2.5
    assert sent(torch.ones(2), CPU).tolist() == [1.0, 1.0]
