"""Spot prices told by webhook."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import httpx
from sqlalchemy import func, select
from standardwebhooks import Webhook

from app.fleet.bids import MARGIN
from app.protocol.base import usd
from app.storage.models import SpotPrice
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import WEBHOOK_SECRET, World


async def tell(
    control: World,
    price: str = "0.9",
    *,
    message_id: str = "msg_1",
    age_s: float = 0,
    spoil: bool = False,
    body: bytes | None = None,
    **selector: Any,
) -> httpx.Response:
    sent = datetime.fromtimestamp(control.clock() - age_s, UTC)
    if body is None:
        hook = {
            "provider": "marketplace",
            "selector": selector,
            "price_per_hour": price,
            "effective_at": sent.isoformat(),
        }
        body = json.dumps(hook).encode()
    signature = Webhook(WEBHOOK_SECRET).sign(msg_id=message_id, timestamp=sent, data=body.decode())
    headers = {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(sent.timestamp())),
        "webhook-signature": signature,
        "authorization": "",
    }
    return await control.http.post("/v1/hooks/spot-price", content=body + (b" " if spoil else b""), headers=headers)


async def prices(control: World) -> int:
    async with control.svc.core.db.read() as session:
        return await session.scalar(select(func.count()).select_from(SpotPrice)) or 0


async def test_price_is_taken_once_and_reranks_at_once(control: World, provider: FakeProvider) -> None:
    provider.spot = True
    job_id = await control.create(fleet={"interruptible": True})
    await control.running(job_id)
    control.clock.advance(0.5)
    answer = await tell(control, "0.9", machine_id="m2")
    assert answer.status_code == 202
    await control.svc.controller.leases.drain_tasks()
    reranked = [e for e in await control.events(job_id) if e.kind == "reranked"]
    assert len(reranked) == 1
    assert "machine_id m2" in reranked[0].message
    again = await tell(control, "0.9", machine_id="m2")
    assert again.status_code == 202
    await control.svc.controller.leases.drain_tasks()
    assert (await control.kinds(job_id)).count("reranked") == 1
    assert await prices(control) == 1
    offers = (await control.get("/v1/offers", job_id=job_id))["items"]
    assert next(o for o in offers if o["machine_id"] == "m2")["price_per_hour"] == "1.035000"
    assert (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["price_events"] == 1


async def test_outbid_machine_gives_way_at_once_to_a_cheaper_one(control: World, provider: FakeProvider) -> None:
    provider.spot = True
    job_id = await control.create(fleet={"interruptible": True})
    await control.running(job_id)
    assert provider.live_machines() == ["m1"]
    await tell(control, "5.00", machine_id="m1")
    await control.svc.controller.leases.drain_tasks()
    assert provider.live_machines() == ["m1", "m2"]
    assert provider.bids == []


async def test_bid_of_a_machine_that_is_worth_it_is_raised(control: World, provider: FakeProvider) -> None:
    provider.spot = True
    job_id = await control.create(fleet={"interruptible": True})
    _, (node,) = await control.running(job_id)
    await tell(control, "0.25", machine_id="m1")
    await control.svc.controller.leases.drain_tasks()
    assert provider.bids == [("1", 287_500)]
    assert provider.live_machines() == ["m1"]
    before = (await control.leases())[0]
    control.clock.advance(30)
    await node.beat()
    await control.round()
    (lease,) = await control.leases()
    assert (before.rate_micros_h, lease.rate_micros_h) == (287_500, 287_500), "billed from the provider's yes on"


UNTRUSTED: list[tuple[dict[str, Any], int]] = [
    ({"spoil": True}, 401),
    ({"age_s": 600}, 400),
    ({"age_s": -600}, 400),
    ({"body": b"{}"}, 422),
    ({"body": b"not json"}, 422),
    ({"price": "-1"}, 422),
    ({"price": "0"}, 422),
    ({"price": "0.0000001"}, 422),
    ({"price": "NaN"}, 422),
    ({"colour": "red"}, 422),
    ({"body": b"x" * (256 * 1024 + 1)}, 413),
]


async def test_message_that_cannot_be_trusted_changes_nothing(control: World) -> None:
    for changes, status in UNTRUSTED:
        answer = await tell(control, **changes)
        assert answer.status_code == status, (list(changes), answer.text)
    assert await prices(control) == 0
    # None of these used up the id of the message.
    assert (await tell(control)).json() == {"accepted": True, "replay": False}


async def test_message_without_signature_or_for_a_stranger_is_refused(control: World) -> None:
    assert (await control.http.post("/v1/hooks/spot-price", json={})).status_code == 400
    body = json.dumps(
        {
            "provider": "nowhere",
            "selector": {},
            "price_per_hour": "1",
            "effective_at": datetime.fromtimestamp(control.clock(), UTC).isoformat(),
        }
    ).encode()
    answer = await tell(control, body=body)
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"pointer": "/provider", "detail": "must be one of marketplace"}]
    assert await prices(control) == 0


async def test_what_is_wrong_with_a_message_is_pointed_at(control: World) -> None:
    answer = await tell(control, "0", machine_id={"id": 1}, colour="red")
    assert answer.status_code == 422
    pointers = {e["pointer"] for e in answer.json()["errors"]}
    assert pointers == {"/price_per_hour", "/selector/machine_id", "/selector/colour"}
    answer = await tell(control, body=b'{"provider": ')
    assert [e["pointer"] for e in answer.json()["errors"]] == [""]
    assert await prices(control) == 0


async def test_a_price_from_far_ahead_is_refused(control: World) -> None:
    async def at(seconds: float) -> int:
        when = datetime.fromtimestamp(control.clock() + seconds, UTC).isoformat()
        hook = {"provider": "marketplace", "selector": {}, "price_per_hour": "1", "effective_at": when}
        return (await tell(control, message_id=f"msg_{seconds}", body=json.dumps(hook).encode())).status_code

    assert await at(86_401) == 422
    assert await at(86_399) == 202


async def test_a_burst_of_prices_is_answered_by_few_decisions_and_none_is_lost(
    control: World, provider: FakeProvider
) -> None:
    provider.spot = True
    job_id = await control.create(fleet={"interruptible": True})
    await control.running(job_id)
    control.clock.advance(0.5)
    prices_told = [f"0.{60 + n}" for n in range(30)]
    answers = await asyncio.gather(
        *(tell(control, price, message_id=f"msg_{price}", machine_id="m2") for price in prices_told)
    )
    assert all(a.json() == {"accepted": True, "replay": False} for a in answers)
    await control.svc.controller.leases.drain_tasks()
    assert 1 <= (await control.kinds(job_id)).count("reranked") < 20
    offers = (await control.get("/v1/offers", job_id=job_id))["items"]
    async with control.svc.core.db.read() as session:
        newest = await session.scalar(select(SpotPrice.micros_h).order_by(SpotPrice.id.desc()).limit(1))
    shown = next(o for o in offers if o["machine_id"] == "m2")["price_per_hour"]
    assert shown == usd(round((newest or 0) * MARGIN))
    assert (await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["price_events"] == 30
