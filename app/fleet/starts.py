"""A machine's start on its lease: what it told of it, whether it is late, whether it is what was rented.

Invariant: `late` is the one place where a start's time runs out, before the join and after it.
"""

from __future__ import annotations

from app.fleet import model_files, phases
from app.fleet.bootstrap import OWN_MACHINES
from app.fleet.phases import Standing
from app.protocol.node import NodeState
from app.protocol.startup import MachineFacts, StartPhase, StartProgress
from app.storage.models import Job, Lease, Node

ENOUGH_MEMORY = 0.9
"""Share of the promised GPU memory that must be there: ECC and the driver keep some, and MB are not always the same."""
MODEL_BYTES = 2
"""Of each parameter: bf16."""


def standing(lease: Lease) -> Standing | None:
    """Where the start of a lease stands; None while its machine has told nothing."""
    if lease.phase is None or lease.phase_since is None or lease.phase_moved_at is None:
        return None
    return Standing(
        StartPhase(lease.phase), lease.phase_since, lease.phase_moved_at, lease.phase_have, lease.phase_total,
        lease.phase_detail,
    )  # fmt: skip


def take(lease: Lease, told: StartProgress, now: float) -> None:
    """Write down what a machine told of its start."""
    at = phases.advance(standing(lease), told, now)
    lease.phase, lease.phase_since, lease.phase_moved_at = at.phase, at.since, at.moved_at
    lease.phase_have, lease.phase_total, lease.phase_detail = at.have, at.total, at.detail


def late_machine(lease: Lease, now: float, join_s: float, listening_since: float = 0.0) -> str:
    """Why a machine whose node has not joined is given up at `now`; empty while it is in time."""
    at = standing(lease)
    if at is None:
        age = now - lease.created_at
        return f"no node joined within {age:.0f} s" if age > join_s else ""
    return _late(at, now, lease.created_at, join_s, listening_since)


def late_node(lease: Lease, node: Node, job: Job, now: float, join_s: float, listening_since: float = 0.0) -> str:
    """Why a node that does not work yet is given up at `now`; empty while it is in time, or works."""
    if node.state not in (NodeState.JOINING, NodeState.WARMING):
        return ""
    at = standing(lease)
    if at is None:
        age = now - node.joined_at
        return f"joined {age:.0f} s ago and does not work yet" if age > join_s else ""
    model = MODEL_BYTES * (job.parameters or 0)
    fetching = at.phase is StartPhase.FETCHING
    waits = model_files.coming(job.assets) if fetching else job.published_version is None
    return _late(at, now, node.joined_at, join_s, listening_since, model, waits)


def _late(
    at: Standing, now: float, began: float, join_s: float, since: float, model_bytes: int = 0, waits: bool = False
) -> str:
    if at.phase is StartPhase.ACTIVE:
        # Its own word, which costs it nothing: whoever is asked about here does not work yet.
        age = now - max(at.since, since)
        late = age > join_s or now - max(began, since) > phases.PATIENCE * join_s
        return f"said {age:.0f} s ago that it is active, and does not work" if late else ""
    # While nobody listened nothing could be seen to move.
    seen = Standing(at.phase, at.since, max(at.moved_at, since), at.have, at.total, at.detail)
    return phases.stuck(seen, now, began=max(began, since), join_s=join_s, model_bytes=model_bytes, waits=waits)


def shortfall(lease: Lease, facts: MachineFacts | None) -> str:
    """What a machine lacks of what was rented; empty if it lacks nothing, tells nothing, or is the user's own."""
    if facts is None or lease.provider in OWN_MACHINES:
        return ""
    found = f"{len(facts.gpus)} × {facts.gpus[0].name}" if facts.gpus else "none that its driver shows"
    if len(facts.gpus) < lease.num_gpus:
        return f"rented {lease.num_gpus} × {lease.gpu_name}, found {found}"
    least = min((gpu.memory_bytes for gpu in facts.gpus), default=0)
    if least < ENOUGH_MEMORY * lease.gpu_ram_mb * 1e6:
        return f"rented GPUs of {lease.gpu_ram_mb / 1e3:.1f} GB, found one of {least / 1e9:.1f} GB ({found})"
    return ""


def damage(facts: MachineFacts | None) -> str:
    """Errors that a machine's GPUs count; empty if there are none."""
    counted = [(i, gpu.ecc_errors) for i, gpu in enumerate(facts.gpus) if gpu.ecc_errors] if facts else []
    return ", ".join(f"GPU {i}: {count} uncorrected memory errors" for i, count in counted)
