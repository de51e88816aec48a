"""The whole service against vast.ai's API, as the local marketplace speaks it: its limits, its bill, its secrets."""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from providers.marketplace.contract import State
from providers.marketplace.gate import THRESHOLDS
from tests.integration.control.market_rig import KEY, Vast, vast_market
from tests.integration.control.rig import FakeClock, Learner, World

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]
SPAN_S = 1200
SOME_MICROS = 100
"""What ten minutes cost at least; less is a rest of seconds."""


async def started(control: World, nodes: float = 1.0, **fleet: Any) -> tuple[str, Learner]:
    """A job that rents at vast.ai only."""
    job_id = await control.create(fleet={"providers": ["vastai"], "min_reliability": 0.0, **fleet})
    learner = await control.ready_learner(job_id, nodes)
    return job_id, learner


async def test_twenty_minutes_keep_the_limits_and_poll_by_the_list_alone(
    open_world: OpenWorld, clock: FakeClock, tmp_path: Path
) -> None:
    options = {"reconcile_seconds": 60, "offer_refresh_seconds": 30, "heartbeat_timeout_seconds": 86_400}
    async with (
        vast_market(tmp_path / "market", clock, rate_limits=True) as vast,
        open_world(others=[vast.adapter], **options) as control,
    ):
        job_id, learner = await started(control, nodes=5, max_nodes=8)
        await vast.rounds(control, 2, 30)
        assert len(vast.live()) >= 3
        for contract in vast.live():
            await vast.join(control, contract)
        await vast.rounds(control, 2, 30)
        before, began = vast.calls, clock.now
        while clock.now - began < SPAN_S:
            await learner.beat()
            await vast.rounds(control, 1, 30)
        made = {call: count - before.get(call, 0) for call, count in vast.calls.items()}
        assert made.get("show", 0) == 0, "no look at single instances while nothing happens"
        assert made.get("create", 0) + made.get("destroy", 0) == 0
        assert SPAN_S / 60 - 3 <= made["list"] <= SPAN_S / 60 + 2
        assert made["search"] <= SPAN_S / 30 + 2
        assert {call for call in made if made[call]} <= {*THRESHOLDS, "user"}
        assert all(made[call] <= SPAN_S / THRESHOLDS.get(call, 1.0) for call in made)
        await control.http.post(f"/v1/jobs/{job_id}/cancel")
        await learner.done("finished")
        await vast.rounds(control, 8, 30)
        assert vast.live() == []
        assert "release_failed" not in await control.kinds(job_id)
        refused = [e for e in await control.events(job_id) if "too frequent" in e.message or "too often" in e.message]
        assert refused == []
        shown = {p["name"]: p for p in (await control.get("/v1/fleet"))["providers"]}
        assert shown["vastai"]["usable"], shown["vastai"]["reason"]


def states(vast: Vast) -> list[tuple[str, Callable[[], None]]]:
    """What may become of the first contract of this account."""

    def contract() -> Any:
        return next(iter(vast.market.contracts.values()))

    return [
        ("loading", lambda: None),
        ("running", lambda: vast.market.running(contract(), 2**22 + 1, 0.0)),
        ("stopped", lambda: vast.market.stop(contract())),
        ("exited", lambda: vast.market.exited(contract(), 1)),
        ("destroyed", lambda: vast.market.destroy(contract())),
    ]


@pytest.mark.parametrize(
    ("state", "paid"),
    [
        ("loading", {"disk"}),
        ("running", {"disk", "gpu"}),
        ("stopped", {"disk"}),
        ("exited", {"disk"}),
        ("destroyed", set()),
    ],
)
async def test_what_each_state_costs_is_what_the_bill_says(
    open_world: OpenWorld, clock: FakeClock, tmp_path: Path, state: str, paid: set[str]
) -> None:
    """Releases fail meanwhile, so that the machine stays in its state for as long as the bill needs to show it."""
    async with (
        vast_market(tmp_path / "market", clock, start_delay_s=10**6) as vast,
        open_world(others=[vast.adapter], join_timeout_seconds=86_400) as control,
    ):
        await started(control, max_nodes=1)
        await control.round()
        (contract,) = vast.live()
        dict(states(vast))[state]()
        for _ in range(20):
            for _ in range(2):
                vast.fault("destroy", "500")
            clock.advance(30)
            await control.round()
        vast.app.state.faults.clear()
        assert (contract.state is State.DESTROYED) == (state == "destroyed")
        charges = await vast.adapter.charges(datetime.fromtimestamp(clock.now - 3600, UTC))
        bill = Counter({c.kind: c.micros for c in charges if c.instance_id == str(contract.id)})
        assert {kind for kind, micros in bill.items() if micros > SOME_MICROS} == paid
        await control.round(10)
        lease = next(x for x in await control.leases() if x.instance_id == str(contract.id))
        ours = {"gpu": lease.spent_gpu, "disk": lease.spent_disk}
        assert {kind for kind, micros in ours.items() if micros > SOME_MICROS} == paid
        assert ours["gpu"] == pytest.approx(bill["gpu"], rel=0.04, abs=200)


async def test_a_whole_rent_cycle_leaves_no_secret_behind(
    open_world: OpenWorld, clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    secrets: set[str] = {KEY}
    async with (
        vast_market(tmp_path / "market", clock) as vast,
        open_world(others=[vast.adapter], vastai_api_key=KEY, charges_seconds=30) as control,
    ):
        for call, kind in (("create", "500_after_process"), ("list", "502_html"), ("user", "auth_error")):
            vast.fault(call, kind)
        job_id, learner = await started(control, nodes=2)
        await vast.rounds(control, 12, 10)
        nodes = [await vast.join(control, c) for c in vast.live() if c.state is State.RUNNING]
        assert nodes
        secrets |= {c.order.env["ECHO2_JOIN_TOKEN"] for c in vast.market.contracts.values()}
        secrets |= {c.api_key for c in vast.market.contracts.values()} | {n.token for n in nodes}
        for call, kind in (("destroy", "auth_error"), ("destroy", "500"), ("charges", "502_html"), ("list", "429")):
            vast.fault(call, kind)
        await vast.rounds(control, 4, 30)
        await control.http.post(f"/v1/jobs/{job_id}/cancel")
        await learner.done("finished")
        await vast.rounds(control, 20, 30)
        assert vast.live() == []
        assert {"lease_created", "lease_released", "release_failed"} <= set(await control.kinds(job_id))
        paths = ("/v1/fleet", "/v1/cost", "/v1/jobs/nothing", "/metrics", "/v1/offers")
        for path in (*paths, *(f"/v1/jobs/{job_id}{part}" for part in ("", "/fleet", "/cost", "/events", "/steps"))):
            texts.append((await control.http.get(path)).text)
        for bad in ({"model": KEY}, {"budget_usd": "-1"}):
            texts.append((await control.http.post("/v1/jobs", json=bad, headers={"X-Try": "1"})).text.replace(KEY, ""))
        wrong = await control.http.get("/v1/jobs", headers={"Authorization": f"Bearer {nodes[0].token}"})
        texts += [wrong.text, repr(control.svc.core.settings), repr(vast.adapter)]
        secrets |= {control.svc.core.secrets.key.decode(), control.svc.core.secrets.learner_token(job_id)}
    with sqlite3.connect(tmp_path / "test.db") as database:
        texts += list(database.iterdump())
    texts += [r.getMessage() + str(r.exc_text or "") + str(r.args) for r in caplog.records]
    whole = "\n".join(texts)
    assert job_id in whole
    assert len(secrets) >= 6
    assert [s[:6] for s in secrets if s in whole] == []
