"""What every adapter must do, whatever its provider: the rules of `providers.base`, one scenario a test.

A scenario that a provider can't have is skipped with the reason that its harness gives.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from providers.base import (
    AuthError,
    Billing,
    CapabilityError,
    Charge,
    Instance,
    MalformedAnswer,
    Offer,
    Phase,
    Provider,
    ProviderError,
    RentResult,
    Retry,
    Transient,
)

from .harness import UNKNOWN_GPU, Harness, Registered, registered, until

LABEL = "echo2:conf:lease:1"
GONE_PHASES = (Phase.PAUSED, Phase.FAILED, Phase.TERMINATING)
ALL = registered()


@pytest.fixture(params=ALL, ids=lambda one: one.name)
async def h(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    one: Registered = request.param
    reason = one.not_applicable.get(request.function.__name__)
    if reason is not None:
        pytest.skip(f"{one.name}: {reason}")
    async with one.open(tmp_path) as harness:
        yield harness


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_a_harness_excuses_itself_only_from_scenarios_that_exist(one: Registered) -> None:
    scenarios = {name for name in globals() if name.startswith("test_")}
    assert set(one.not_applicable) <= scenarios
    assert all(one.not_applicable.values())


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


# search


async def test_search_gives_priced_offers_of_the_mode_asked_for(h: Harness) -> None:
    query = h.query()
    for offer in await offers(h):
        assert offer.provider == h.provider.name
        assert offer.billing is query.billing
        assert offer.compute_micros_h > 0
        assert offer.num_gpus > 0
        assert offer.gpu_ram_mb > 1000
        assert offer.machine_id
        assert min(offer.disk_micros_gb_month, offer.upload_micros_gb, offer.download_micros_gb) >= 0
        assert 0 <= offer.reliability <= 1
        assert offer.fetched_at.tzinfo is not None


async def test_search_checks_every_filter_again(h: Harness) -> None:
    everything = await offers(h)
    dear = max(o.compute_micros_h for o in everything)
    name = everything[0].gpu_name
    await h.ignore_filters()
    cheap = await h.provider.search(replace(h.query(), max_compute_micros_h=dear - 1))
    assert all(o.compute_micros_h < dear for o in cheap)
    named = await h.provider.search(replace(h.query(), gpu_names=(name.replace(" ", "_").lower(),)))
    assert {o.gpu_name for o in named} == {name}
    assert await h.provider.search(replace(h.query(), min_reliability=1.01)) == []


async def test_search_keeps_a_card_that_no_table_knows(h: Harness) -> None:
    assert UNKNOWN_GPU in {o.gpu_name for o in await offers(h)}


async def test_search_raises_on_an_answer_that_can_t_be_read(h: Harness) -> None:
    await h.garble_next_search()
    with pytest.raises(MalformedAnswer):
        await h.provider.search(h.query())
    await offers(h)


# rent


async def test_rent_list_release_gone(h: Harness) -> None:
    instance_id = await rented(h)
    instance = await found(h, instance_id)
    assert (instance.provider, instance.label) == (h.provider.name, LABEL)
    assert instance.billing in (h.query().billing, None)
    assert instance.compute_micros_h is None or instance.compute_micros_h > 0
    again = await h.provider.get(instance_id)
    assert again is not None
    assert (again.instance_id, again.label, again.gpu_name) == (instance_id, LABEL, instance.gpu_name)
    await until(lambda: h.provider.get(instance_id), lambda i: i is not None and i.phase is Phase.RUNNING, "running")
    await h.provider.release(instance_id)
    await gone(h, instance_id)
    assert await h.creates() == 1


async def test_a_refused_create_leaves_nothing(h: Harness) -> None:
    await h.refuse_next_create()
    result = await attempt(h)
    assert (result.outcome, result.instance_id) == ("refused", None)
    assert isinstance(result.error, ProviderError)
    if result.doomed_id is not None:
        await h.provider.release(result.doomed_id)
    assert await labelled(h.provider) == []
    assert await h.creates() == 1
    await rented(h, "echo2:conf:lease:2")


async def test_a_create_with_a_lost_answer_is_one_request_and_is_found_by_its_label(h: Harness) -> None:
    await h.lose_next_create(created=True)
    result = await attempt(h)
    assert (result.outcome, result.instance_id) == ("unknown", None)
    assert isinstance(result.error, ProviderError)
    rows = await until(lambda: labelled(h.provider), bool, "the label in the list")
    assert len(rows) == 1
    assert await h.creates() == 1
    await h.provider.release(rows[0].instance_id)
    await gone(h, rows[0].instance_id)


async def test_a_create_that_never_arrived_is_one_request_and_proved_absent(h: Harness) -> None:
    await h.lose_next_create(created=False)
    result = await attempt(h)
    assert (result.outcome, result.instance_id) == ("unknown", None)
    assert await h.creates() == 1
    assert await labelled(h.provider) == []


async def test_a_create_carries_the_intent_s_token(h: Harness) -> None:
    assert h.provider.caps.idempotency_key
    await rented(h, LABEL)
    await rented(h, "echo2:conf:lease:2")
    tokens = await h.create_tokens()
    assert len(tokens) == 2
    assert all(tokens)
    assert tokens[0] != tokens[1]


async def test_the_same_intent_sent_twice_is_one_machine(h: Harness) -> None:
    offer = (await offers(h))[0]
    first = await h.provider.rent(offer, h.spec(offer, LABEL))
    second = await h.provider.rent(offer, h.spec(offer, LABEL))
    assert (first.outcome, second.outcome) == ("created", "created")
    assert first.instance_id == second.instance_id
    rows = await until(lambda: labelled(h.provider), bool, "the label in the list")
    assert len(rows) == 1


async def test_spot_without_support_is_refused_before_any_call(h: Harness) -> None:
    assert not h.provider.caps.spot
    offer = (await offers(h))[0]
    before = await h.calls()
    for billing in (Billing.SPOT_BID, Billing.SPOT_MARKET):
        with pytest.raises(CapabilityError):
            await h.provider.search(replace(h.query(), billing=billing))
        spot = replace(offer, billing=billing)
        with pytest.raises(CapabilityError):
            await h.provider.rent(spot, h.spec(spot, LABEL))
    assert await h.calls() == before


async def test_bids_change_only_where_there_are_bids(h: Harness) -> None:
    instance_id = await rented(h)
    if h.provider.caps.change_bid:
        await h.provider.set_bid(instance_id, 1_500_000)
        instance = await h.provider.get(instance_id)
        assert instance is not None
        assert instance.compute_micros_h == 1_500_000
        return
    before = await h.calls()
    with pytest.raises(CapabilityError):
        await h.provider.set_bid(instance_id, 1_500_000)
    assert await h.calls() == before


# what becomes of an instance


async def test_get_sees_an_instance_while_the_list_lags(h: Harness) -> None:
    await h.hide_new()
    instance_id = await rented(h)
    assert await labelled(h.provider) == []
    instance = await h.provider.get(instance_id)
    assert instance is not None
    assert instance.label == LABEL
    await h.show_new()
    await found(h, instance_id)


async def test_an_instance_that_vanished_is_gone(h: Harness) -> None:
    instance_id = await rented(h)
    await found(h, instance_id)
    await h.vanish(instance_id)
    await gone(h, instance_id)
    await h.provider.release(instance_id)


async def test_an_instance_that_was_taken_away_does_not_look_alive(h: Harness) -> None:
    instance_id = await rented(h)
    await until(lambda: h.provider.get(instance_id), lambda i: i is not None and i.phase is Phase.RUNNING, "running")
    await h.preempt(instance_id)

    async def read() -> Instance | None:
        return await h.provider.get(instance_id)

    await until(read, lambda i: i is None or i.phase in GONE_PHASES, "the end of running")
    rows = [i for i in (await h.provider.list()).instances if i.instance_id == instance_id]
    assert all(i.phase in GONE_PHASES for i in rows)


async def test_a_notice_reaches_us(h: Harness) -> None:
    assert h.provider.caps.notice_s > 0
    instance_id = await rented(h)
    await h.announce(instance_id)
    notices = h.provider.notices()
    notice = await anext(notices)
    assert (notice.provider, notice.instance_id) == (h.provider.name, instance_id)
    close = getattr(notices, "aclose", None)
    if close is not None:
        await close()


async def test_notices_end_at_once_where_there_are_none(h: Harness) -> None:
    if h.provider.caps.notice_s == 0:
        assert [notice async for notice in h.provider.notices()] == []


# release


async def test_releasing_twice_is_fine(h: Harness) -> None:
    instance_id = await rented(h)
    await h.provider.release(instance_id)
    await h.provider.release(instance_id)
    await gone(h, instance_id)
    await h.provider.release(instance_id)


async def test_a_wrong_key_releases_nothing_and_says_so(h: Harness) -> None:
    instance_id = await rented(h)
    stranger = h.with_wrong_key()
    for act in (stranger.release(instance_id), stranger.get(instance_id), stranger.list()):
        with pytest.raises(AuthError):
            await act
    instance = await h.provider.get(instance_id)
    assert instance is not None
    assert instance.phase is not Phase.TERMINATING


async def test_a_release_that_fails_says_so_and_may_be_sent_again(h: Harness) -> None:
    instance_id = await rented(h)
    await h.fail_releases(2)
    for _ in range(2):
        with pytest.raises(Transient) as caught:
            await h.provider.release(instance_id)
        assert caught.value.retry is Retry.BACKOFF
        instance = await h.provider.get(instance_id)
        assert instance is not None
        assert instance.phase is not Phase.TERMINATING
    await h.provider.release(instance_id)
    await gone(h, instance_id)


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
    lost = (await attempt(h, "echo2:conf:lease:2")).error
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
