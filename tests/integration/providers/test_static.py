"""Own machines: real processes on this computer behind a stand-in for ssh."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from providers import base
from providers.base import Billing, Offer, OfferQuery, Phase, RentSpec
from providers.static import Machine, Static, ssh
from providers.static.scripts import MARK

from .conformance.harness import until
from .conformance.harness_static import marked
from .emulators.ssh import SshEmulator

BOX = Machine("box1", "box1.test", "me", "RTX 4090", 2, 24_564, price_micros_h=0, relay_port=7071)
BOXES = (BOX, replace(BOX, name="box2", address="box2.test", relay_port=None))
LABEL = f"echo2:f{os.getpid()}:l"
"""Of this process alone: its machines all run here, and an instance's id follows from its label."""
SPEC = RentSpec(f"{LABEL}:1", "img", "sleep 600", {"ECHO2_JOIN_TOKEN": "jt_secret"}, 10.0, (7070,))
QUERY = OfferQuery(Billing.ON_DEMAND)


class Rig:
    """Two machines, and objects that know them."""

    def __init__(self, folder: Path) -> None:
        self.ssh = SshEmulator(folder / "ssh")
        self.state = folder / "deep" / "state.json"
        self.provider = self.another()

    def another(self, state: Path | None = None) -> Static:
        return Static(BOXES, state or self.state, ssh_executable=str(self.ssh.executable), stop_grace_s=0.5)

    async def offer(self) -> Offer:
        return (await self.provider.search(QUERY))[0]

    async def rent(self, **changes: Any) -> str:
        result = await self.provider.rent(await self.offer(), replace(SPEC, **changes))
        assert result.outcome == "created", result.error
        assert result.instance_id is not None
        return result.instance_id


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for instance_id in dict.fromkeys(rig.ssh.creates()):
        rig.ssh.down("box1.test", False)
        await rig.another(tmp_path / "clean-up.json").release(instance_id)


async def log(rig: Rig, instance_id: str, wanted: str) -> str:
    return await until(lambda: rig.provider.logs(instance_id, 50), lambda text: wanted in text, wanted)


async def test_the_script_runs_with_its_environment_and_no_secret_on_a_command_line(rig: Rig) -> None:
    show = 'echo "$ECHO2_JOIN_TOKEN $PUBLIC_IPADDR:$VAST_TCP_PORT_7070"; echo "it\'s; $HOME"; exec sleep 600'
    instance_id = await rig.rent(onstart=show, env={"ECHO2_JOIN_TOKEN": "jt_'secret\"$(id)"})
    text = await log(rig, instance_id, "it's; ")
    assert "jt_'secret\"$(id) box1.test:7071\n" in text
    assert str(rig.ssh.home("box1.test")) in text
    for call in rig.ssh.calls:
        assert "secret" not in json.dumps(call["argv"])
        assert call["argv"][-3:] == ["--", "box1.test", "bash -s"]
        assert "BatchMode=yes" in call["argv"]
    assert "jt_" not in rig.state.read_text()
    lines = await asyncio.to_thread(lambda: [Path(f"/proc/{p}/cmdline").read_bytes() for p in marked(instance_id)])
    assert not any(b"secret" in line for line in lines)


async def test_it_outlives_the_ssh_session_in_a_session_of_its_own(rig: Rig) -> None:
    instance_id = await rig.rent()
    pids = await asyncio.to_thread(marked, instance_id)
    assert pids
    assert {os.getsid(pid) for pid in pids} == {int((rig.ssh.home("box1.test") / ".echo2-machine/pid").read_text())}
    assert os.getsid(pids[0]) != os.getsid(0)


async def test_release_ends_what_was_started_and_nothing_else(rig: Rig) -> None:
    children = "trap '' TERM; setsid sleep 601 & sleep 602 & wait"
    bystander = await asyncio.create_subprocess_exec(
        "sleep", "603", env={MARK: "somebody-elses~0", "PATH": "/usr/bin:/bin"}
    )
    try:
        instance_id = await rig.rent(onstart=children)
        await until(lambda: asyncio.to_thread(marked, instance_id), lambda pids: len(pids) >= 3, "three processes")
        await rig.provider.release(instance_id)
        assert await asyncio.to_thread(marked, instance_id) == []
        assert bystander.returncode is None
        assert not (rig.ssh.home("box1.test") / ".echo2-machine").exists()
        await rig.provider.release(instance_id)
    finally:
        bystander.kill()
        await bystander.wait()


async def test_an_old_instances_release_leaves_its_successor_alone(rig: Rig) -> None:
    first = await rig.rent()
    await rig.provider.release(first)
    second = await rig.rent(label=f"{LABEL}:2")
    await rig.provider.release(first)
    assert await asyncio.to_thread(marked, second)
    assert await rig.provider.get(first) is None


async def test_a_taken_machine_is_not_offered_and_not_taken_twice(rig: Rig) -> None:
    offer = await rig.offer()
    results = await asyncio.gather(*(rig.provider.rent(offer, replace(SPEC, label=f"{LABEL}:{at}")) for at in range(4)))
    assert sorted(r.outcome for r in results) == ["created", "refused", "refused", "refused"]
    assert all(isinstance(r.error, base.OfferGone) for r in results if r.outcome == "refused")
    assert len(rig.ssh.creates()) == 1
    assert [o.offer_id for o in await rig.provider.search(QUERY)] == ["box2"]


async def test_two_controllers_can_t_both_have_a_machine(rig: Rig, tmp_path: Path) -> None:
    offer = await rig.offer()
    instance_id = await rig.rent()
    other = rig.another(tmp_path / "other.json")
    result = await other.rent(offer, replace(SPEC, label=f"{LABEL}o:1"))
    assert result.outcome == "refused"
    assert isinstance(result.error, base.OfferGone)
    assert await asyncio.to_thread(marked, instance_id)


async def test_state_survives_a_restart_and_its_loss(rig: Rig) -> None:
    instance_id = await rig.rent()
    again = rig.another()
    assert [o.offer_id for o in await again.search(QUERY)] == ["box2"]
    rig.state.unlink()
    forgetful = rig.another()
    listing = await forgetful.list()
    assert [(i.instance_id, i.label, i.phase) for i in listing.instances] == [(instance_id, SPEC.label, Phase.RUNNING)]


async def test_a_broken_state_file_is_not_taken_for_an_empty_one(rig: Rig) -> None:
    await rig.rent()
    rig.state.write_text("{")
    with pytest.raises(base.MalformedAnswer, match="mend it"):
        rig.another()


async def test_an_unreachable_machine_is_neither_gone_nor_free(rig: Rig) -> None:
    instance_id = await rig.rent()
    rig.ssh.down("box1.test")
    listing = await rig.provider.list()
    assert [(i.instance_id, i.label, i.phase) for i in listing.instances] == [(instance_id, SPEC.label, Phase.UNKNOWN)]
    assert [o.offer_id for o in await rig.provider.search(QUERY)] == ["box2"]
    for act in (rig.provider.get(instance_id), rig.provider.release(instance_id)):
        with pytest.raises(base.Transient):
            await act
    rig.ssh.down("box1.test", False)
    assert [i.phase for i in (await rig.provider.list()).instances] == [Phase.RUNNING]


async def test_a_list_that_asked_before_the_start_does_not_make_the_machine_free(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slow machine holds the list up; what another said at its beginning is old by its end."""
    checked, rented, run = asyncio.Event(), asyncio.Event(), ssh.run

    async def ordered(machine: Machine, script: str, *args: Any, **kwargs: Any) -> str | ssh.Failed:
        if "setsid" in script:
            await checked.wait()
            return await run(machine, script, *args, **kwargs)
        if machine.name == "box2":
            await rented.wait()
        answer = await run(machine, script, *args, **kwargs)
        if machine.name == "box1":
            checked.set()
        return answer

    monkeypatch.setattr(ssh, "run", ordered)
    offer = await rig.offer()
    renting = asyncio.create_task(rig.provider.rent(offer, SPEC))
    await asyncio.sleep(0)
    listing = asyncio.create_task(rig.provider.list())
    assert (await renting).outcome == "created"
    rented.set()
    assert (await listing).instances == ()
    assert [o.offer_id for o in await rig.provider.search(QUERY)] == ["box2"]
    assert len((await rig.provider.list()).instances) == 1
    rig.ssh.down("box1.test")
    assert [i.phase for i in (await rig.provider.list()).instances] == [Phase.UNKNOWN]


async def test_a_machine_that_is_off_refuses_and_stays_free(rig: Rig) -> None:
    rig.ssh.down("box1.test")
    result = await rig.provider.rent(await rig.offer(), SPEC)
    assert result.outcome == "refused"
    assert isinstance(result.error, base.Transient)
    assert [o.offer_id for o in await rig.provider.search(QUERY)] == ["box1", "box2"]


async def test_a_script_that_ended_is_failed_until_it_is_released(rig: Rig) -> None:
    instance_id = await rig.rent(onstart="echo bye; exit 3")
    await log(rig, instance_id, "bye")
    found = await until(
        lambda: rig.provider.get(instance_id), lambda i: i is not None and i.phase is Phase.FAILED, "the end"
    )
    assert found is not None
    assert found.raw_status == "exited"
    await rig.provider.release(instance_id)
    assert (await rig.provider.list()).instances == ()


async def test_where_a_published_port_is_reached(rig: Rig) -> None:
    instance_id = await rig.rent()
    found = await rig.provider.get(instance_id)
    assert found is not None
    assert (found.public_host, dict(found.ports), found.compute_micros_h) == ("box1.test", {7070: 7071}, 0)
    leaf = await rig.provider.rent((await rig.provider.search(QUERY))[0], replace(SPEC, label=f"{LABEL}:2"))
    assert leaf.instance_id is not None
    other = await rig.provider.get(leaf.instance_id)
    assert other is not None
    assert (other.public_host, dict(other.ports)) == (None, {})


async def test_a_missing_ssh_is_said_plainly(rig: Rig) -> None:
    lost = Static(BOXES, rig.state, ssh_executable="/nonexistent/ssh")
    result = await lost.rent(await rig.offer(), SPEC)
    assert result.outcome == "refused"
    assert "install an OpenSSH client" in str(result.error)


def test_the_real_ssh_takes_our_words(tmp_path: Path) -> None:
    from providers.static.ssh import command

    words = command(replace(BOX, address="203.0.113.1", identity_file=str(tmp_path / "id")))
    done = subprocess.run([words[0], "-G", *words[1:-1]], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr
    settings = done.stdout.splitlines()
    assert "user me" in settings
    assert "batchmode yes" in settings
    assert "connecttimeout 10" in settings
