"""The watch over a node's generation, made for its kind of engine.

Invariant: an engine that streams is asked whether it lives, and can be restarted; one that is called from a thread of
the agent can be neither.
"""

from __future__ import annotations

from collections.abc import Callable

from app.rollout_agent import selftest
from app.rollout_agent.engines.base import Engine, StreamEngine
from app.rollout_agent.engines.registry import is_stream
from app.rollout_agent.faults import Faults
from app.rollout_agent.hosting import BatchHost, StreamHost
from app.rollout_agent.measure import Rates
from app.rollout_agent.stalls import StallWatch
from app.rollout_agent.stream import StreamWorker
from app.rollout_agent.worker import Worker


def watch_of(
    worker: Worker | StreamWorker, host: BatchHost | StreamHost, engine: Engine | StreamEngine, faults: Faults, *,
    probe: Callable[[], Rates | None], max_tokens: int, clock: Callable[[], float],
) -> StallWatch:  # fmt: skip
    """`probe`: what the self-test found; `clock`: monotonic seconds."""

    def usual_s() -> float | None:
        recent = worker.meter.usual_s if isinstance(worker, Worker) else None
        return selftest.usual_s(probe(), recent, max_tokens=max_tokens)

    def between_s() -> float | None:
        # What can't be asked is not judged by it: the longest batch may be much longer than the last ones.
        return worker.meter.usual_s if isinstance(worker, StreamWorker) else None

    return StallWatch(
        stalled_s=lambda: worker.stalled_s,
        usual_s=usual_s,
        between_s=between_s,
        healthy=engine.healthy if is_stream(engine) else None,
        restart=host.restart if isinstance(host, StreamHost) else None,
        report=faults.hung,
        swapping=lambda: isinstance(host, StreamHost) and host.swapping,
        clock=clock,
    )
