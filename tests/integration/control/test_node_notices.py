"""A node's machine is told that it will be taken away: what its heartbeat sets in motion, once, whoever says it too."""

from __future__ import annotations

from typing import Any

import pytest

from app.storage.models import Cooldown
from providers.base import Notice
from tests.integration.control.fake_provider import FakeProvider
from tests.integration.control.rig import Node_, World

ENDS = {
    "kind": "interruption",
    "source": "ec2",
    "at": "2026-06-01T14:02:00+02:00",
    "detail": "spot/instance-action: terminate",
}
MAY_END = {"kind": "rebalance", "source": "ec2", "detail": "events/recommendations/rebalance"}


async def tell(control: World, node: Node_, notice: dict[str, Any], state: str = "draining") -> dict[str, Any]:
    """A heartbeat that carries a notice: its directives, once all that it set in motion is done."""
    body = {"state": state, "policy_version": 0, "rollouts_per_s": 6.0, "interruption": notice}
    answer = await node.post("heartbeat", body)
    assert answer.status_code == 200, answer.text
    await control.svc.controller.leases.drain_tasks()
    return dict(answer.json())


async def preemptions(control: World, job_id: str) -> int:
    return int((await control.get(f"/v1/jobs/{job_id}/fleet"))["totals"]["preemptions"])


async def test_a_node_that_will_be_interrupted_drains_and_is_replaced_at_once(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    # No round of the loop from here on.
    directives = await tell(control, node, ENDS)
    assert directives["drain"] is True
    assert provider.live_machines() == ["m1", "m2"]
    row = await control.node_row(node.id)
    assert (row.state, row.drain) == ("draining", True)
    [event] = [e for e in await control.events(job_id) if e.kind == "interruption_notice"]
    assert event.message == (
        "RTX 4090 on machine m1: marketplace will interrupt it at 12:02:00 UTC, "
        "its node says (spot/instance-action: terminate)"
    )
    assert event.data["source"] == "node"
    assert event.data["interrupts_at"] == "2026-06-01T12:02:00.000Z"
    assert await preemptions(control, job_id) == 1
    assert (await node.ask())["items"] == []
    await node.leave()
    await control.round(1)
    assert provider.live_machines() == ["m2"]


@pytest.mark.parametrize("order", [("node", "hook", "stream"), ("hook", "node", "stream"), ("stream", "hook", "node")])
async def test_who_says_the_same_later_changes_nothing(
    control: World, provider: FakeProvider, order: tuple[str, ...]
) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    notice = Notice("marketplace", provider.live()[0].instance_id, "interruption", None)
    for number, who in enumerate((*order, *order)):
        if who == "node":
            await tell(control, node, ENDS)
        else:
            await control.svc.notices.take(notice, f"sns:{number}" if who == "hook" else None)
            await control.svc.controller.leases.drain_tasks()
        assert provider.live_machines() == ["m1", "m2"], (number, who)
    said = [e for e in await control.events(job_id) if e.kind == "interruption_notice"]
    assert [e.data["source"] for e in said] == [order[0]]
    assert await preemptions(control, job_id) == 1
    # It is gone at the provider before its node could leave.
    provider.fail(notice.instance_id)
    await control.round(10)
    assert await preemptions(control, job_id) == 1
    assert provider.live_machines() == ["m2"]


async def test_the_machine_is_left_alone_twice_as_long_the_next_time(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    del provider.machines[1:]
    alone = []
    for _ in range(2):
        await tell(control, node, ENDS)
        async with control.svc.core.db.read() as session:
            row = await session.get_one(Cooldown, ("marketplace", "m1"))
        alone.append(row.until - control.clock())
        await node.leave()
        await control.rounds(1, alone[-1] - 1, learner)
        assert provider.live_machines() == []
        await control.rounds(2, 2, learner)
        [again] = provider.live()
        node = await control.join(again)
    assert alone[1] == pytest.approx(2 * alone[0])


async def test_sigterm_is_a_notice_too(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    await tell(control, node, {"kind": "interruption", "source": "signal", "detail": "SIGTERM"})
    assert provider.live_machines() == ["m1", "m2"]
    [event] = [e for e in await control.events(job_id) if e.kind == "interruption_notice"]
    assert event.message.endswith("will interrupt it, its node says (SIGTERM)")
    assert event.data["interrupts_at"] is None


async def test_a_node_that_may_be_interrupted_gives_way_to_one_that_costs_little_more(
    control: World, provider: FakeProvider
) -> None:
    provider.machines[1].price_micros_h = 210_000
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    for _ in range(2):
        directives = await tell(control, node, MAY_END, "active")
        assert directives["drain"] is False
        assert provider.live_machines() == ["m1", "m2"], "the old one stays until the new one works"
    assert (await control.kinds(job_id)).count("rebalance_notice") == 1
    assert await preemptions(control, job_id) == 0
    await control.join(next(r for r in provider.live() if r.machine.machine_id == "m2"))
    await control.round(1)
    assert (await control.node_row(node.id)).drain


async def test_a_machine_that_we_give_back_anyway_needs_no_replacement(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    assert (await control.http.post(f"/v1/jobs/{job_id}/cancel")).status_code == 202
    await control.round(1)
    # Its machine is stopped by us: what it says of SIGTERM is no news.
    await tell(control, node, {"kind": "interruption", "source": "signal", "detail": "SIGTERM"})
    assert provider.live_machines() in (["m1"], [])
    assert "interruption_notice" not in await control.kinds(job_id)
    assert await preemptions(control, job_id) == 0


@pytest.mark.parametrize(
    "notice",
    [
        {**ENDS, "at": "soon"}, {**ENDS, "at": "2026-06-01T12:00:00"}, {**ENDS, "at": "0001-01-01T00:00:00+14:00"},
        {**ENDS, "kind": "rumour"}, {**ENDS, "source": "me"}, {**ENDS, "detail": "x" * 201}, {**ENDS, "lease": "other"},
    ],
)  # fmt: skip
async def test_a_notice_that_cannot_be_read_is_refused(
    control: World, provider: FakeProvider, notice: dict[str, Any]
) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    answer = await node.post("heartbeat", {"state": "active", "policy_version": 0, "interruption": notice})
    assert answer.status_code == 422, answer.text
    assert "interruption_notice" not in await control.kinds(job_id)
