"""What hosts want more for machines that we rent at a fixed price.

Invariant: an increase changes nothing by itself: it is written down and told once; whether it is accepted is decided
where leases are held against the market.
"""

from __future__ import annotations

import logging

from sqlalchemy import select

from app.fleet.core import Core
from app.protocol.base import usd
from app.storage.models import Lease, LeaseState
from providers.base import Announcing, Billing, ProviderError

log = logging.getLogger(__name__)


async def follow(core: Core, name: str) -> None:
    """Ask a provider that announces increases, if a lease there could be meant. Trouble changes nothing."""
    provider = core.providers[name]
    if not isinstance(provider, Announcing):
        return
    fixed = select(Lease).where(
        Lease.provider == name,
        Lease.billing == Billing.ON_DEMAND.value,
        Lease.instance_id.is_not(None),
        Lease.state.in_([s for s in LeaseState if s.usable]),
    )
    async with core.db.read() as session:
        if (await session.scalars(fixed.limit(1))).first() is None:
            return
    try:
        waiting = {one.instance_id: one for one in await provider.price_increases()}
    except ProviderError as error:
        log.warning("price increases of %s can't be read: %s", name, error)
        return
    async with core.db.write() as session:
        for lease in await session.scalars(fixed):
            found = waiting.get(lease.instance_id or "")
            if found is None:
                lease.announced_micros_h = lease.announced_id = None
            elif (lease.announced_id, lease.announced_micros_h) != (found.increase_id, found.compute_micros_h):
                lease.announced_micros_h, lease.announced_id = found.compute_micros_h, found.increase_id
                core.emit(
                    session, lease.job_id, "price_increase",
                    f"{lease.gpu_name} on machine {lease.machine_id}: its host wants ${usd(found.compute_micros_h)}/h "
                    f"instead of ${usd(lease.rate_micros_h)}/h",
                    lease=lease.id,
                )  # fmt: skip
