"""Size and speed of a delta between two versions of a model of SmolLM2-135M's size.

The weights are random, with the spread that such models have from tensor to tensor; the updates are those of AdamW in
its steady state on gradients that don't agree with each other (β₁ = 0.9: momentum over root of second moment has a
standard deviation of 0.23 and carries 0.9 of itself to the next step). Masters are fp32, what is published is bf16.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from app.snapshots import delta

ELEMENTS, TENSORS = 134_515_008, 272
LEARNING_RATE, STEPS_PER_PUBLISH = 1e-6, 2
MOMENTUM, SPREAD = 0.9, 0.23
ROUNDS = 2
T = TypeVar("T")


def versions(elements: int = ELEMENTS, seed: int = 7) -> tuple[bytearray, bytearray]:
    """Two bf16 payloads, one publish apart."""
    random = torch.Generator().manual_seed(seed)
    before, after = bytearray(2 * elements), bytearray(2 * elements)
    per_tensor = -(-elements // TENSORS)
    for at in range(0, elements, per_tensor):
        count = min(per_tensor, elements - at)
        scale = 0.02 * 10 ** float(torch.rand((), generator=random))
        master = torch.randn(count, generator=random) * scale
        _store(master, before, at)
        direction = torch.randn(count, generator=random) * SPREAD
        for _ in range(STEPS_PER_PUBLISH):
            fresh = torch.randn(count, generator=random) * SPREAD
            direction = MOMENTUM * direction + (1 - MOMENTUM**2) ** 0.5 * fresh
            master -= LEARNING_RATE * direction
        _store(master, after, at)
    return before, after


def measure_delta() -> dict[str, Any]:
    """Share of the full size, MB of model per second of one core, and whether every bit came back."""
    torch.set_num_threads(1)
    base, new = versions()
    made, encode_s = _timed(lambda: delta.encode(base, new))
    if made is None:
        raise RuntimeError("a small change did not give a delta")
    result, decode_s = _timed(lambda: delta.apply(base, made))
    return {
        "share": round(len(made) / len(new), 5),
        "encode_MBps": round(len(new) / encode_s / 1e6),
        "decode_MBps": round(len(new) / decode_s / 1e6),
        "bit_exact": result == new,
    }


def _store(master: torch.Tensor, payload: bytearray, at: int) -> None:
    bits = master.to(torch.bfloat16).view(torch.uint8).numpy()
    payload[2 * at : 2 * at + len(bits)] = bits.tobytes()


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result and the least processor time of a few rounds."""
    spent = []
    for _ in range(ROUNDS):
        started = time.process_time()
        result = work()
        spent.append(time.process_time() - started)
    return result, min(spent)


if __name__ == "__main__":
    print(measure_delta())
