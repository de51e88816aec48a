"""What every adapter must do, whatever its provider: the rules of `providers.base`, one scenario a test.

A scenario that a provider can't have is skipped with the reason that its harness gives.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from providers.base import (
    AuthError,
    Billing,
    CapabilityError,
    Instance,
    MalformedAnswer,
    Phase,
    ProviderError,
    Retry,
    Transient,
)

from .harness import UNKNOWN_GPU, Harness, until
from .steps import GONE_PHASES, LABEL, OTHER, attempt, found, gone, labelled, offers, rented

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
    await rented(h, OTHER)


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


async def test_two_rents_at_once_are_two_machines_under_their_labels(h: Harness) -> None:
    wanted = dict(zip((LABEL, OTHER), await offers(h), strict=False))
    results = await asyncio.gather(*(h.provider.rent(o, h.spec(o, label)) for label, o in wanted.items()))
    ids = [result.instance_id for result in results]
    assert None not in ids
    assert len(set(ids)) == 2
    for label, instance_id in zip(wanted, ids, strict=True):
        await found(h, str(instance_id), label)
    assert await h.creates() == 2


async def test_a_create_carries_the_intent_s_token(h: Harness) -> None:
    assert h.provider.caps.idempotency_key
    await rented(h, LABEL)
    await rented(h, OTHER)
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
