"""Copies of tensors that are made beside the training.

Invariant: what is copied is not changed until the copy is whole, as long as its owner calls `settle` before any change;
who reads a copy waits for it. So a step pays for a copy only where that takes longer than forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from app.protocol.errors import LearnerError

PATIENCE_S = 600.0
Tensors = Mapping[str, torch.Tensor]


class Later(Mapping[str, torch.Tensor]):
    """Tensors of a copy that may still be under way: the first look waits for it. Thread-safe."""

    def __init__(self, copy: Future[Tensors]) -> None:
        self._copy = copy

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._whole()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())

    def _whole(self) -> Tensors:
        return _result(self._copy)

    def __del__(self) -> None:
        # One by one: giving gigabytes back takes a while, and no other thread may run Python during any one of them.
        copy = self._copy
        made = copy.result() if copy.done() and not copy.cancelled() and copy.exception() is None else None
        while isinstance(made, dict) and made:
            made.popitem()


class Copier:
    """A thread for each copy; `begin` and `settle` are for the thread that owns the tensors."""

    def __init__(self) -> None:
        self._running: list[Future[Tensors]] = []

    def begin(self, *makes: Callable[[], Tensors]) -> list[Later]:
        """Start to copy, after what was begun before; each function returns tensors of its own."""
        self.settle()
        thread = ThreadPoolExecutor(1, thread_name_prefix="copier")
        self._running = [thread.submit(make) for make in makes]
        # Ends by itself when it has done that.
        thread.shutdown(wait=False)
        return [Later(copy) for copy in self._running]

    def settle(self) -> None:
        """Wait until what was begun is whole. Raises what copying raised, LearnerError after ten minutes."""
        running, self._running = self._running, []
        for copy in running:
            _result(copy)


def _result(copy: Future[Tensors]) -> Tensors:
    try:
        return copy.result(PATIENCE_S)
    except TimeoutError as error:
        raise LearnerError(f"copying the weights was not done within {PATIENCE_S:.0f} s") from error
