"""What an agent does when its machine is told that it will be taken away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import torch

from app.protocol.errors import Unavailable
from app.protocol.node import Interruption, NodeState
from app.rollout_agent.agent import Agent
from app.rollout_agent.config import AgentSettings, RelayAddress
from app.rollout_agent.engines.transformers import TransformersEngine
from app.rollout_agent.lifecycle import Ending
from app.rollout_agent.preemption.imds import Imds
from tests.integration.rollout_agent.fake_control import JOIN_TOKEN, RELAY_TOKEN, Control, eventually, running
from tests.unit.rollout_agent.metadata_server import ACTION, ADVICE, ADVISED, WARNED, MetadataServer, metadata_server
from tests.unit.rollout_agent.tiny import publish

NO_RELAY = RelayAddress("127.0.0.1", 1, None)
NOTICE = Interruption(
    kind="interruption",
    source="ec2",
    at=datetime(2026, 6, 1, 12, 2, tzinfo=UTC),
    detail="spot/instance-action: terminate",
)


@asynccontextmanager
async def ec2_node(
    root: Path, *, relay: RelayAddress = NO_RELAY, uplink: float | None = None
) -> AsyncIterator[tuple[Control, MetadataServer, asyncio.Task[Ending]]]:
    """An agent at work on a machine with a metadata service, which would not tell anything by itself for a minute."""
    async with running(root) as (control, _), metadata_server() as machine, httpx.AsyncClient() as http:
        control.heartbeat_s, control.uplink = 60.0, uplink
        settings = AgentSettings.model_validate(
            {"control_url": control.base_url, "join_token": JOIN_TOKEN, "agent_dir": root / "node", "device": "cpu"}
        )
        imds = Imds(machine.url)
        imds.pause_s = 0.02
        agent = Agent(settings, TransformersEngine(threads=1), http, relay=relay, notices=imds)
        life = asyncio.create_task(agent.run())
        try:
            await eventually(lambda: len(control.committed) >= 4, "work is committed")
            yield control, machine, life
        finally:
            if not life.done():
                agent.stop()
            await asyncio.wait_for(life, 20)
            await imds.aclose()


def told(control: Control) -> list[Interruption]:
    """The notices that heartbeats carried."""
    return [beat.interruption for beat in control.beats if beat.interruption is not None]


def calls_from_the_notice_on(control: Control) -> list[str]:
    """What the node asked for after the heartbeat that carried its notice."""
    beats = [n for n, call in enumerate(control.calls) if call == "heartbeat"]
    carrying = next(n for n, beat in enumerate(control.beats) if beat.interruption is not None)
    return control.calls[beats[carrying] + 1 :]


async def test_a_notice_is_told_at_once_and_nothing_more_is_asked_for(tmp_path: Path) -> None:
    async with ec2_node(tmp_path) as (control, machine, life):
        machine.set(ACTION, WARNED)
        ending = await asyncio.wait_for(life, 20)
        assert ending.code == 0
        assert told(control) == [NOTICE]
        [carrier] = [beat for beat in control.beats if beat.interruption is not None]
        assert carrier.state == NodeState.DRAINING
        after = calls_from_the_notice_on(control)
        assert "work" not in after
        assert after[-1] == "leave"
        [leave] = control.leaves
        assert "will be interrupted" in leave.reason
        assert set(control.leased) == set(control.committed) | set(leave.unfinished)
        assert not set(control.committed) & set(leave.unfinished)


async def test_a_node_without_work_tells_before_it_leaves(tmp_path: Path) -> None:
    async with ec2_node(tmp_path) as (control, machine, life):
        control.give_work = False
        await eventually(lambda: set(control.leased) == set(control.committed), "it has nothing left to do")
        machine.set(ACTION, WARNED)
        await asyncio.wait_for(life, 20)
        assert told(control) == [NOTICE]
        assert len(control.leaves) == 1


async def test_a_notice_that_was_not_heard_is_told_again_soon(tmp_path: Path) -> None:
    async with ec2_node(tmp_path) as (control, machine, life):
        control.status_of["heartbeat"] = Unavailable("away for a moment")
        before = control.calls.count("heartbeat")
        machine.set(ACTION, WARNED)
        await eventually(lambda: control.calls.count("heartbeat") >= before + 2, "it is told twice", 10)
        assert told(control) == []
        del control.status_of["heartbeat"]
        await asyncio.wait_for(life, 20)
        assert told(control) == [NOTICE]


async def test_a_machine_that_may_be_interrupted_says_so_once_and_works_on(tmp_path: Path) -> None:
    async with ec2_node(tmp_path) as (control, machine, life):
        machine.set(ADVICE, ADVISED)
        await eventually(lambda: bool(told(control)), "it is told", 10)
        done, asked = len(control.committed), len(machine.asked)
        await eventually(lambda: len(control.committed) > done + 4, "it works on")
        await eventually(lambda: len(machine.asked) > asked + 4, "the service is asked on")
        await control.publish(1)
        await eventually(lambda: control.beats[-1].policy_version == 1, "v1 is told")
        assert [notice.kind for notice in told(control)] == ["rebalance"]
        assert not life.done()


async def test_a_peer_gets_what_it_is_pulling_before_the_node_leaves(tmp_path: Path, unused_tcp_port: int) -> None:
    relay = RelayAddress("127.0.0.1", unused_tcp_port, f"http://127.0.0.1:{unused_tcp_port}")
    async with ec2_node(tmp_path, relay=relay, uplink=4_000_000.0) as (control, machine, life):
        # Of another model, since the tests' own is sent in one piece; this node keeps it for its peers all the same.
        made = await asyncio.to_thread(publish, control.store, control.key, {"large": torch.zeros(8_000_000)}, 1)
        size = made.manifest.payload_bytes
        control.target = 1
        machine.set(ADVICE, ADVISED)  # what makes it talk to the control service
        await eventually(lambda: any(report.version == 1 for report in control.reports), "the node has v1")
        got = 0
        headers = {"Authorization": f"Bearer {RELAY_TOKEN}"}
        async with (
            httpx.AsyncClient(headers=headers, timeout=20) as http,
            http.stream("GET", f"{relay.public_url}/snapshots/1/stream?from_leaf=0") as stream,
        ):
            parts = stream.aiter_bytes()
            got += len(await anext(parts))
            machine.set(ACTION, WARNED)
            await eventually(lambda: NOTICE in told(control), "the notice is told", 10)
            async for part in parts:
                got += len(part)
        assert got > size
        await asyncio.wait_for(life, 20)
        assert len(control.leaves) == 1
