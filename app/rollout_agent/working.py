"""A node's worker and the host of its engine, put together by the kind of engine.

Invariant: an engine that samples batches gets the batch worker, one that streams the continuous worker; nobody else has
to know which it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from app.open_files import open_files
from app.protocol.errors import EchoError
from app.protocol.node import Directives, JoinAnswer
from app.rollout_agent.client import NodeClient
from app.rollout_agent.delivery import Delivery
from app.rollout_agent.engines.base import Engine, StreamEngine
from app.rollout_agent.engines.registry import is_stream
from app.rollout_agent.faults import Faults
from app.rollout_agent.flow import Filling, most_samples
from app.rollout_agent.hosting import BatchHost, StreamHost
from app.rollout_agent.leasing import WorkSource
from app.rollout_agent.ledger import WorkerFault, WorkLedger
from app.rollout_agent.partials import Partials
from app.rollout_agent.sampling import Sampler
from app.rollout_agent.stream import StreamWorker
from app.rollout_agent.task_side import score_threads
from app.rollout_agent.text_side import TextSide
from app.rollout_agent.worker import Worker


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker is made of, besides its engine. `version`: installed last; `clock`: monotonic seconds.

    `engine_pool` has one thread: the engine's, or, where that needs none, the one in which prompts are made into
    tokens, so that no slow reward is in their way.
    """

    joined: JoinAnswer
    client: NodeClient
    ledger: WorkLedger
    faults: Faults
    engine_pool: Executor
    score_pool: Executor
    version: Callable[[], int | None]
    directives: Callable[[], Directives]
    clock: Callable[[], float] = time.monotonic
    vocabulary: Callable[[], int | None] = lambda: None
    """How many tokens the model knows."""


def make_host(engine: Engine | StreamEngine, model: Path, pool: Executor) -> BatchHost | StreamHost:
    """How this engine is run; `pool` has one thread, for one that is called from a thread of its own."""
    return StreamHost(engine, model) if is_stream(engine) else BatchHost(cast(Engine, engine), model, pool)


def make_worker(
    host: BatchHost | StreamHost, engine: Engine | StreamEngine, text: TextSide, parts: Parts
) -> Worker | StreamWorker:
    """The worker for this engine."""
    joined, client, ledger = parts.joined, parts.client, parts.ledger
    delivery = Delivery(
        client, text, ledger, parts.score_pool,
        max_upload_bytes=joined.max_upload_bytes, prune=joined.prune, clock=parts.clock,
    )  # fmt: skip
    source = WorkSource(client, ledger, parts.version, clock=parts.clock)
    partials = Partials(
        client,
        ledger,
        max_tokens=joined.sampling.max_tokens,
        max_upload_bytes=joined.max_upload_bytes,
        quantisation=lambda: engine.quantisation,
        oldest_admissible=lambda: parts.directives().oldest_admissible,
        vocabulary=parts.vocabulary,
        proofs=joined.proofs,
    )
    if not isinstance(host, StreamHost):
        return Worker(
            client, cast(Engine, engine), text, source, delivery, partials, ledger,
            sampling=joined.sampling, engine_pool=parts.engine_pool, clock=parts.clock,
        )  # fmt: skip
    streaming = cast(StreamEngine, engine)

    async def revive() -> None:
        await revived(host, parts.faults)

    environments = score_threads(joined.task)
    return StreamWorker(
        client, streaming, text, source, delivery, partials,
        Sampler(streaming, revive, ledger, environments=environments, clock=parts.clock), ledger,
        sampling=joined.sampling, text_pool=parts.engine_pool,
        filling=Filling(joined.group_size, most_samples(open_files())),
        oldest_admissible=lambda: parts.directives().oldest_admissible, clock=parts.clock,
    )  # fmt: skip


async def revived(host: StreamHost, faults: Faults) -> None:
    """Give an engine that died the last version back. Raises WorkerFault when that can't be done, or too often."""
    try:
        loaded = await host.revive()
    except (EchoError, RuntimeError) as error:
        detail = error.detail if isinstance(error, EchoError) else f"{type(error).__name__}: {error}"
        raise WorkerFault(f"the engine has died and can't be loaded again: {detail}"[:400]) from error
    if loaded:
        await faults.died()
