"""Tokens that nodes sampled, and those that were of no use.

Invariant: totals of a node only grow; a token of no use is counted by the node that knows of it, or here, never by
both.
"""

from __future__ import annotations

from app.fleet.core import Core
from app.protocol.node import Heartbeat, Leave
from app.storage.models import Job, Node


def count(core: Core, node: Node, said: Heartbeat | Leave) -> None:
    """A node's totals; what they grew by goes into the metrics."""
    metrics, known = core.metrics, node.tokens_wasted
    generated = max(node.tokens_generated, said.tokens_generated)
    wasted = {**known, **{str(r): max(n, int(known.get(r, 0))) for r, n in said.tokens_wasted.items()}}
    metrics.tokens_generated.labels(node.job_id).inc(generated - node.tokens_generated)
    for reason, total in wasted.items():
        metrics.tokens_wasted.labels(node.job_id, reason).inc(total - int(known.get(reason, 0)))
    node.tokens_generated, node.tokens_wasted = generated, wasted


def waste(core: Core, job: Job, reason: str, tokens: int) -> None:
    """Tokens of no use that no node counts."""
    if tokens > 0:
        job.tokens_wasted = {**job.tokens_wasted, reason: int(job.tokens_wasted.get(reason, 0)) + tokens}
        core.metrics.tokens_wasted.labels(job.id, reason).inc(tokens)


def reckon(core: Core, job: Job, reason: str, samples: float) -> None:
    """Samples of no use whose tokens nobody has counted: by the mean length of the job's; nothing before the first."""
    waste(core, job, reason, round(samples * (job.length_mean or 0.0)))
