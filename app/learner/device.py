"""What goes between host memory and a GPU, and what time it is there.

Invariant: nothing here makes the host wait for the GPU but `host_copies`, which is for a thread of its own, and the
function that says how much time passed. What is on the CPU is copied plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from app.learner.parallel.shards import local

STAGE_BYTES = 128 << 20
"""Page-locked memory that a copy goes through, twice: a GPU writes to it without the CPU, several times as fast. Large,
because each turn takes the interpreter's lock a few times, and a training thread that launches kernels needs it."""
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
    here = {name: t for name, t in tensors.items() if t.device.type == "cpu"}
    copies = {name: t.clone() if name in here else torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
    with torch.no_grad(), torch.cuda.stream(stream):
        stream.wait_event(after)
        pairs = [(t, copies[name]) for name, t in tensors.items() if name not in here]
        _through(list(loads(pairs, STAGE_BYTES)), gpu, stream)
    return copies


Load = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Bytes of sources, and where they belong."""


def loads(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], most: int) -> Iterator[Load]:
    """The bytes of source and target of each pair, cut and put together so that a load has at most `most`. Pure."""
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    room = most
    for source, target in pairs:
        left = [t.reshape(-1).view(torch.uint8) for t in (source, target)]
        while len(left[0]):
            size = min(room, len(left[0]))
            sources.append(left[0][:size])
            targets.append(left[1][:size])
            left = [t[size:] for t in left]
            room -= size
            if room == 0:
                yield sources, targets
                sources, targets, room = [], [], most
    if sources:
        yield sources, targets


def _through(turns: Sequence[Load], gpu: torch.device, stream: torch.cuda.Stream) -> None:
    """While one stage is filled the other is emptied."""
    size = min(STAGE_BYTES, max((sum(map(len, sources)) for sources, _ in turns), default=0))
    gathered = torch.empty(size, dtype=torch.uint8, device=gpu)
    stages = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    filled: list[tuple[torch.cuda.Event, torch.Tensor, list[torch.Tensor]]] = []
    for number, (sources, targets) in enumerate(turns):
        if len(filled) == len(stages):
            _empty(*filled.pop(0))
        length = sum(map(len, sources))
        stage = stages[number % len(stages)][:length]
        torch.cat(sources, out=gathered[:length])
        stage.copy_(gathered[:length], non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        filled.append((event, stage, targets))
    for left in filled:
        _empty(*left)


def _empty(event: torch.cuda.Event, stage: torch.Tensor, targets: list[torch.Tensor]) -> None:
    event.synchronize()
    torch._foreach_copy_(targets, list(torch.split(stage, [len(t) for t in targets])))
