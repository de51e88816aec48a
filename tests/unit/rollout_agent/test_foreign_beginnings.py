"""Tokens that another node sampled are in the store: who makes nothing of them has wasted none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.protocol.partial import encode_partial
from app.protocol.trajectory import Rollout
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.groups import Group
from tests.unit.rollout_agent.fake_stream import GROUP, Desk, FakeStream, Shift
from tests.unit.rollout_agent.fakes import problem
from tests.unit.rollout_agent.test_partials import PROMPT, Bench, group

OTHERS = 10


def gone_on_with(own: int) -> Group:
    """A group of which another node had sampled ten tokens, and this one some more."""
    plain, ids = group(), [65] * (OTHERS + own)
    cut = Completion(ids, [-0.5] * len(ids), "abort", (Span(3, 0), Span(4, OTHERS)) if own else (Span(3, 0),))
    return Group(plain.item, plain.prompt, PROMPT, plain.deadline, [cut, None], foreign_tokens=OTHERS)


async def test_what_this_node_has_added_nothing_to_is_only_given_back() -> None:
    bench = Bench()
    bench.ledger.leased({"w1": 1060.0})
    await bench.partials.hand_over([gone_on_with(0)])
    assert bench.desk.wire.of("partials") == []
    assert [told["work_items"] for told in bench.desk.wire.of("reports")] == [["w1"]]
    assert not bench.ledger.tokens_wasted


@pytest.mark.parametrize(
    ("answer", "wasted"),
    [
        (lambda body: httpx.Response(200, json={"taken": body["work_items"]}), {}),
        (lambda _: httpx.Response(503), {"interrupted": 3}),
        # Then the service forgets the beginning as well.
        (lambda _: problem("trajectory_refused", 422, reason="hash"), {"interrupted": 3 + OTHERS}),
    ],
)
async def test_what_nobody_takes_over_is_wasted_as_far_as_it_is_lost(
    answer: Callable[[dict[str, Any]], httpx.Response], wasted: dict[str, int]
) -> None:
    bench = Bench(partials=answer)
    bench.ledger.leased({"w1": 1060.0})
    await bench.partials.hand_over([gone_on_with(3)])
    assert bench.ledger.tokens_wasted == wasted


async def test_a_streaming_node_that_gives_a_begun_group_up_has_wasted_its_own_tokens() -> None:
    row = Rollout(
        work_item="w0", prompt_index=0, sample_index=1, prompt_ids=[ord("p"), ord("0")], completion_ids=[97] * OTHERS,
        logprobs=[-0.5] * OTHERS, span_versions=[0], span_starts=[0], reward=0.0, finish_reason="abort",
    )  # fmt: skip
    desk = Desk(left=0)
    desk.leased["w0"] = {"id": "w0", "prompt_index": 0, "group_size": GROUP, "seed": 0, "deadline_s": 60.0}
    desk.partials["w0"] = desk.reference(encode_partial([row]))
    async with Shift(FakeStream(odds=1000, on_swap="resubmit"), desk) as shift:
        await shift.until(lambda: len(shift.engine.running) == GROUP, "it is gone on with", steps=False)
        for _ in range(3):
            shift.engine.step()
        await shift.engine.abort()
        await shift.until(lambda: shift.ledger.tokens_generated == 3 * GROUP, "what was cut is kept", steps=False)
        shift.floor = 1
        await shift.worker.look()
        await shift.until(lambda: not shift.engine.running, "it is given up", steps=False)
    assert shift.ledger.tokens_wasted == {"stale": 3 * GROUP}
