"""What a machine is told about its end: metadata services on loopback, the watch, the board."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone

import httpx
import pytest
from pydantic import ValidationError

from app.protocol.errors import BadInput, Unavailable
from app.protocol.node import Interruption
from app.rollout_agent.preemption.board import Board
from app.rollout_agent.preemption.gce import Gce
from app.rollout_agent.preemption.imds import Imds
from app.rollout_agent.preemption.metadata import Source
from app.rollout_agent.preemption.watch import Cloud, source_of, watch_machine
from tests.unit.rollout_agent.metadata_server import (
    ACTION,
    ADVICE,
    ADVISED,
    MAINTENANCE,
    PREEMPTED,
    WARNED,
    MetadataServer,
    metadata_server,
    until,
)

NOON = datetime(2026, 6, 1, 12, 2, tzinfo=UTC)
EC2_ENDS = Interruption(kind="interruption", source="ec2", at=NOON, detail="spot/instance-action: terminate")
EC2_MAY_END = Interruption(
    kind="rebalance", source="ec2", detail="events/recommendations/rebalance: 2026-06-01T11:50:00Z"
)
GCE_ENDS = Interruption(kind="interruption", source="gce", detail="instance/preempted: TRUE")
GCE_MAY_END = Interruption(
    kind="rebalance", source="gce", detail="instance/maintenance-event: TERMINATE_ON_HOST_MAINTENANCE"
)


@pytest.fixture(autouse=True)
def _a_proxy_that_must_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)


@pytest.fixture
async def server() -> AsyncIterator[MetadataServer]:
    async with metadata_server() as made:
        yield made


@pytest.fixture
async def imds(server: MetadataServer) -> AsyncIterator[Imds]:
    source = Imds(server.url)
    yield source
    await source.aclose()


@pytest.fixture
async def gce(server: MetadataServer) -> AsyncIterator[Gce]:
    server.values.update({PREEMPTED: "FALSE", MAINTENANCE: "NONE"})
    source = Gce(server.url)
    yield source
    await source.aclose()


async def test_ec2_says_nothing_until_it_says_when_the_machine_goes(server: MetadataServer, imds: Imds) -> None:
    assert await imds.poll() == []
    server.set(ADVICE, ADVISED)
    assert await imds.poll() == [EC2_MAY_END]
    server.set(ACTION, WARNED)
    assert await imds.poll() == [EC2_ENDS]
    assert server.tokens == 1


async def test_ec2_renews_a_spent_token_once(server: MetadataServer, imds: Imds) -> None:
    server.token_uses = 1
    server.set(ADVICE, ADVISED)
    assert await imds.poll() == [EC2_MAY_END]
    assert server.tokens == 2
    server.token_uses = 0
    with pytest.raises(Unavailable, match="401"):
        await imds.poll()


@pytest.mark.parametrize(
    "text", ["soon", "[]", "{}", '{"time": 3, "action": "stop"}', '{"time": "soon", "action": "stop"}',
             '{"time": "0001-01-01T00:00:00+14:00", "action": "stop"}', "<html>"],
)  # fmt: skip
async def test_ec2_s_rubbish_is_no_notice(server: MetadataServer, imds: Imds, text: str) -> None:
    server.set(ACTION, text)
    with pytest.raises(Unavailable, match=ACTION):
        await imds.poll()


async def test_an_instant_of_ec2_without_a_zone_is_utc_wherever_the_machine_stands(
    server: MetadataServer, imds: Imds, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set(ACTION, '{"action": "terminate", "time": "2026-06-01T12:02:00"}')
    with monkeypatch.context() as abroad:
        abroad.setenv("TZ", "XXX-5")
        time.tzset()
        assert await imds.poll() == [EC2_ENDS]
    time.tzset()


async def test_a_fault_of_the_service_is_no_notice(server: MetadataServer, imds: Imds, gce: Gce) -> None:
    server.set(ACTION, WARNED)
    server.set(PREEMPTED, "TRUE")
    server.status = 503
    for source in (imds, gce):
        with pytest.raises(Unavailable, match="503"):
            await source.poll()


async def test_gce_answers_at_once_when_the_machine_is_preempted(server: MetadataServer, gce: Gce) -> None:
    assert await gce.poll() == []
    waiting = asyncio.create_task(gce.poll())
    await until(lambda: server.held == 1)
    assert not waiting.done()
    server.set(PREEMPTED, "TRUE")
    assert await asyncio.wait_for(waiting, 10) == [GCE_ENDS]
    first, held = (query for path, query in server.asked if path == PREEMPTED)
    assert first == {}
    assert held == {"wait_for_change": "true", "timeout_sec": "20", "last_etag": "v1"}


async def test_the_question_that_gce_holds_back_is_waited_for_as_long_as_it_may_hold_it() -> None:
    """Longer than any other: else each of them would fail, and a preemption with it."""
    patience: list[tuple[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        patience.append((request.url.params.get("timeout_sec", "0"), request.extensions["timeout"]["read"]))
        text = "FALSE" if request.url.path.endswith("preempted") else "NONE"
        return httpx.Response(200, text=text, headers={"etag": "v1", "metadata-flavor": "Google"})

    gce = Gce(transport=httpx.MockTransport(answer))
    for _ in range(2):
        assert await gce.poll() == []
    await gce.aclose()
    assert [held for held, _ in patience] == ["0", "0", "20", "0"]
    assert all(float(held) < read < float(held) + 5 for held, read in patience)


async def test_gce_that_is_preempted_already_says_so_at_the_first_question(server: MetadataServer, gce: Gce) -> None:
    server.set(PREEMPTED, "TRUE")
    assert await gce.poll() == [GCE_ENDS]


async def test_gce_s_maintenance_is_a_weaker_notice_if_it_ends_the_machine(server: MetadataServer, gce: Gce) -> None:
    server.set(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
    assert await gce.poll() == []
    server.set(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    assert await gce.poll() == [GCE_MAY_END]


async def test_where_gce_has_no_such_value_there_is_no_notice(server: MetadataServer, gce: Gce) -> None:
    server.values.clear()
    server.flavor = ""
    assert await gce.poll() == []


async def test_what_is_not_google_s_server_gives_no_notice(server: MetadataServer, gce: Gce) -> None:
    server.set(PREEMPTED, "TRUE")
    server.flavor = ""
    with pytest.raises(Unavailable, match="not Google's"):
        await gce.poll()
    server.flavor = "Google"
    server.set(PREEMPTED, "<html>")
    with pytest.raises(Unavailable, match=PREEMPTED):
        await gce.poll()


class Script:
    """A metadata service whose polls are scripted; the last one is given for ever."""

    pause_s = 5.0

    def __init__(self, *polls: list[Interruption] | None) -> None:
        self.polls = list(polls)
        self.asked = 0
        self.slept: list[float] = []

    async def poll(self) -> list[Interruption]:
        self.asked += 1
        found = self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]
        if found is None:
            raise Unavailable("no route")
        return found

    async def aclose(self) -> None:
        self.polls = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


async def told_by(source: Script) -> list[Interruption]:
    """Everything that a watch which ends by itself tells."""
    told: list[Interruption] = []
    async with asyncio.timeout(10):
        await watch_machine(source, told.append, sleep=source.sleep)
    return told


async def test_each_notice_is_told_once_and_the_interruption_is_the_last() -> None:
    source = Script([], [EC2_MAY_END], [EC2_MAY_END], [EC2_ENDS])
    assert await told_by(source) == [EC2_MAY_END, EC2_ENDS]
    assert source.slept == [5.0, 5.0, 5.0]


async def test_a_machine_without_the_service_is_asked_three_times_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Script(None)
    with caplog.at_level(logging.INFO):
        assert await told_by(source) == []
    assert source.asked == 3
    assert [r.getMessage() for r in caplog.records] == ["this machine can't tell when it will be interrupted: no route"]


async def test_a_service_that_comes_up_late_or_fails_later_is_asked_on(caplog: pytest.LogCaptureFixture) -> None:
    source = Script(None, None, [], *[None] * 50, [], [GCE_ENDS])
    with caplog.at_level(logging.INFO):
        assert await told_by(source) == [GCE_ENDS]
    assert [r.getMessage() for r in caplog.records] == ["no notice of interruption can be seen for now: no route"]


@pytest.mark.parametrize(
    ("cloud", "path", "value", "expected"), [("ec2", ACTION, WARNED, EC2_ENDS), ("gce", PREEMPTED, "TRUE", GCE_ENDS)]
)
async def test_a_watch_sees_a_notice_of_either_cloud(
    server: MetadataServer, cloud: Cloud, path: str, value: str, expected: Interruption
) -> None:
    server.values[PREEMPTED] = "FALSE"
    host = server.url.removeprefix("http://")
    source = source_of(cloud, {"AWS_EC2_METADATA_SERVICE_ENDPOINT": server.url, "GCE_METADATA_HOST": host})
    assert source is not None
    source.pause_s = 0.01
    told: list[Interruption] = []
    watching = asyncio.create_task(watch_machine(source, told.append))
    await until(lambda: len(server.asked) >= 2)
    assert told == []
    server.set(path, value)
    await asyncio.wait_for(watching, 10)
    assert told == [expected]
    await source.aclose()


async def test_without_a_cloud_nobody_is_asked_and_a_bad_address_is_named() -> None:
    assert source_of("", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}) is None
    with pytest.raises(BadInput, match="AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        source_of("ec2", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://[::bad"})
    with pytest.raises(BadInput, match="GCE_METADATA_HOST"):
        source_of("gce", {"GCE_METADATA_HOST": "[::bad"})


async def test_the_clouds_own_addresses_are_asked() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        raise httpx.ConnectTimeout("no route")

    sources: list[Source] = [
        Imds(transport=httpx.MockTransport(answer)),
        Gce(transport=httpx.MockTransport(answer)),
    ]
    for source in sources:
        with pytest.raises(Unavailable, match="ConnectTimeout"):
            await source.poll()
        await source.aclose()
    assert asked == [
        "http://169.254.169.254/latest/api/token",
        "http://169.254.169.254/computeMetadata/v1/instance/preempted",
    ]


async def test_the_board_shows_a_notice_until_a_heartbeat_that_carried_it_was_answered() -> None:
    board = Board()
    assert await board.told(0.01)
    assert board.put(EC2_MAY_END)
    board.answered(None)
    assert board.pending is EC2_MAY_END
    # Told while a heartbeat with the weaker word is under way.
    assert board.put(EC2_ENDS)
    board.answered(EC2_MAY_END)
    assert board.pending is EC2_ENDS
    assert not await board.told(0.01)
    board.answered(EC2_ENDS)
    assert await board.told(0.01)
    # SIGTERM at the end of the two minutes: known already.
    assert not board.put(Interruption(kind="interruption", source="signal"))
    assert await board.told(0.01)


@pytest.mark.parametrize(("notice", "doomed"), [(EC2_MAY_END, False), (GCE_ENDS, True)])
def test_only_an_interruption_dooms_the_machine(notice: Interruption, doomed: bool) -> None:
    board = Board()
    assert board.put(notice)
    assert board.doomed is doomed


def test_an_instant_is_taken_as_utc_and_must_be_one() -> None:
    abroad = datetime(2026, 6, 1, 14, 2, tzinfo=timezone(timedelta(hours=2)))
    assert Interruption(kind="interruption", source="ec2", at=abroad).at == NOON
    for at in ("2026-06-01T12:02:00", "0001-01-01T00:00:00+14:00"):
        with pytest.raises(ValidationError):
            Interruption.model_validate_json(f'{{"kind": "interruption", "source": "ec2", "at": "{at}"}}')
