"""From torchrun's environment to ranks.

Invariant: a process that torchrun did not start is alone; one that it started has a process group with a timeout, and
a GPU of its own if there are any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from app.learner.parallel.ranks import ALONE, Group, Ranks
from app.protocol.errors import BadInput, Unavailable


def backend() -> str:
    """NCCL between GPUs and gloo for what lies in host memory; gloo alone without a GPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def launch(timeout_s: float, environ: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks that torchrun started this process with. Raises BadInput for half an environment, Unavailable."""
    size = int(environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise BadInput(f"WORLD_SIZE is {size} but {', '.join(missing)} is not set; start the learner with torchrun")
    local = int(environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise BadInput(f"rank {environ['RANK']} has no GPU: lower torchrun's --nproc-per-node")
        torch.cuda.set_device(local)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        dist.init_process_group(
            backend(),
            store=PrefixStore("groups", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        made = Group(PrefixStore("learner", store), rank=rank, size=size)
        # Nobody looks for rank 0's sign of life before it is there.
        made.total([1.0])
    except dist.DistError as error:
        raise Unavailable(f"the ranks did not find each other within {timeout_s:.0f} s: {error}"[:500]) from error
    return made


def alone() -> None:
    """A process group of one, which sharding needs; nothing if there is a process group."""
    if not dist.is_initialized():
        dist.init_process_group(
            backend(),
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )


def leave(ranks: Ranks, *, in_order: bool = True) -> None:
    """The end of this process's work. `in_order`: all ranks have come to their end, so that none waits for another."""
    if isinstance(ranks, Group):
        ranks.close()
    if in_order and dist.is_initialized():
        dist.destroy_process_group()
