"""The reaper, with the service down and beside a running one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from app.fleet.reaping import GRACE_S, Finding, Reaper, verdict
from app.protocol.errors import Unavailable
from app.reap import reap, status, text
from app.settings import Settings
from app.storage.models import Lease, LeaseState
from providers.base import AuthError, Phase
from tests.integration.control.conftest import BOTH
from tests.integration.control.fake_provider import FakeProvider, Outcome, Rented
from tests.integration.control.rig import World


def reaper(control: World, *, slept: list[float] | None = None) -> Reaper:
    """One over the same database, with a clock and sleep of the test's."""

    async def sleep(seconds: float) -> None:
        (slept if slept is not None else []).append(seconds)
        control.clock.advance(seconds)

    return Reaper(
        control.svc.core.db, {"marketplace": control.provider}, fleet_id="default", settle_s=90, clock=control.clock,
        sleep=sleep,
    )  # fmt: skip


def stray(provider: FakeProvider, label: str) -> Rented:
    """An instance that nobody knows of."""
    return provider.add_foreign(label)


async def force(control: World, **values: Any) -> None:
    """Change all leases in the database."""
    async with control.svc.core.db.write() as session:
        await session.execute(update(Lease).values(**values))


def by_instance(findings: list[Finding]) -> dict[str, Finding]:
    return {f.instance_id: f for f in findings}


@pytest.mark.parametrize("state", list(LeaseState))
def test_verdict(state: LeaseState) -> None:
    lease = Lease(state=state, created_at=0.0, expires_at=1000.0)
    young, old = (verdict(lease, False, now, 90) for now in (89.0, 90.0))
    unsettled = state in (LeaseState.INTENT, LeaseState.UNKNOWN)
    live = state in (LeaseState.BOOTING, LeaseState.ACTIVE)
    assert bool(young) == (not live and not unsettled)
    assert bool(old) == (not live)
    assert verdict(lease, True, 90.0, 90)
    assert bool(verdict(lease, False, 1000 + GRACE_S, 1e9)) == (not live and not unsettled)
    assert verdict(lease, False, 1001 + GRACE_S, 90)
    assert verdict(None, False, 0.0, 90)


@BOTH
async def test_service_down_what_has_no_live_lease_is_destroyed_and_nothing_else(
    control: World, provider: FakeProvider
) -> None:
    job_id = await control.create()
    _, (node,) = await control.running(job_id)
    lost = stray(provider, "echo2:default:lease_ffff:1")
    others = [stray(provider, label) for label in ("", "mine", "echo2:other:lease_1:1", "echo2:default2:lease_1:1")]
    going = stray(provider, "echo2:default:lease_going:1")
    going.phase = Phase.TERMINATING
    tool = reaper(control)
    dry = await tool.run(dry_run=True)
    assert len(provider.live()) == 7
    assert {f.instance_id: f.action for f in dry} == {"1": "kept", lost.instance_id: "would be destroyed"}
    assert status(dry) == 0

    done = by_instance(await tool.run(dry_run=False))
    assert done[lost.instance_id].action == "destroyed"
    assert done["1"].action == "kept"
    assert {r.instance_id for r in provider.live()} == {"1", going.instance_id, *(o.instance_id for o in others)}
    assert "reaped" in await control.kinds()
    await node.beat()
    assert (await control.leases())[0].state == "active"
    assert await tool.run(dry_run=False) == [done["1"]]


async def test_what_it_cost_until_the_reaper_came_is_in_the_ledger(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    await control.running(job_id)
    # The service dies; nobody renews anything for longer than the lease.
    control.clock.advance(6 * 3600 + GRACE_S + 60)
    (found,) = await reaper(control).run(dry_run=False)
    assert found.action == "destroyed"
    assert "nobody renewed it" in found.why
    true = provider.cost()
    (lease,) = await control.leases()
    assert (lease.spent_gpu, lease.spent_disk) == (int(true["gpu"]), int(true["disk"]))
    assert lease.state == "releasing"
    control.clock.advance(3600)
    await control.restart()
    await control.round(1)
    first, *_ = await control.leases()
    assert first.state == "released"
    assert (first.spent_gpu, first.spent_disk) == (int(true["gpu"]), int(true["disk"]))


@pytest.mark.parametrize("outcome", ["unknown_created", "created"])
async def test_crash_between_create_and_answer(control: World, provider: FakeProvider, outcome: Outcome) -> None:
    provider.outcomes, provider.listing_lag_s = deque([outcome]), 40
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    await force(control, state=LeaseState.INTENT, instance_id=None, exists_since=None, disk_until=None)
    control.clock.advance(60)
    slept: list[float] = []
    tool = reaper(control, slept=slept)
    assert [f.action for f in await tool.run(dry_run=False)] == ["kept"], "younger than settle_seconds"
    control.clock.advance(40)
    (found,) = await tool.run(dry_run=False)
    assert found.action == "destroyed"
    assert slept == [30.0]
    assert provider.live() == []
    true = provider.cost()
    (lease,) = await control.leases()
    assert (lease.spent_gpu, lease.spent_disk) == (int(true["gpu"]), int(true["disk"]))


async def test_running_service_that_adopts_meanwhile_is_left_alone(control: World, provider: FakeProvider) -> None:
    provider.outcomes, provider.listing_lag_s = deque(["unknown_created"]), 95
    job_id = await control.create()
    await control.ready_learner(job_id)
    await control.round()
    control.clock.advance(100)

    async def service_goes_on(seconds: float) -> None:
        await control.round(seconds)

    tool = Reaper(
        control.svc.core.db, {"marketplace": provider}, fleet_id="default", settle_s=90, clock=control.clock,
        sleep=service_goes_on,
    )  # fmt: skip
    assert [f.action for f in await tool.run(dry_run=False)] == ["kept"]
    assert len(provider.live()) == 1


async def test_ghost_of_a_released_lease_and_a_twin_are_destroyed(control: World, provider: FakeProvider) -> None:
    job_id = await control.create()
    await control.running(job_id)
    (lease,) = await control.leases()
    twin = stray(provider, lease.label)
    found = by_instance(await reaper(control).run(dry_run=False))
    assert found[twin.instance_id].action == "destroyed"
    assert "lives on instance 1" in found[twin.instance_id].why
    assert found["1"].action == "kept"
    await force(control, state=LeaseState.RELEASED, ended_at=control.clock())
    control.clock.advance(100)
    (ghost,) = await reaper(control).run(dry_run=False)
    assert (ghost.action, ghost.why) == ("destroyed", "its lease is released")
    assert provider.live() == []


async def test_what_cannot_be_read_or_destroyed_fails_the_run_and_hides_nothing(
    control: World, provider: FakeProvider
) -> None:
    stray(provider, "echo2:default:lease_ffff:1")
    provider.release_failures = 1
    first = await reaper(control).run(dry_run=False)
    assert status(first) == 1
    assert "try again in 60 s" in text(first)
    assert (await reaper(control).run(dry_run=False))[0].action == "destroyed"
    provider.incomplete = True
    assert status(await reaper(control).run(dry_run=False)) == 1
    provider.list_error = AuthError("bad key")
    refused = await reaper(control).run(dry_run=False)
    assert (status(refused), refused[0].why) == (1, "provider_auth: bad key")
    job_id = await control.create()
    provider.list_error, provider.incomplete = None, False
    await control.running(job_id)
    blind = Reaper(control.svc.core.db, {}, fleet_id="default", settle_s=90, clock=control.clock)
    (unnamed,) = await blind.run(dry_run=False)
    assert (unnamed.provider, unnamed.failed) == ("marketplace", True)


@pytest.mark.parametrize("kind", ["missing", "empty"])
async def test_without_its_database_nothing_is_destroyed(tmp_path: Path, provider: FakeProvider, kind: str) -> None:
    stray(provider, "echo2:default:lease_ffff:1")
    path = tmp_path / "state" / "echo2.db"
    if kind == "empty":
        path.parent.mkdir()
        path.touch()
    with pytest.raises(Unavailable, match="nothing is destroyed"):
        await reap(Settings(state_dir=tmp_path / "state"), dry_run=False, providers=lambda _: {"marketplace": provider})
    assert len(provider.live()) == 1
    assert path.exists() == (kind == "empty")


def test_command_says_so_and_exits_1_without_a_database(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")} | {"ECHO2_STATE_DIR": str(tmp_path / "s")}
    command = [sys.executable, "-m", "app.cli", "reap", "--dry-run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("unavailable: there is no database at")
    assert not (tmp_path / "s").exists()


def test_command_with_a_database_and_a_market_that_does_not_answer(tmp_path: Path, sqlite_template: Path) -> None:
    (tmp_path / "echo2.db").write_bytes(sqlite_template.read_bytes())
    env = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")} | {
        "ECHO2_STATE_DIR": str(tmp_path), "ECHO2_MARKETPLACE_URL": "http://127.0.0.1:9",
    }  # fmt: skip
    command = [sys.executable, "-m", "app.cli", "reap", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)
    assert (row["provider"], row["failed"]) == ("marketplace", True)


def test_empty_market_is_a_sentence() -> None:
    assert text([]) == "no instance carries this fleet's label"
