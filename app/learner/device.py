"""What goes between host memory and a GPU, and what time it is there.

Invariant: nothing here makes the host wait for the GPU but `host_copies`, which is for a thread of its own, and the
function that says how much time passed. What is on the CPU is copied plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from app.learner.parallel.shards import local

STAGE_BYTES = 32 << 20
"""Page-locked memory that a copy goes through, twice: a GPU writes to it without the CPU, several times as fast."""
Stopwatch = tuple[Callable[[], Any], Callable[[Any, Any], float]]


def stopwatch(device: torch.device, clock: Callable[[], float]) -> Stopwatch:
    """What marks a moment, and the seconds between two marks.

    On a GPU a moment is when it has done what it was given so far; nobody waits for it until the seconds are asked for.
    """
    if device.type != "cuda":
        return clock, lambda before, after: after - before
    return lambda: moment(device), _seconds


def moment(device: torch.device) -> Any:
    """An event that happens when a GPU has done all that it was given; None for a CPU, which has."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(before: Any, after: Any) -> float:
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device; the host goes on while it is under way."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def host_copies(tensors: Mapping[str, torch.Tensor], after: Any) -> dict[str, torch.Tensor]:
    """Copies in host memory, whole on one rank, of what there is after `moment`. Nobody may change it meanwhile.

    A GPU makes them beside what it computes, through a little page-locked memory.
    """
    tensors = {name: local(tensor.detach()) for name, tensor in tensors.items()}
    gpu = next((t.device for t in tensors.values() if t.device.type == "cuda"), None)
    if gpu is None:
        return {name: t.to("cpu", copy=True) for name, t in tensors.items()}
    copies = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
    stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    with torch.no_grad(), torch.cuda.stream(stream):
        stream.wait_event(after)
        _through(stages, pieces([(tensors[name], copies[name]) for name in tensors], STAGE_BYTES), stream)
    return copies


def pieces(pairs: list[tuple[torch.Tensor, torch.Tensor]], most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of source and target of each pair, cut where they are more than `most`."""
    for source, target in pairs:
        if source.numel():
            source_bytes, target_bytes = (t.reshape(-1).view(torch.uint8) for t in (source, target))
            yield from zip(torch.split(source_bytes, most), torch.split(target_bytes, most), strict=True)


def _through(
    stages: list[torch.Tensor], parts: Iterator[tuple[torch.Tensor, torch.Tensor]], stream: torch.cuda.Stream
) -> None:
    """While one stage is filled the other is emptied."""
    filled: list[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = []
    for number, (source, target) in enumerate(parts):
        if len(filled) == len(stages):
            _empty(*filled.pop(0))
        stage = stages[number % len(stages)][: len(source)]
        stage.copy_(source, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        filled.append((event, stage, target))
    for left in filled:
        _empty(*left)


def _empty(event: torch.cuda.Event, stage: torch.Tensor, target: torch.Tensor) -> None:
    event.synchronize()
    target.copy_(stage)
