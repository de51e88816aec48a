"""The agent as a process: environment in, exit status and log out."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from app.protocol.node import Interruption, NodeState
from app.rollout_agent.agent import STOP_GRACE_S
from tests.integration.rollout_agent.fake_control import (
    JOIN_TOKEN,
    NODE_TOKEN,
    RELAY_TOKEN,
    Control,
    eventually,
    running,
)
from tests.unit.rollout_agent.metadata_server import ACTION, WARNED, metadata_server

REPOSITORY = Path(__file__).parents[3]


async def start(control: Control, folder: Path, **env: str) -> asyncio.subprocess.Process:
    """Start `python -m app.rollout_agent` for a control service."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "app.rollout_agent",
        cwd=REPOSITORY,
        env={
            **kept,
            "ECHO2_CONTROL_URL": control.base_url,
            "ECHO2_JOIN_TOKEN": JOIN_TOKEN,
            "ECHO2_AGENT_DIR": str(folder),
            "ECHO2_DEVICE": "cpu",
            **env,
        },
        stderr=asyncio.subprocess.PIPE,
    )


async def log_of(process: asyncio.subprocess.Process) -> str:
    """What it logged until its end."""
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    return stderr.decode()


async def test_a_signal_ends_a_working_agent_in_order(tmp_path: Path, unused_tcp_port: int) -> None:
    async with running(tmp_path) as (control, _):
        process = await start(
            control,
            tmp_path / "node",
            ECHO2_SIM_TOKENS_PER_S="200",
            ECHO2_BIND_7070=str(unused_tcp_port),
            PUBLIC_IPADDR="127.0.0.1",
            VAST_TCP_PORT_7070=str(unused_tcp_port),
        )
        try:
            await eventually(lambda: len(control.committed) >= 8, "work is committed", 60)
            await eventually(lambda: control.beats[-1].tokens_per_s is not None, "speed is told")
            process.send_signal(signal.SIGTERM)
            log = await log_of(process)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, log
        assert control.joins[0].relay_url == f"http://127.0.0.1:{unused_tcp_port}"
        assert control.beats[-1].state == NodeState.DRAINING
        assert (control.beats[-1].tokens_per_s or 0) <= 201
        [leave] = control.leaves
        assert set(leave.unfinished) == set(control.leased) - set(control.committed)
        for secret in (JOIN_TOKEN, NODE_TOKEN, RELAY_TOKEN, control.base_url + "/objects"):
            assert secret not in log


async def test_sigterm_in_the_middle_of_a_long_batch_hands_everything_back_in_time(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        control.heartbeat_s = 60.0
        control.max_tokens = 200
        # The self-test takes a second or two, one batch twice the grace.
        process = await start(control, tmp_path / "node", ECHO2_SIM_TOKENS_PER_S="100")
        try:
            await eventually(lambda: bool(control.leased), "it is at work", 60)
            process.send_signal(signal.SIGTERM)
            await eventually(lambda: bool(control.leaves), "it has left", STOP_GRACE_S + 5)
            log = await log_of(process)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, log
        [told] = [beat for beat in control.beats if beat.interruption is not None]
        assert told.state == NodeState.DRAINING
        assert told.interruption == Interruption(kind="interruption", source="signal", detail="SIGTERM")
        [leave] = control.leaves
        assert not control.committed, log
        # An item whose taking over was not heard in time is handed back once more.
        assert set(leave.unfinished) | set(control.begun) == set(control.leased), log
        heard = control.calls.index("heartbeat", len(control.calls) - 1 - control.calls[::-1].index("heartbeat"))
        # What was not begun may be given back on its own.
        after = [call for call in control.calls[heard + 1 :] if call != "report"]
        assert after in (["leave"], ["upload", "partials", "leave"]), "no more work is asked for"


async def test_a_machine_s_own_metadata_service_is_asked_and_not_through_the_proxy(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), metadata_server() as machine:
        machine.set(ACTION, WARNED)
        process = await start(
            control,
            tmp_path / "node",
            ECHO2_NOTICES="ec2",
            AWS_EC2_METADATA_SERVICE_ENDPOINT=machine.url,
            HTTP_PROXY="http://127.0.0.1:1",
            NO_PROXY=control.base_url.removeprefix("http://"),
        )
        try:
            await eventually(lambda: bool(control.leaves), "it has left", 60)
            log = await log_of(process)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, log
        assert "will be interrupted" in log
        [told] = [beat.interruption for beat in control.beats if beat.interruption is not None]
        assert told.detail == "spot/instance-action: terminate"
        assert len(control.leaves) == 1


async def test_a_used_join_token_is_a_fault_with_a_clear_message(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        control.token_used = True
        process = await start(control, tmp_path / "node")
        log = await log_of(process)
        assert process.returncode == 1
        assert "each token joins one node once" in log
        assert "Traceback" not in log
        assert JOIN_TOKEN not in log


async def test_a_bad_setting_is_named_before_anything_is_done(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _):
        process = await start(control, tmp_path / "node", ECHO2_ENGINE="magic")
        log = await log_of(process)
        assert process.returncode == 1
        assert "ECHO2_ENGINE 'magic' is not known" in log
        assert "Traceback" not in log
        assert not control.token_used, "the token is kept for a start that can work"
