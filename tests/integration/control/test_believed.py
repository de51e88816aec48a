"""What a node says of its speed is held against what it hands in; one that has to wait for work is believed."""

from __future__ import annotations

import asyncio

from app.fleet.believed import LEAST, RECENT
from tests.integration.control.rig import GROUP, MU, Learner, Node_, World

ROUND_S = 10.0


async def worked(control: World, learner: Learner, node: Node_, rounds: int, mu: float) -> None:
    """Each round the node hands in a batch, and the learner trains on it."""
    for _ in range(rounds):
        groups = await node.produce(2)
        assert len(groups) == 2
        await learner.train(groups)
        await learner.publish(learner.step)
        control.clock.advance(ROUND_S)
        node.version = learner.step
        await node.beat(mu, tokens_per_s=100 * mu)


async def test_a_node_that_says_ten_times_what_it_does_is_believed_about_what_it_does(control: World) -> None:
    job_id = await control.create(stop={"steps": 500})
    learner, (node,) = await control.running(job_id)
    true = 2 * GROUP / ROUND_S
    await worked(control, learner, node, LEAST, 10 * true)
    assert (await control.node_row(node.id)).mu_measured == 10 * true, "too little is known"
    await worked(control, learner, node, RECENT, 10 * true)
    row = await control.node_row(node.id)
    assert row.mu_measured is not None
    assert row.tokens_per_s is not None
    assert true <= row.mu_measured < 1.5 * true
    assert abs(row.tokens_per_s / row.mu_measured - 100) < 1e-6
    assert (await control.kinds(job_id)).count("speed_doubted") == 1
    await worked(control, learner, node, 2, true)
    assert (await control.node_row(node.id)).mu_measured == true, "who tells the truth is believed again"


async def test_a_node_that_waits_for_work_is_believed(control: World) -> None:
    job_id = await control.create(stop={"steps": 500})
    learner, (node,) = await control.running(job_id)
    waiting = await node.produce()
    for _ in range(2 * LEAST):
        # It makes all that it is given at once, and then asks in vain for the rest of the time.
        await learner.train(waiting[:2])
        await learner.publish(learner.step)
        node.version = learner.step
        made = await node.produce()
        assert made
        waiting = [*waiting[2:], *made]
        asked = {"max_items": 8, "policy_version": node.version, "wait_s": ROUND_S - 1}
        signals, news = control.svc.core.signals, f"work:{job_id}"
        signals.notify(news)
        asking = asyncio.create_task(node.post("work", asked))
        async with asyncio.timeout(20):
            while news not in signals._events:  # noqa: ASYNC110  (nobody tells that it waits)
                await asyncio.sleep(0.001)
        control.clock.advance(ROUND_S - 0.5)
        signals.notify(news)
        assert (await asking).json()["items"] == []
        control.clock.advance(0.5)
        await node.beat(MU)
        assert (await control.node_row(node.id)).mu_measured == MU
    assert "speed_doubted" not in await control.kinds(job_id)
