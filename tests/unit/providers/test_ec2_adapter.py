"""The EC2 adapter against a scripted client."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from providers import base
from providers.base import Billing, OfferQuery
from providers.ec2 import Ec2Config, EC2Spot
from providers.ec2.clients import Clients

from .test_ec2_pure import OFFER, ROW, SPEC, event, failure, price

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
MISSING = failure("InvalidInstanceID.NotFound")
NONE: dict[str, Any] = {"Reservations": []}
FOUND: dict[str, Any] = {"Reservations": [{"Instances": [ROW]}]}
CREATED: dict[str, Any] = {"Instances": [{"InstanceId": "i-1"}]}


class Script:
    """EC2 and SQS at once: answers what it is told, in order, and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.slept: list[float] = []
        self.outcomes: list[tuple[str, str, str]] = []
        self.now = NOW

    def _answer(self, call: str, kwargs: dict[str, Any]) -> Any:
        self.asked.append((call, kwargs))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run_instances(self, **kwargs: Any) -> Any:
        return self._answer("run", kwargs)

    def describe_instances(self, **kwargs: Any) -> Any:
        return self._answer("describe", kwargs)

    def terminate_instances(self, **kwargs: Any) -> Any:
        return self._answer("terminate", kwargs)

    def describe_spot_price_history(self, **kwargs: Any) -> Any:
        return self._answer("prices", kwargs)

    def get_console_output(self, **kwargs: Any) -> Any:
        return self._answer("console", kwargs)

    def receive_message(self, **kwargs: Any) -> Any:
        return self._answer("receive", kwargs)

    def delete_message(self, **kwargs: Any) -> Any:
        return self._answer("delete", kwargs)

    def close(self) -> None:
        self.asked.append(("close", {}))

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def adapter(self, **config: Any) -> EC2Spot:
        return EC2Spot(
            Ec2Config("us-east-1", "ami-1", **config), clients=Clients(self, self), clock=lambda: self.now,
            sleep=self.sleep, on_request=lambda *outcome: self.outcomes.append(outcome),
        )  # fmt: skip


async def test_search_asks_for_the_price_in_force_of_the_cards_wanted_page_by_page() -> None:
    script = Script(
        {"SpotPriceHistory": [price("0.5")], "NextToken": "2"},
        {"SpotPriceHistory": [price("0.4", AvailabilityZone="us-east-1b")], "NextToken": ""},
    )
    offers = await script.adapter().search(OfferQuery(Billing.SPOT_MARKET, ("A10G",)))
    assert [o.offer_id for o in offers] == ["g5.xlarge/us-east-1b", "g5.xlarge/us-east-1a"]
    (_, first), (_, second) = script.asked
    assert all(name.startswith("g5.") for name in first["InstanceTypes"])
    assert (first["StartTime"], first["ProductDescriptions"]) == (NOW, ["Linux/UNIX"])
    assert second["NextToken"] == "2"


@pytest.mark.parametrize("answer", [{}, {"SpotPriceHistory": None}, {"SpotPriceHistory": [price("free")]}])
async def test_prices_that_can_t_be_read_raise(answer: Any) -> None:
    with pytest.raises(base.MalformedAnswer):
        await Script(answer).adapter().search(OfferQuery(Billing.SPOT_MARKET))


async def test_other_billing_and_cards_that_ec2_has_not_cost_no_call() -> None:
    script = Script()
    for billing in (Billing.ON_DEMAND, Billing.SPOT_BID):
        with pytest.raises(base.CapabilityError):
            await script.adapter().search(OfferQuery(billing))
    assert await script.adapter().search(OfferQuery(Billing.SPOT_MARKET, ("RTX 4090",))) == []
    assert script.asked == []


@pytest.mark.parametrize(
    ("answer", "outcome", "error"),
    [
        (failure("InsufficientInstanceCapacity", 500), "refused", base.NoCapacity),
        (failure("MaxSpotInstanceCountExceeded"), "refused", base.QuotaError),
        (failure("SpotMaxPriceTooLow"), "refused", base.BidTooLow),
        (failure("IdempotentParameterMismatch"), "unknown", base.BadRequest),
        (failure("InternalError", 500), "unknown", base.Transient),
        ({"Instances": []}, "unknown", base.MalformedAnswer),
        ({}, "unknown", base.MalformedAnswer),
        ({"Instances": [{}]}, "unknown", base.MalformedAnswer),
    ],
)
async def test_outcomes_of_a_create(answer: Any, outcome: str, error: type[Exception]) -> None:
    script = Script(answer)
    result = await script.adapter().rent(OFFER, SPEC)
    assert (result.outcome, result.instance_id) == (outcome, None)
    assert isinstance(result.error, error)
    assert len(script.asked) == 1
    assert script.outcomes == [("ec2", "create", "unknown" if outcome == "unknown" else error.code)]  # type: ignore[attr-defined]


async def test_an_instance_just_made_is_asked_for_again_and_then_is_not_gone() -> None:
    script = Script(CREATED, MISSING, NONE, FOUND, MISSING)
    adapter = script.adapter()
    assert (await adapter.rent(OFFER, SPEC)).instance_id == "i-1"
    found = await adapter.get("i-1")
    assert found is not None
    assert len(script.slept) == 2
    # Once seen, an answer that does not know it is believed.
    assert await adapter.get("i-1") is None


async def test_an_instance_never_seen_is_not_gone_until_two_minutes_have_passed() -> None:
    script = Script(CREATED, *[MISSING] * 5, MISSING, MISSING, MISSING)
    adapter = script.adapter()
    await adapter.rent(OFFER, SPEC)
    with pytest.raises(base.Transient):
        await adapter.get("i-1")
    assert len(script.slept) == 4
    with pytest.raises(base.Transient):
        await adapter.release("i-1")
    script.now += timedelta(minutes=3)
    assert await adapter.get("i-1") is None
    await adapter.release("i-1")


async def test_a_stranger_that_is_not_there_and_one_that_is_terminated_are_gone_at_once() -> None:
    ended = {"Reservations": [{"Instances": [{**ROW, "State": {"Name": "terminated"}}]}]}
    script = Script(MISSING, ended)
    adapter = script.adapter()
    assert await adapter.get("i-9") is None
    assert await adapter.get("i-1") is None
    assert script.slept == []


async def test_another_instance_than_asked_for_is_malformed() -> None:
    with pytest.raises(base.MalformedAnswer):
        await Script(FOUND).adapter().get("i-2")


async def test_a_list_holds_all_pages_of_our_tag_and_no_terminated_ones() -> None:
    other = {"Reservations": [{"Instances": [{**ROW, "InstanceId": "i-2"}]}], "NextToken": "2"}
    script = Script(other, FOUND)
    listing = await script.adapter().list()
    assert listing.complete
    assert [i.instance_id for i in listing.instances] == ["i-2", "i-1"]
    filters = {f["Name"]: f["Values"] for f in script.asked[0][1]["Filters"]}
    assert filters["tag-key"] == ["echo2:label"]
    assert "terminated" not in filters["instance-state-name"]
    assert script.asked[1][1]["NextToken"] == "2"


@pytest.mark.parametrize(
    "answers",
    [
        [{}],
        [{"Reservations": ""}],
        [{"Reservations": [{}]}],
        [{"Reservations": [{"Instances": [{"InstanceId": "i-1"}]}]}],
        [{**FOUND, "NextToken": "2"}, {**FOUND, "NextToken": "2"}],
    ],
)
async def test_a_list_that_can_t_be_read_raises(answers: list[Any]) -> None:
    with pytest.raises(base.MalformedAnswer):
        await Script(*answers).adapter().list()


async def test_a_page_that_is_missing_raises() -> None:
    with pytest.raises(base.RateLimited):
        await Script({**FOUND, "NextToken": "2"}, failure("RequestLimitExceeded", 503)).adapter().list()


async def test_the_rate_is_the_last_price_seen_and_none_when_that_is_old() -> None:
    other = {"SpotPriceHistory": [price("0.9", InstanceType="g6.xlarge")]}
    script = Script(FOUND, {"SpotPriceHistory": [price("0.5")]}, FOUND, other, FOUND)
    adapter = script.adapter()

    async def rate() -> int | None:
        return (await adapter.list()).instances[0].compute_micros_h

    assert await rate() is None
    await adapter.search(OfferQuery(Billing.SPOT_MARKET))
    assert await rate() == 505_000
    script.now += timedelta(minutes=16)
    await adapter.search(OfferQuery(Billing.SPOT_MARKET, ("L4",)))
    assert await rate() is None


async def test_logs_are_the_last_lines_of_the_console() -> None:
    script = Script({"Output": "a\nb\nc\n"}, {}, {"Output": "a"})
    adapter = script.adapter()
    assert [await adapter.logs("i-1", 2), await adapter.logs("i-1", 2), await adapter.logs("i-1", 0)] == [
        "b\nc",
        "",
        "",
    ]


def message(body: str, receipt: str) -> dict[str, str]:
    return {"Body": body, "ReceiptHandle": receipt}


async def test_notices_are_deleted_once_the_caller_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    script = Script(
        {}, {"Messages": [message("rubbish", "r0"), message(event(), "r1")]}, {}, {},
        {"Messages": [message(event("EC2 Instance Rebalance Recommendation"), "r2")]},
    )  # fmt: skip
    notices = script.adapter(notice_queue_url="https://sqs/q").notices()
    assert (await anext(notices)).kind == "interruption"
    assert [kwargs.get("ReceiptHandle") for call, kwargs in script.asked if call == "delete"] == ["r0"]
    assert "can't be read" in caplog.text
    assert (await anext(notices)).kind == "rebalance"
    assert [kwargs.get("ReceiptHandle") for call, kwargs in script.asked if call == "delete"] == ["r0", "r1"]
    wait = {kwargs["WaitTimeSeconds"] for call, kwargs in script.asked if call == "receive"}
    assert wait == {5}, "a stop waits for no longer"


async def test_without_a_queue_there_are_no_notices_and_a_refused_queue_raises() -> None:
    assert [n async for n in Script().adapter().notices()] == []
    with pytest.raises(base.AuthError):
        await anext(Script(failure("AccessDenied", 403)).adapter(notice_queue_url="https://sqs/q").notices())


async def test_closing_closes_both_clients() -> None:
    script = Script()
    await script.adapter().aclose()
    assert [call for call, _ in script.asked] == ["close", "close"]
