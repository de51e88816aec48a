"""The adapter for own machines in front of a stand-in for ssh that runs everything on this computer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from providers.base import Billing, Offer, OfferQuery, Provider, ProviderError, RentSpec
from providers.static import Machine, Static
from providers.static.scripts import MARK

from ..emulators.ssh import SshEmulator
from .harness import UNKNOWN_GPU, Harness, Registered, rent_spec

SECRET = "jt_conformance_0123456789"


def _fleet() -> list[Machine]:
    one = Machine("box1", "box1.test", "me", "RTX 4090", 1, 24_564, price_micros_h=200_000, relay_port=7071)
    return [
        one,
        replace(one, name="box2", address="box2.test", price_micros_h=300_000),
        replace(one, name="box3", address="box3.test", gpu_name=UNKNOWN_GPU),
    ]


def marked(instance_id: str) -> list[int]:
    """Process ids that carry an instance's mark."""
    wanted = f"{MARK}={instance_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


class _Static:
    def __init__(self, folder: Path) -> None:
        self._ssh = SshEmulator(folder / "ssh")
        self._state = folder / "state.json"
        self._provider = self._adapter(_fleet(), self._state)
        self._foreign = 0

    def _adapter(self, machines: Sequence[Machine], state: Path) -> Static:
        return Static(machines, state, ssh_executable=str(self._ssh.executable), stop_grace_s=0.5)

    @property
    def provider(self) -> Provider:
        return self._provider

    @property
    def secret(self) -> str:
        return SECRET

    def with_wrong_key(self) -> Provider:
        wrong = [replace(machine, identity_file="wrong") for machine in _fleet()]
        return self._adapter(wrong, self._state.with_name("wrong.json"))

    def query(self) -> OfferQuery:
        return OfferQuery(Billing.ON_DEMAND)

    def spec(self, offer: Offer, label: str) -> RentSpec:
        return replace(rent_spec(offer, label, ports=(7070,)), env={"ECHO2_JOIN_TOKEN": SECRET})

    async def calls(self) -> int:
        return len(self._ssh.calls)

    async def creates(self) -> int:
        return len(self._ssh.creates()) - self._foreign

    async def create_tokens(self) -> Sequence[str]:
        return self._ssh.creates()

    async def ignore_filters(self) -> None:
        """The list is ours: nobody else filters it."""

    async def garble_next_search(self) -> None:
        raise AssertionError("a search asks nobody")

    async def refuse_next_create(self) -> None:
        self._ssh.fail("create", "busy")

    async def lose_next_create(self, *, created: bool) -> None:
        self._ssh.fail("create", "done_then_lost" if created else "lost")

    async def hide_new(self) -> None:
        raise AssertionError("a machine knows at once what it runs")

    async def show_new(self) -> None:
        """The end of `hide_new`."""

    async def truncate_next_listing(self) -> None:
        raise AssertionError("there are no pages")

    async def garble_next_listing(self) -> None:
        self._ssh.fail("show", "noise", "noise", "noise")

    async def vanish(self, instance_id: str) -> None:
        await self._adapter(_fleet(), self._state.with_name("other.json")).release(instance_id)

    async def preempt(self, instance_id: str) -> None:
        for pid in await asyncio.to_thread(marked, instance_id):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def announce(self, instance_id: str) -> None:
        raise AssertionError(f"nobody announces anything, {instance_id} included")

    async def fail_releases(self, count: int) -> None:
        self._ssh.fail("destroy", *["lost"] * count)

    async def add_foreign(self, label: str) -> str:
        other = self._adapter([_fleet()[2]], self._state.with_name("foreign.json"))
        offer = (await other.search(self.query()))[0]
        result = await other.rent(offer, self.spec(offer, label))
        assert result.instance_id is not None
        self._foreign += 1
        return result.instance_id

    async def close(self) -> None:
        """End whatever a test left running."""
        for instance_id in dict.fromkeys(self._ssh.creates()):
            with suppress(ProviderError):
                await self.vanish(instance_id)


@asynccontextmanager
async def open_harness(folder: Path) -> AsyncIterator[Harness]:
    """Three machines that are folders of this computer."""
    harness = _Static(folder)
    try:
        yield harness
    finally:
        await harness.close()


REGISTERED = Registered(
    "static", open_harness,
    not_applicable={
        "test_search_raises_on_an_answer_that_can_t_be_read": "a search asks nobody",
        "test_get_sees_an_instance_while_the_list_lags": "the list asks the machines themselves",
        "test_a_listing_with_a_hole_is_never_passed_as_complete": "there are no pages",
        "test_a_notice_reaches_us": "nobody sends notices",
    },
)  # fmt: skip
