"""What every adapter must say of its instances and its account; the scenarios go on from `test_conformance`.

A scenario that a provider can't have is skipped with the reason that its harness gives.
"""

from __future__ import annotations

import contextlib
import traceback
from datetime import UTC, datetime, timedelta

import pytest

from providers.base import (
    AuthError,
    CapabilityError,
    Charge,
    MalformedAnswer,
    ProviderError,
    Transient,
)

from .harness import Harness
from .steps import LABEL, OTHER, attempt, found, gone, rented

# listing


async def test_foreign_instances_are_listed_and_told_apart(h: Harness) -> None:
    foreign = await h.add_foreign("somebody-else")
    instance_id = await rented(h)
    await found(h, instance_id)
    labels = {i.instance_id: i.label for i in (await h.provider.list()).instances}
    assert labels[instance_id] == LABEL
    assert labels[foreign] != LABEL
    assert not labels[foreign].startswith("echo2:")
    await h.provider.release(instance_id)
    await gone(h, instance_id)
    assert await h.provider.get(foreign) is not None


async def test_a_listing_with_a_hole_is_never_passed_as_complete(h: Harness) -> None:
    instance_id = await rented(h)
    await found(h, instance_id)
    await h.truncate_next_listing()
    complete = False
    with contextlib.suppress(MalformedAnswer, Transient):
        complete = (await h.provider.list()).complete
    assert not complete
    await found(h, instance_id)


async def test_a_listing_that_can_t_be_read_raises(h: Harness) -> None:
    instance_id = await rented(h)
    await found(h, instance_id)
    await h.garble_next_listing()
    with pytest.raises((MalformedAnswer, Transient)):
        await h.provider.list()
    await found(h, instance_id)


# the account


async def test_the_key_shows_up_nowhere(h: Harness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    provider = h.provider
    told = [repr(provider), str(provider)]
    instance_id = await rented(h)
    await h.fail_releases(1)
    await h.garble_next_listing()
    for act in (provider.release(instance_id), provider.list()):
        try:
            await act
        except ProviderError as error:
            told += [error.raw, *traceback.format_exception(error)]
    await h.lose_next_create(created=False)
    lost = (await attempt(h, OTHER)).error
    assert lost is not None
    told += [repr(lost), lost.raw, *traceback.format_exception(lost)]
    try:
        await h.with_wrong_key().list()
    except AuthError as error:
        told += [error.raw, *traceback.format_exception(error)]
    assert h.secret not in "\n".join([*told, caplog.text])


async def test_the_balance_is_told_where_the_account_is_prepaid(h: Harness) -> None:
    if not h.provider.caps.prepaid:
        with pytest.raises(CapabilityError):
            await h.provider.balance()
        return
    assert (await h.provider.balance()).credit_micros > 0
    with pytest.raises(AuthError):
        await h.with_wrong_key().balance()


async def test_charges_are_of_our_instances_and_positive(h: Harness) -> None:
    instance_id = await rented(h)
    await found(h, instance_id)
    charges = await h.provider.charges(datetime.now(UTC) - timedelta(hours=1))
    assert all(isinstance(c, Charge) and c.micros >= 0 and c.start <= c.end for c in charges)
    assert {c.provider for c in charges} <= {h.provider.name}
    assert {c.instance_id for c in charges} <= {instance_id}
