"""The user's own machines behind `providers.base.Provider`.

Invariant: a machine is taken by one ssh command, one instance at a time, and only what carries an instance's mark is
ever ended. A machine of ours that can't be reached is UNKNOWN, never free and never gone.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from providers.base import (
    AuthError,
    BadRequest,
    Balance,
    Billing,
    CapabilityError,
    Caps,
    Charge,
    Instance,
    Listing,
    MalformedAnswer,
    Notice,
    Offer,
    OfferGone,
    OfferQuery,
    ProviderError,
    RentResult,
    RentSpec,
    Transient,
)

from . import scripts, shapes, ssh
from .machines import Machine
from .state import State, Taken

log = logging.getLogger(__name__)
OnRequest = Callable[[str, str, str], None]
AT_ONCE = 8
MAX_TAIL = 5000
QUIET = timedelta(minutes=5)


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Static:
    """The machines of one list. `state_file` belongs to this object alone; `ssh_executable` is looked up on PATH.

    `on_request(provider, call, outcome)` is told of each ssh command: "ok", "unknown" or an error's code.
    """

    def __init__(
        self, machines: Sequence[Machine], state_file: Path, name: str = "static", *, ssh_executable: str = "ssh",
        clock: Callable[[], datetime] = _utc_now, timeout_s: float = ssh.COMMAND_S,
        stop_grace_s: float = scripts.STOP_GRACE_S, on_request: OnRequest | None = None,
    ) -> None:  # fmt: skip
        self._name = name
        self._machines = {machine.name: machine for machine in machines}
        self._state = State(state_file)
        self._ssh = ssh_executable
        self._clock = clock
        self._timeout_s = timeout_s
        self._stop_grace_s = stop_grace_s
        self._on_request = on_request
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._asked: set[str] = set()
        self._quiet: dict[str, datetime] = {}

    def __repr__(self) -> str:
        return f"Static(name={self._name!r}, machines={len(self._machines)})"

    @property
    def name(self) -> str:
        """Name used in settings, leases and offers."""
        return self._name

    @property
    def caps(self) -> Caps:
        """A fixed price, no bids, no bill. The label is the key under which an instance is made once."""
        return Caps(
            spot=False, change_bid=False, bandwidth_billed=False, idempotency_key=True, prepaid=False,
            pulls_image=False,
        )  # fmt: skip

    async def _run(self, call: str, machine: Machine, script: str) -> str | ssh.Failed:
        async with self._slots:
            answer = await ssh.run(
                machine, script, self._name, executable=self._ssh, timeout_s=self._timeout_s
            )  # fmt: skip
        if self._on_request is not None:
            self._on_request(self._name, call, answer.error.code if isinstance(answer, ssh.Failed) else "ok")
        return answer

    async def _ask(self, call: str, machine: Machine, script: str) -> str:
        answer = await self._run(call, machine, script)
        if isinstance(answer, ssh.Failed):
            raise answer.error
        return answer

    def _machine_of(self, instance_id: str) -> Machine:
        """The machine of an instance as it was when it was taken, else as it is listed now."""
        entry = self._state.entries.get(instance_id)
        if entry is not None:
            return Machine(
                entry.machine, entry.address, entry.user, entry.gpu_name, port=entry.port,
                identity_file=entry.identity_file,
            )  # fmt: skip
        name, mark, _ = instance_id.rpartition("~")
        if not mark or name not in self._machines:
            raise BadRequest(f"{instance_id[:80]!r} is on no machine of the list", provider=self._name)
        return self._machines[name]

    async def search(self, query: OfferQuery) -> list[Offer]:
        """The machines that nothing of ours runs on and that pass `query`. Asks nobody."""
        if query.billing is not Billing.ON_DEMAND:
            raise CapabilityError(f"own machines are never {query.billing.value}: use on_demand")
        return [
            shapes.offer(machine, self._name, self._clock())
            for machine in self._machines.values()
            if self._state.of_machine(machine.name) is None
            and machine.name not in self._asked
            and shapes.passes(machine, query)
        ][: query.limit]

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """One ssh command that starts the script. Raises only for orders that must not be sent."""
        machine = self._machines.get(offer.offer_id)
        if offer.billing is not Billing.ON_DEMAND:
            raise CapabilityError(f"own machines are never {offer.billing.value}: use on_demand")
        if machine is None or spec.bid_micros_h is not None or not spec.label or "\n" in spec.label:
            raise BadRequest("give an offer of this list, a label of one line, and no bid", provider=self._name)
        public = (machine.address, machine.relay_port) if machine.relay_port else None
        text = scripts.program(spec.onstart, spec.env, public, spec.ports)
        instance_id = shapes.instance_id_of(machine.name, spec.label)
        other = self._state.of_machine(machine.name)
        if machine.name in self._asked or (other is not None and other.instance_id != instance_id):
            busy = OfferGone(f"{machine.name} is taken: wait until it is released", provider=self._name)
            return RentResult("refused", error=busy)
        self._asked.add(machine.name)
        try:
            # Before the command: an answer that is lost must not make the machine look free.
            self._state.put(shapes.taken(machine, instance_id, spec))
            return await self._start(machine, instance_id, spec.label, text)
        finally:
            self._asked.discard(machine.name)

    async def _start(self, machine: Machine, instance_id: str, label: str, text: str) -> RentResult:
        answer = await self._run("create", machine, scripts.start(instance_id, label, text))
        if isinstance(answer, ssh.Failed):
            if answer.reached:
                return RentResult("unknown", error=answer.error)
            self._state.drop(instance_id)
            return RentResult("refused", error=answer.error)
        try:
            said = scripts.verdict(answer, "@started", "@busy")
        except scripts.Unclear as error:
            return RentResult("unknown", error=MalformedAnswer(f"{machine.name}: {error}", provider=self._name))
        if said == "@started":
            return RentResult("created", instance_id=instance_id)
        self._state.drop(instance_id)
        return RentResult("refused", error=OfferGone(f"{machine.name} is busy for somebody else", provider=self._name))

    async def _seen(self, call: str, machine: Machine) -> scripts.Seen | None:
        answer = await self._ask(call, machine, scripts.check())
        try:
            return scripts.read_check(answer, self._clock().timestamp())
        except scripts.Unclear as error:
            raise MalformedAnswer(f"{machine.name}: {error}", provider=self._name) from error

    def _instance(self, seen: scripts.Seen, machine: Machine) -> Instance:
        known, entry = self._machines.get(machine.name, machine), self._state.entries.get(seen.instance_id)
        return shapes.instance(seen, machine, known, entry, self._name)

    async def get(self, instance_id: str) -> Instance | None:
        """One instance; None only when its machine was reached and says that it has another or none."""
        machine = self._machine_of(instance_id)
        seen = await self._seen("show", machine)
        return self._instance(seen, machine) if seen is not None and seen.instance_id == instance_id else None

    async def list(self) -> Listing:
        """What runs on the machines: each is asked, for state files get lost and late commands still arrive.

        Raises AuthError when every machine that was asked refuses our key, MalformedAnswer when one that we took can't
        be understood. One that we did not take and that can't be asked is left alone for five minutes.
        """
        entries, now, asked = self._state.entries, self._clock(), set(self._asked)
        taken = {entry.machine: self._machine_of(entry.instance_id) for entry in entries.values()}
        free = {name: machine for name, machine in self._machines.items() if self._quiet.get(name, now) <= now}
        targets = {**free, **taken}
        answers = await asyncio.gather(
            *(self._seen("list", machine) for machine in targets.values()), return_exceptions=True
        )
        found: builtins.list[Instance] = []
        refused: builtins.list[AuthError] = []
        for machine, answer in zip(targets.values(), answers, strict=True):
            if isinstance(answer, ProviderError):
                if isinstance(answer, MalformedAnswer) and machine.name in taken:
                    raise answer
                if isinstance(answer, AuthError):
                    refused.append(answer)
                log.warning("%s: %s could not be asked: %s", self._name, machine.name, answer)
                self._quiet[machine.name] = now + QUIET
                found += [
                    shapes.unreached(e, answer, self._name) for e in entries.values() if e.machine == machine.name
                ]
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                found.append(self._instance(answer, machine))
        if refused and len(refused) == len(targets):
            self._quiet.clear()
            raise refused[0]
        self._forget([one for one in entries.values() if one.machine not in asked], found)
        return Listing(complete=True, instances=tuple(found))

    def _forget(self, before: Sequence[Taken], found: Sequence[Instance]) -> None:
        """Machines that were reached and have nothing of ours are free again: those that nobody was about to start
        something on when they were asked, `before`, and nobody is now."""
        shown = {instance.instance_id for instance in found}
        for entry in before:
            if entry.instance_id not in shown and entry.machine not in self._asked:
                self._state.drop(entry.instance_id)

    async def release(self, instance_id: str) -> None:
        """End the instance's processes and give its machine back. Returns when they are gone."""
        machine = self._machine_of(instance_id)
        answer = await self._ask("destroy", machine, scripts.stop(instance_id, self._stop_grace_s))
        try:
            said = scripts.verdict(answer, "@gone", "@alive")
        except scripts.Unclear as error:
            raise MalformedAnswer(f"{machine.name}: {error}", provider=self._name) from error
        if said == "@alive":
            raise Transient(f"processes of {instance_id} outlived SIGKILL", provider=self._name)
        self._state.drop(instance_id)

    async def set_bid(self, instance_id: str, bid_micros_h: int) -> None:
        """There are no bids."""
        raise CapabilityError("own machines take no bids", provider=self._name)

    async def logs(self, instance_id: str, tail: int) -> str:
        """The last lines that the script and its children printed."""
        machine = self._machine_of(instance_id)
        answer = await self._ask("logs", machine, scripts.logs(instance_id, max(1, min(tail, MAX_TAIL))))
        return answer.partition("@log\n")[2]

    async def balance(self) -> Balance:
        """Nobody is paid through us."""
        raise CapabilityError("own machines have no balance", provider=self._name)

    async def charges(self, since: datetime) -> Sequence[Charge]:
        """There is no bill."""
        return []

    async def notices(self) -> AsyncIterator[Notice]:
        """Nobody sends any: ends at once."""
        nothing: tuple[Notice, ...] = ()
        for notice in nothing:
            yield notice

    async def aclose(self) -> None:
        """Nothing is open."""
