"""The user's own machines behind `providers.base.Provider`.

Invariant: a machine is taken by one ssh command, one instance at a time, and only what carries an instance's mark is
ever ended. A machine of ours that can't be reached is UNKNOWN, never free and never gone.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
    Phase,
    ProviderError,
    RentResult,
    RentSpec,
    Transient,
)

from . import scripts, ssh
from .machines import Machine
from .state import State, Taken

log = logging.getLogger(__name__)
OnRequest = Callable[[str, str, str], None]
AT_ONCE = 8
MAX_TAIL = 5000
QUIET = timedelta(minutes=5)


def _utc_now() -> datetime:
    return datetime.now(UTC)


def _key(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()


def instance_id_of(machine: str, label: str) -> str:
    """The same machine and label are the same instance."""
    return f"{machine}~{hashlib.sha256(label.encode()).hexdigest()[:16]}"


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
        names = {_key(name) for name in query.gpu_names}
        most = query.max_compute_micros_h
        return [
            self._offer(machine)
            for machine in self._machines.values()
            if self._state.of_machine(machine.name) is None
            and machine.name not in self._asked
            and (not names or _key(machine.gpu_name) in names)
            and (most is None or machine.price_micros_h <= most)
            and machine.reliability >= query.min_reliability
            and query.min_ports <= (1 if machine.relay_port else 0)
        ][: query.limit]

    def _offer(self, machine: Machine) -> Offer:
        return Offer(
            provider=self._name, offer_id=machine.name, machine_id=machine.name, gpu_name=machine.gpu_name,
            num_gpus=machine.num_gpus, gpu_ram_mb=machine.gpu_ram_mb, billing=Billing.ON_DEMAND,
            compute_micros_h=machine.price_micros_h, disk_micros_gb_month=0, upload_micros_gb=0, download_micros_gb=0,
            up_mbps=machine.up_mbps, down_mbps=machine.down_mbps, reliability=machine.reliability, region="",
            max_duration_s=None, dlperf=0.0, ports=1 if machine.relay_port else 0, fetched_at=self._clock(),
        )  # fmt: skip

    async def rent(self, offer: Offer, spec: RentSpec) -> RentResult:
        """One ssh command that starts the script. Raises only for orders that must not be sent."""
        machine = self._machines.get(offer.offer_id)
        if offer.billing is not Billing.ON_DEMAND:
            raise CapabilityError(f"own machines are never {offer.billing.value}: use on_demand")
        if machine is None or spec.bid_micros_h is not None or not spec.label or "\n" in spec.label:
            raise BadRequest("give an offer of this list, a label of one line, and no bid", provider=self._name)
        public = (machine.address, machine.relay_port) if machine.relay_port else None
        text = scripts.program(spec.onstart, spec.env, public, spec.ports)
        instance_id = instance_id_of(machine.name, spec.label)
        other = self._state.of_machine(machine.name)
        if machine.name in self._asked or (other is not None and other.instance_id != instance_id):
            busy = OfferGone(f"{machine.name} is taken: wait until it is released", provider=self._name)
            return RentResult("refused", error=busy)
        self._asked.add(machine.name)
        try:
            # Before the command: an answer that is lost must not make the machine look free.
            self._state.put(self._entry(machine, instance_id, spec))
            return await self._start(machine, instance_id, spec.label, text)
        finally:
            self._asked.discard(machine.name)

    def _entry(self, machine: Machine, instance_id: str, spec: RentSpec) -> Taken:
        ports = spec.ports[:1] if machine.relay_port else ()
        return Taken(
            instance_id, spec.label, machine.name, machine.address, machine.user, machine.port, machine.identity_file,
            machine.gpu_name, ports,
        )  # fmt: skip

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
            return scripts.read_check(answer)
        except scripts.Unclear as error:
            raise MalformedAnswer(f"{machine.name}: {error}", provider=self._name) from error

    def _instance(self, seen: scripts.Seen, machine: Machine) -> Instance:
        known = self._machines.get(machine.name, machine)
        entry = self._state.entries.get(seen.instance_id)
        ports = {port: known.relay_port for port in (entry.ports if entry else ()) if known.relay_port}
        return Instance(
            provider=self._name, instance_id=seen.instance_id, label=seen.label,
            phase=Phase.RUNNING if seen.running else Phase.FAILED, raw_status="running" if seen.running else "exited",
            detail="" if seen.running else "its script has ended: see the log", billing=Billing.ON_DEMAND,
            compute_micros_h=known.price_micros_h, machine_id=machine.name, gpu_name=known.gpu_name,
            started_at=datetime.fromtimestamp(seen.started_at, UTC) if seen.started_at is not None else None,
            public_host=machine.address if ports else None, ports=ports,
        )  # fmt: skip

    async def get(self, instance_id: str) -> Instance | None:
        """One instance; None only when its machine was reached and says that it has another or none."""
        machine = self._machine_of(instance_id)
        seen = await self._seen("show", machine)
        return self._instance(seen, machine) if seen is not None and seen.instance_id == instance_id else None

    def _unreached(self, entry: Taken, error: ProviderError) -> Instance:
        return Instance(
            provider=self._name, instance_id=entry.instance_id, label=entry.label, phase=Phase.UNKNOWN,
            raw_status="unreachable", detail=str(error), billing=Billing.ON_DEMAND, compute_micros_h=None,
            machine_id=entry.machine, gpu_name=entry.gpu_name, started_at=None,
        )  # fmt: skip

    async def list(self) -> Listing:
        """What runs on the machines: each is asked, for state files get lost and late commands still arrive.

        Raises AuthError when every machine that was asked refuses our key, MalformedAnswer when one that we took can't
        be understood. One that we did not take and that can't be asked is left alone for five minutes.
        """
        entries, now = self._state.entries, self._clock()
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
                found += [self._unreached(e, answer) for e in entries.values() if e.machine == machine.name]
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                found.append(self._instance(answer, machine))
        if refused and len(refused) == len(targets):
            self._quiet.clear()
            raise refused[0]
        self._forget(entries, found)
        return Listing(complete=True, instances=tuple(found))

    def _forget(self, before: Mapping[str, Taken], found: Sequence[Instance]) -> None:
        """Machines that were reached and have nothing of ours are free again."""
        shown = {instance.instance_id for instance in found}
        for entry in before.values():
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
