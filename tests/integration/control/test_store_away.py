"""An object store that can't be used: who is told, what waits, what goes on. A real S3 client, and a server (moto)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from app.protocol.base import moment
from tests.integration.control.rig import World

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]
NAMES = "ECHO2_OBJECT_STORE_URL, ECHO2_S3_ENDPOINT_URL"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def port() -> int:
    """One that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def service(port: int) -> ThreadedMotoServer:
    """A store on that port, with the bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    url = f"http://127.0.0.1:{port}"
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket="bucket")
    return server


def s3(port: int) -> dict[str, str]:
    return {"object_store_url": "s3://bucket/echo2", "s3_endpoint_url": f"http://127.0.0.1:{port}"}


async def trouble(control: World) -> tuple[int, str]:
    """What /readyz says of the store."""
    answer: httpx.Response = await control.http.get("/readyz")
    return answer.status_code, answer.json().get("trouble", {}).get("object_store", "")


async def patient(control: World, seconds: float = 0.0) -> None:
    """A round that gets the store's answer, whatever else this computer does."""
    control.svc.core.store.patience_s = 20.0
    await control.round(seconds)


async def test_a_job_waits_for_a_store_that_is_not_there_and_says_so(
    open_world: OpenWorld, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(**s3(port)) as control:
        job_id = await control.create()
        began = control.clock.now
        for _ in range(3):
            await patient(control, 10)
        code, said = await trouble(control)
        assert code == 503
        assert said.startswith(f"{NAMES}: the object store of bucket bucket can't be reached")
        assert f"the object store can't be used; new jobs wait for it: {said}" in caplog.messages

        job = await control.job(job_id)
        assert (job["status"], job["status_reason"]) == ("pending", f"waits for the object store: {said}")
        assert job["status_since"] == moment(began + 10)
        assert (await control.kinds(job_id)).count("store_away") == 1
        assert control.supervisor.started == []

        server = service(port)
        try:
            await patient(control, 10)
            assert await trouble(control) == (200, "")
            job = await control.job(job_id)
            assert (job["status_reason"], job["status_since"]) == (
                "the learner loads the model and the task", moment(control.clock.now),
            )  # fmt: skip
            assert (await control.kinds(job_id))[-1] == "store_back"
            assert control.supervisor.started == [job_id]
        finally:
            server.stop()


async def test_missing_credentials_are_named(open_world: OpenWorld, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = service(port)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    try:
        async with open_world(**s3(port)) as control:
            job_id = await control.create()
            await patient(control)
            code, said = await trouble(control)
            assert code == 503
            assert said.startswith("AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY: ")
            assert (await control.job(job_id))["status_reason"] == f"waits for the object store: {said}"
    finally:
        server.stop()


async def test_a_store_that_is_briefly_away_disturbs_nobody_at_work(open_world: OpenWorld, port: int) -> None:
    server = service(port)
    async with open_world(**s3(port)) as control:
        try:
            job_id = await control.create(fleet={"max_nodes": 1})
            learner, (node,) = await control.running(job_id)
            await patient(control)
            assert await trouble(control) == (200, "")
        finally:
            server.stop()
        await node.beat()
        await learner.beat()
        control.clock.advance(31)
        await node.beat()
        await learner.beat()
        await patient(control, 30)
        assert control.svc.core.store.away is not None
        assert await trouble(control) == (200, "")
        assert (await control.job(job_id))["status"] == "provisioning"
        assert "store_away" not in await control.kinds(job_id)
        assert [x.state for x in await control.leases()] == ["active"]
        await control.rounds(7, 10, node, learner)
        assert (await trouble(control))[0] == 503
        assert [x.state for x in await control.leases()] == ["active"]


async def test_a_folder_that_is_gone_is_told_of_too(control: World, tmp_path: Path) -> None:
    await patient(control)
    assert await trouble(control) == (200, "")
    folder = tmp_path / "state" / "objects"
    folder.rename(tmp_path / "elsewhere")
    job_id = await control.create()
    await patient(control, 61)
    [reason] = [(await control.job(job_id))["status_reason"]]
    assert reason.startswith("waits for the object store: ECHO2_OBJECT_STORE_URL, ECHO2_STATE_DIR: ")
