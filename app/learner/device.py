"""What goes between host memory and a GPU, and what time it is there.

Invariant: nothing here makes the host wait for the GPU but `host_copies`, which is for a thread of its own, and the
function that says how much time passed. What is on the CPU is copied plainly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from app.learner.parallel.shards import local

STAGE_BYTES = 128 << 20
"""Page-locked memory that a copy goes through, twice: a GPU writes to it without the CPU, several times as fast. Large,
because each turn takes the interpreter's lock a few times, and a training thread that launches kernels needs it."""
_STAGES = 2
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


class Mark(Protocol):
    """A moment in what a GPU does."""

    def synchronize(self) -> object:
        """Wait until it has come."""
        ...


class Lane(Protocol):
    """What a GPU does beside the passes, one thing after the other, while the host goes on."""

    device: torch.device

    def work(self) -> AbstractContextManager[object]:
        """What is done to tensors of the device inside of this is done in the lane. `after` and `fill` belong there."""
        ...

    def after(self, moment: Any) -> None:
        """Nothing that is asked for from here on begins before this moment of the passes."""
        ...

    def stage(self, size: int) -> torch.Tensor:
        """Bytes of page-locked host memory."""
        ...

    def fill(self, stage: torch.Tensor, sources: list[torch.Tensor]) -> Mark:
        """Put bytes of the device into a stage, one source after the other; the mark comes when all are there."""
        ...


class CudaLane:
    """A stream of its own. One for all copies: memory that was used in a stream is kept for that stream alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def work(self) -> AbstractContextManager[object]:
        """The stream is this thread's."""
        return torch.cuda.stream(self._stream)

    def after(self, moment: Any) -> None:
        """The stream waits for an event."""
        self._stream.wait_event(moment)

    def stage(self, size: int) -> torch.Tensor:
        """Bytes of page-locked host memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def fill(self, stage: torch.Tensor, sources: list[torch.Tensor]) -> Mark:
        """One kernel, one copy, and an event."""
        # Let go of at once: whoever gets this memory next is behind it in the same stream.
        gathered = torch.empty(len(stage), dtype=torch.uint8, device=self.device)
        torch.cat(sources, out=gathered)
        stage.copy_(gathered, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def lane_of(device: torch.device) -> Lane | None:
    """A new lane of a GPU; None for a CPU, which needs none."""
    return CudaLane(device) if device.type == "cuda" else None


@torch.no_grad()
def host_copies(
    tensors: Mapping[str, torch.Tensor], after: Any, lane: Lane | None, stage_bytes: int = STAGE_BYTES
) -> dict[str, torch.Tensor]:
    """Copies in host memory, whole on one rank, of what there is after a `moment`. They are whole when this returns;
    until then nobody may change what is copied.

    What is on the lane's device goes beside what that computes, through a little page-locked memory.
    """
    tensors = {name: local(tensor.detach()) for name, tensor in tensors.items()}
    if lane is None:
        return {name: t.to("cpu", copy=True) for name, t in tensors.items()}
    # AdamW counts its steps on the CPU.
    there = {name: t for name, t in tensors.items() if t.device.type == lane.device.type}
    copies = {n: torch.empty(t.shape, dtype=t.dtype) if n in there else t.clone() for n, t in tensors.items()}
    size = min(stage_bytes, sum(t.nbytes for t in there.values()))
    with lane.work():
        lane.after(after)
        _through(loads([(t, copies[name]) for name, t in there.items()], stage_bytes), lane, size)
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


def _through(turns: Iterable[Load], lane: Lane, size: int) -> None:
    """While one stage is filled the other is emptied; none is filled again before it was."""
    stages: list[torch.Tensor] = []
    filled: deque[tuple[Mark, torch.Tensor, list[torch.Tensor]]] = deque()
    for number, (sources, targets) in enumerate(turns):
        if len(filled) == _STAGES:
            _empty(*filled.popleft())
        if len(stages) < _STAGES:
            stages.append(lane.stage(size))
        stage = stages[number % _STAGES][: sum(map(len, sources))]
        filled.append((lane.fill(stage, sources), stage, targets))
    while filled:
        _empty(*filled.popleft())


def _empty(mark: Mark, stage: torch.Tensor, targets: list[torch.Tensor]) -> None:
    mark.synchronize()
    torch._foreach_copy_(targets, list(torch.split(stage, [len(t) for t in targets])))
