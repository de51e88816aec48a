from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app.protocol.errors import Gone, IntegrityError, Unauthorized
from app.protocol.node import NodeState
from app.rollout_agent.agent import Agent
from app.rollout_agent.config import AgentSettings, RelayAddress, SelfDestruct
from app.rollout_agent.engines.transformers import TransformersEngine
from app.rollout_agent.lifecycle import Ending
from app.snapshots.store import SnapshotStore
from tests.integration.rollout_agent.fake_control import JOIN_TOKEN, RELAY_TOKEN, Control, eventually, running
from tests.unit.rollout_agent.tiny import JOB

NO_RELAY = RelayAddress("127.0.0.1", 1, None)


@asynccontextmanager
async def agent_of(
    control: Control, folder: Path, *, relay: RelayAddress = NO_RELAY, orphan_timeout_s: float = 600.0
) -> AsyncIterator[tuple[Agent, asyncio.Task[Ending]]]:
    """A running agent; it has to have ended by itself at the end of the block."""
    settings = AgentSettings.model_validate(
        {
            "control_url": control.base_url,
            "join_token": JOIN_TOKEN,
            "agent_dir": folder,
            "device": "cpu",
            "orphan_timeout_s": orphan_timeout_s,
        }
    )
    machine = SelfDestruct(control.base_url, "4711", "machine-key")
    async with httpx.AsyncClient() as http:
        agent = Agent(settings, TransformersEngine(threads=1), http, relay=relay, self_destruct=machine)
        life = asyncio.create_task(agent.run())
        try:
            yield agent, life
        finally:
            if not life.done():
                agent.stop()
            await asyncio.wait_for(life, 20)


async def test_a_node_works_and_goes_on_under_the_new_version(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), agent_of(control, tmp_path / "node") as (agent, life):
        await eventually(lambda: len(control.committed) >= 8, "work of v0 is committed")
        assert set(control.committed.values()) == {0}
        await control.publish(1)
        await eventually(lambda: 1 in control.committed.values(), "work of v1 is committed")
        await eventually(lambda: control.beats[-1].policy_version == 1, "heartbeats show v1")
        beat = control.beats[-1]
        assert beat.rollouts_per_s is not None
        assert beat.rollouts_per_s > 0
        assert beat.tokens_per_s is not None
        assert beat.tokens_per_s >= beat.rollouts_per_s
        assert beat.busy_share is not None
        assert 0 < beat.busy_share <= 1
        assert beat.bytes_from["learner"] > 0
        assert beat.bytes_down > beat.bytes_from["learner"]
        assert beat.bytes_up > 0
        assert beat.upstream == "learner"
        agent.stop()
        ending = await asyncio.wait_for(life, 20)
        assert ending.code == 0
        in_order = [NodeState.JOINING, NodeState.WARMING, NodeState.ACTIVE, NodeState.DRAINING]
        assert [state for state in in_order if state in control.states] == control.states
        assert control.states[-2:] == [NodeState.ACTIVE, NodeState.DRAINING]
        assert control.destroyed == []
    versions = [control.committed[item] for item in sorted(control.committed, key=lambda w: int(w[1:]))]
    assert versions == sorted(versions), "after a swap nothing is sampled under the old version"


async def test_news_is_told_at_once_and_not_at_the_next_heartbeat(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        control.heartbeat_s = 60.0
        async with agent_of(control, tmp_path / "node") as (agent, life):
            await eventually(lambda: len(control.committed) >= 1, "work is committed")
            assert (control.beats[-1].state, control.beats[-1].policy_version) == (NodeState.ACTIVE, 0)
            await control.publish(1)
            await eventually(lambda: control.beats[-1].policy_version == 1, "v1 is told")
            agent.stop()
            await asyncio.wait_for(life, 20)
            assert control.beats[-1].state == NodeState.DRAINING


async def test_a_new_version_gets_work_while_the_old_one_waits_for_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), agent_of(control, tmp_path / "node"):
        await eventually(lambda: len(control.committed) >= 1, "work is committed")
        control.held_version = 0
        await eventually(lambda: control.beats[-1].in_flight == 0, "it waits for work")
        await control.publish(1)
        await eventually(lambda: 1 in control.committed.values(), "work of v1 is committed", 8)
        assert not control.release.is_set()
        control.release.set()
        control.give_work = False
        await eventually(lambda: set(control.leased) == set(control.committed), "what the old poll brought is done too")


async def test_drain_commits_what_is_in_flight_and_leaves(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), agent_of(control, tmp_path / "node") as (_, life):
        await eventually(lambda: len(control.committed) >= 4, "work is committed")
        control.drain = True
        ending = await asyncio.wait_for(life, 20)
        assert ending.code == 0
        assert "told to drain" in ending.reason
        [leave] = control.leaves
        assert set(control.leased) == set(control.committed) | set(leave.unfinished)
        assert not set(control.committed) & set(leave.unfinished)
        assert control.destroyed == []


async def test_shutdown_hands_back_what_was_leased(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), agent_of(control, tmp_path / "node") as (_, life):
        control.status_of["commit"] = IntegrityError("commits are away")
        await eventually(lambda: len(control.leased) >= 4, "work is leased")
        control.shutdown = True
        ending = await asyncio.wait_for(life, 20)
        assert ending.code == 0
        [leave] = control.leaves
        assert set(leave.unfinished) == set(control.leased)
        assert control.destroyed == []


async def test_an_expired_lease_ends_the_node_and_its_machine(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), agent_of(control, tmp_path / "node") as (_, life):
        await eventually(lambda: len(control.committed) >= 1, "work is committed")
        control.lease_s = 0.5
        beats = len(control.beats)
        await eventually(lambda: len(control.beats) > beats, "the shorter lease was told")
        control.status_of["heartbeat"] = IntegrityError("heartbeats are away")
        ending = await asyncio.wait_for(life, 20)
        assert ending.code == 0
        assert "lease" in ending.reason
        assert len(control.leaves) == 1
        assert control.destroyed == ["4711"]


@pytest.mark.parametrize(("error", "code"), [(Gone("the lease is closed"), 0), (Unauthorized("who?"), 1)])
async def test_a_node_that_is_no_longer_known_ends(error: Gone | Unauthorized, code: int, tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), agent_of(control, tmp_path / "node") as (_, life):
        await eventually(lambda: len(control.beats) >= 1, "it lives")
        control.status_of["heartbeat"] = error
        ending = await asyncio.wait_for(life, 20)
        assert ending.code == code
        assert error.detail in ending.reason
        assert control.destroyed == ["4711"]


async def test_a_used_join_token_is_named_as_the_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        control.token_used = True
        async with agent_of(control, tmp_path / "node") as (_, life):
            ending = await asyncio.wait_for(life, 20)
        assert ending.code == 1
        assert "join token" in ending.reason
        assert JOIN_TOKEN not in ending.reason
        assert control.beats == []


async def test_finished_work_outlives_a_restart_of_the_control_service(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, server), agent_of(control, tmp_path / "node") as (_, life):
        await eventually(lambda: len(control.committed) >= 4, "work is committed")
        control.status_of["commit"] = IntegrityError("about to fall")
        await eventually(lambda: len(control.leased) > len(control.committed), "work is in flight")
        control.give_work = False
        await server.stop()
        kept = set(control.leased) - set(control.committed)
        assert kept
        control.status_of.clear()
        await server.start()
        await eventually(lambda: kept <= set(control.committed), "the kept work is committed")
        assert not life.done()


async def test_a_control_service_that_stays_away_ends_the_node_and_its_machine(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as (control, server),
        agent_of(control, tmp_path / "node", orphan_timeout_s=1.0) as (agent, life),
    ):
        await eventually(lambda: len(control.committed) >= 1, "work is committed")
        await server.stop()
        await eventually(lambda: agent._ending is not None and agent._ending.done(), "the node gives up", 20)
        # The marketplace was away with it, and is asked again.
        await server.start()
        ending = await asyncio.wait_for(life, 20)
        assert ending.code == 1
        assert "unreachable" in ending.reason
        assert control.destroyed == ["4711"]
        assert control.leaves == []


async def test_refused_work_is_counted_and_then_ends_the_node(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), agent_of(control, tmp_path / "node") as (_, life):
        control.refuse = True
        await eventually(lambda: control.refused >= 2, "two files were refused")
        control.refuse = False
        before = len(control.committed)
        await eventually(lambda: len(control.committed) > before, "it goes on after refusals")
        await eventually(lambda: control.beats[-1].errors.get("refused", 0) >= 2, "refusals are counted")
        control.refuse = True
        ending = await asyncio.wait_for(life, 30)
        assert ending.code == 1
        assert "refused" in ending.reason
        assert len(control.leaves) == 1


async def test_a_version_that_does_not_fit_is_reported_and_the_old_one_stays(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), agent_of(control, tmp_path / "node") as (_, life):
        await eventually(lambda: len(control.committed) >= 1, "work is committed")
        await control.publish_misfit(1)
        await eventually(lambda: len(control.faults) >= 1, "it is reported")
        assert control.reports[0].kind == "engine_error"
        assert control.faults[0].version == 1
        before = len(control.committed)
        await eventually(lambda: len(control.committed) > before + 4, "it works on")
        assert set(control.committed.values()) == {0}
        await control.publish(2)
        await eventually(lambda: 2 in control.committed.values(), "the next version is installed")
        assert not life.done()


async def test_a_node_serves_what_it_has_to_its_peers(tmp_path: Path, unused_tcp_port: int) -> None:
    relay = RelayAddress("127.0.0.1", unused_tcp_port, f"http://127.0.0.1:{unused_tcp_port}")
    async with running(tmp_path) as (control, _), agent_of(control, tmp_path / "node", relay=relay):
        await eventually(lambda: len(control.committed) >= 1, "work is committed")
        assert control.joins[0].relay_url == relay.public_url
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {RELAY_TOKEN}"}) as http:
            announced = await http.get(f"{relay.public_url}/snapshots/next?after=-1&wait_s=1")
            streamed = await http.get(f"{relay.public_url}/snapshots/0/stream?from_leaf=0")
        snapshot = control.store.get(0)
        assert snapshot is not None
        assert announced.content == snapshot.document
        assert streamed.content[8 : 8 + snapshot.manifest.payload_bytes] == snapshot.payload_path.read_bytes()
        await eventually(lambda: control.beats[-1].bytes_relayed > 0, "relayed bytes are counted")


async def test_a_complete_snapshot_on_disk_is_used_without_a_download(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        async with agent_of(control, tmp_path / "node") as (_, _):
            await eventually(lambda: len(control.committed) >= 1, "work is committed")
        store = SnapshotStore(
            tmp_path / "node" / "snapshots", job_id=JOB, public_key=control.key.public_key().public_bytes_raw().hex()
        )
        assert store.latest() is not None
        control.token_used = False
        control.committed.clear()
        control.beats.clear()
        async with agent_of(control, tmp_path / "node") as (_, _):
            await eventually(lambda: len(control.committed) >= 1, "work is committed again")
            assert control.beats[-1].bytes_from["learner"] == 0
