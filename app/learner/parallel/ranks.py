"""The ranks of a learner and what passes between them.

Invariant: rank 0 alone decides and talks to the control service; the others do what it announces, in its order. What
passes is tensors, JSON and Parquet, never pickle. Nobody waits for ever: a rank that hears nothing of rank 0, or whose
collective finds no partner, ends with an error within the timeouts.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from app.protocol.errors import Unavailable

log = logging.getLogger(__name__)
BEAT_S = 2.0
SILENCE_S = 120.0
"""Without a sign of life of rank 0 for so long, the others end."""
_LOOK_S = 5.0
Op = Literal["load", "rehearse", "step", "state", "weights", "restore", "sample", "end"]


@dataclass(frozen=True, slots=True)
class Command:
    """What rank 0 wants of the others."""

    op: Op
    payload: bytes = b""


class Ranks(Protocol):
    """All but `rank` and `size` are collective: every rank calls the same ones in the same order."""

    rank: int
    size: int

    def announce(self, op: Op, payload: bytes = b"") -> None:
        """Rank 0 tells the others what comes next; nothing on other ranks."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64."""
        ...

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """1-D tensors of all ranks, of any lengths, one after the other."""
        ...

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values; shape and dtype must be those of all."""
        ...


class Alone:
    """One process."""

    rank = 0
    size = 1

    def announce(self, op: Op, payload: bytes = b"") -> None:
        """There is nobody to tell."""

    def total(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor


ALONE = Alone()


class Group:
    """The processes of torch's default process group, which must be there.

    `look_s`: how often a rank that waits looks whether rank 0 lives. Announcements go through `store`, so that the
    others may wait for the next one for hours; collectives have the timeout of the process group.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        silence_s: float = SILENCE_S,
        look_s: float = _LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._silence_s = silence_s
        self._look_s = look_s
        self._clock = clock
        self._count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ranks", daemon=True)
        if rank == 0:
            store.set("alive", "0")
            self._thread.start()

    def announce(self, op: Op, payload: bytes = b"") -> None:
        """Rank 0: one announcement. Raises Unavailable if the others can't be reached."""
        if self.rank != 0:
            return
        try:
            self._store.set(f"command/{self._count}", json.dumps({"op": op, "bytes": len(payload)}))
            # Not the last one yet: who joins in its work by receiving alone may be late to read it.
            if self._count > 1:
                self._store.delete_key(f"command/{self._count - 2}")
        except dist.DistError as error:
            raise Unavailable(f"the other ranks can't be told to {op}: {error}"[:500]) from error
        self._count += 1
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)

    def listen(self) -> Command:
        """The others: the next announcement. Raises Unavailable when rank 0 is silent for too long, or gone."""
        key, mark, since = f"command/{self._count}", b"", self._clock()
        try:
            while not self._there(key):
                alive = self._store.get("alive")
                if alive != mark:
                    mark, since = alive, self._clock()
                elif self._clock() - since > self._silence_s:
                    raise Unavailable(f"rank 0 has been silent for {self._silence_s:.0f} s")
            said = json.loads(self._store.get(key))
        except dist.DistError as error:
            raise Unavailable(f"rank 0 is gone: {error}"[:500]) from error
        self._count += 1
        payload = torch.zeros(said["bytes"], dtype=torch.uint8)
        if len(payload):
            dist.broadcast(payload, 0)
        # An announcement is deleted when the second after it is made: by then all have joined in the work of the next.
        return Command(said["op"], payload.numpy().tobytes())

    def close(self, timeout_s: float = 5.0) -> None:
        """Give no more signs of life: a thread that still talks to the store when the process ends takes it down."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """1-D tensors of all ranks, one after the other."""
        flat = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(flat)
        dist.all_reduce(sizes)
        padded = flat.new_zeros(int(sizes.max()))
        padded[: len(flat)] = flat
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)])
        return whole.to(tensor.dtype)

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place where it can be."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, 0)
        return tensor

    def _there(self, key: str) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=self._look_s))
        except dist.DistStoreError:
            return False
        return True

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(BEAT_S):
            count += 1
            try:
                self._store.set("alive", str(count))
            except dist.DistError as error:
                log.warning("the other ranks can't be reached: %s", error)
                return
