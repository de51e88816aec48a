"""How long a machine is expected to live, from how long ours did. Pure, but for `read`.

Invariant: a life that we ended ourselves counts as time without an interruption, never as one; what is known of a
machine outweighs what is known of its GPU model, that what is known of its provider, and that the guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.storage.models import Lease

PRIOR_H = {True: 2.0, False: 6.0}
"""Hours until an interruption, of interruptible machines and of others, until experience says otherwise."""
LONGEST_H = 6.0
"""No lease is counted on for longer: prices move, jobs end."""
WEIGHT = 1.0
"""What is known on the level above counts like so many interruptions."""
MEMORY_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Past:
    """What leases of one kind went through."""

    hours: float
    interruptions: float

    def __add__(self, other: Past) -> Past:
        return Past(self.hours + other.hours, self.interruptions + other.interruptions)


@dataclass(frozen=True, slots=True)
class Record:
    """One machine's past."""

    provider: str
    gpu_name: str
    machine_id: str
    past: Past


def mean_life(above_h: float, past: Past | None) -> float:
    """Hours between interruptions: the level above as WEIGHT interruptions, then what was seen."""
    if past is None:
        return above_h
    return (WEIGHT * above_h + past.hours) / (WEIGHT + past.interruptions)


@dataclass(frozen=True, slots=True)
class Lives:
    """Expected lives in hours, without the host's own end."""

    prior_h: float
    providers: Mapping[str, float] = field(default_factory=dict)
    gpus: Mapping[tuple[str, str], float] = field(default_factory=dict)
    machines: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By provider and machine."""

    def of(self, provider: str, gpu_name: str, machine_id: str = "") -> float:
        """What to expect of a machine; of its GPU model where the machine is new, of its provider where that is."""
        known = self.machines.get((provider, machine_id))
        if known is None:
            known = self.gpus.get((provider, gpu_name))
        if known is None:
            known = self.providers.get(provider, self.prior_h)
        return min(known, LONGEST_H)


def learn(records: Iterable[Record], interruptible: bool) -> Lives:
    """Lives from what was gone through."""
    providers: dict[str, Past] = {}
    gpus: dict[tuple[str, str], Past] = {}
    machines: dict[tuple[str, str], tuple[str, Past]] = {}
    nothing = Past(0.0, 0.0)
    for r in records:
        providers[r.provider] = providers.get(r.provider, nothing) + r.past
        gpus[r.provider, r.gpu_name] = gpus.get((r.provider, r.gpu_name), nothing) + r.past
        one = (r.provider, r.machine_id)
        machines[one] = (r.gpu_name, machines.get(one, ("", nothing))[1] + r.past)
    prior = PRIOR_H[interruptible]
    of_provider = {name: mean_life(prior, past) for name, past in providers.items()}
    of_gpu = {key: mean_life(of_provider[key[0]], past) for key, past in gpus.items()}
    of_machine = {key: mean_life(of_gpu[key[0], gpu], past) for key, (gpu, past) in machines.items()}
    return Lives(prior, of_provider, of_gpu, of_machine)


async def read(session: AsyncSession, interruptible: bool, now: float) -> Lives:
    """From our own leases of the last month, of all jobs. A lease that never ran says nothing."""
    kinds = ["on_demand"] if not interruptible else ["spot_bid", "spot_market"]
    end = func.coalesce(Lease.ended_at, now)
    lived = func.sum(case((end > Lease.gpu_since, end - Lease.gpu_since), else_=0.0))
    rows = await session.execute(
        select(
            Lease.provider, Lease.gpu_name, Lease.machine_id, lived,
            func.sum(case((Lease.interrupted, 1), else_=0)),
        )
        .where(Lease.gpu_since.is_not(None), Lease.created_at > now - MEMORY_S, Lease.billing.in_(kinds))
        .group_by(Lease.provider, Lease.gpu_name, Lease.machine_id)
    )  # fmt: skip
    records = [
        Record(provider, gpu, machine, Past(float(seconds or 0.0) / 3600, float(cut or 0)))
        for provider, gpu, machine, seconds, cut in rows
    ]
    return learn(records, interruptible)
