"""Steps that the scenarios share: rent, find, see gone.

Invariant: a step that waits polls with a deadline, and "gone" means that both reads of the adapter say so.
"""

from __future__ import annotations

import os

from providers.base import Instance, Offer, Phase, Provider, RentResult

from .harness import Harness, until

FLEET = f"conf{os.getpid()}"
"""Of this process alone: static machines all run here, and an instance's id follows from its label."""
LABEL = f"echo2:{FLEET}:lease:1"
OTHER = f"echo2:{FLEET}:lease:2"
GONE_PHASES = (Phase.PAUSED, Phase.FAILED, Phase.TERMINATING)


async def offers(h: Harness) -> list[Offer]:
    found = await h.provider.search(h.query())
    assert len(found) >= 2
    return found


async def attempt(h: Harness, label: str = LABEL) -> RentResult:
    """One rent of the first offer."""
    offer = (await offers(h))[0]
    return await h.provider.rent(offer, h.spec(offer, label))


async def rented(h: Harness, label: str = LABEL) -> str:
    """An instance that exists; its id."""
    result = await attempt(h, label)
    assert result.outcome == "created", result.error
    assert result.instance_id is not None
    assert result.doomed_id is None
    return result.instance_id


async def labelled(provider: Provider, label: str = LABEL) -> list[Instance]:
    """What a complete listing shows under a label."""
    listing = await provider.list()
    assert listing.complete
    return [i for i in listing.instances if i.label == label and i.phase is not Phase.TERMINATING]


async def found(h: Harness, instance_id: str, label: str = LABEL) -> Instance:
    """Wait until the list shows the instance under its label."""
    rows = await until(lambda: labelled(h.provider, label), bool, f"{label} in the list")
    assert [i.instance_id for i in rows] == [instance_id]
    return rows[0]


async def gone(h: Harness, instance_id: str) -> None:
    """Wait until both reads say that it is gone, or on its way out."""

    async def one() -> bool:
        instance = await h.provider.get(instance_id)
        return instance is None or instance.phase is Phase.TERMINATING

    await until(one, bool, "get without the instance")
    await until(lambda: labelled(h.provider), lambda rows: not rows, "a list without the instance")
