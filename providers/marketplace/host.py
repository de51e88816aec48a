"""The hands of the market: starts, watches and ends the processes that the contracts' states ask for.

Invariant: a process lives only while its contract is running (plus the grace of a stop); a machine is vacated only
after a look that found none of its processes alive.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from . import auction
from .clock import NS
from .contract import Contract, State
from .gateway import Link, PortForward, SocksGateway, close_all, free_port
from .market import Market
from .processes import MachineProcess

log = logging.getLogger(__name__)
SAVE_NS = NS
CLOSING_S = 3.0
"""The grace when the marketplace itself ends: whoever would take what machines still have to say ends, too."""


@dataclass(slots=True)
class Box:
    """What runs for one contract."""

    process: MachineProcess
    gateway: SocksGateway
    forwards: dict[int, PortForward] = field(default_factory=dict)
    kill_ns: int | None = None
    """When SIGKILL is due; None while it may run."""


class Host:
    """Reconciles processes with contracts. `public_url` is what machines see as the provider's address."""

    def __init__(self, market: Market, public_url: str) -> None:
        self.market = market
        self.public_url = public_url
        self._boxes: dict[int, Box] = {}
        self._saved_ns = 0
        self._grace_s = market.config.stop_grace_s
        self._tasks: set[asyncio.Task[None]] = set()

    def log_path(self, instance_id: int) -> Path:
        """Where an instance's output goes."""
        return self.market.config.state_dir / "logs" / f"{instance_id}.log"

    def _folder(self, instance_id: int) -> Path:
        return self.market.config.state_dir.absolute() / "machines" / str(instance_id)

    def running(self) -> dict[int, int]:
        """Instance to process id, for every machine with a process not yet known to be gone."""
        return {number: box.process.pid for number, box in self._boxes.items()}

    async def tick(self) -> None:
        """One round: decide, start, watch, end, save."""
        auction.decide(self.market)
        held = {m.tenant for m in self.market.machines.values() if m.tenant is not None} | set(self._boxes)
        for contract in [self.market.contracts[number] for number in sorted(held)]:
            box = self._boxes.get(contract.id)
            if box is None:
                await self._without_process(contract)
            else:
                await self._with_process(contract, box)
        now = self.market.clock.now_ns()
        if now - self._saved_ns >= SAVE_NS:
            self._saved_ns = now
            self.market.settle_all()
            self.market.save()

    async def _without_process(self, contract: Contract) -> None:
        if contract.state is State.LOADING and self.market.clock.now_ns() >= contract.due_ns:
            await self._start(contract)
        elif contract.state is State.DESTROYED and self.market.machine_of(contract).tenant == contract.id:
            self._vacate(contract)

    async def _with_process(self, contract: Contract, box: Box) -> None:
        if contract.state is State.RUNNING and box.kill_ns is None:
            code = box.process.exit_code()
            if code is not None:
                self.market.exited(contract, code)
        if contract.state is not State.RUNNING or box.kill_ns is not None:
            await self._end(contract, box)

    async def _end(self, contract: Contract, box: Box) -> None:
        now = self.market.clock.now_ns()
        if box.kill_ns is None:
            grace = 0.0 if contract.state is State.OFFLINE else self._grace_s
            box.kill_ns = now + int(grace * NS)
            if grace:
                box.process.terminate()
        if now >= box.kill_ns:
            box.process.kill()
        if box.process.alive():
            return
        await close_all(box.gateway.close(), *(forward.close() for forward in box.forwards.values()))
        del self._boxes[contract.id]
        contract.pid = None
        if contract.state is State.DESTROYED:
            self._vacate(contract)

    def _vacate(self, contract: Contract) -> None:
        self.market.vacate(contract)
        cleaning = asyncio.ensure_future(asyncio.to_thread(shutil.rmtree, self._folder(contract.id), True))
        self._tasks.add(cleaning)
        cleaning.add_done_callback(self._tasks.discard)

    async def _start(self, contract: Contract) -> None:
        market = self.market
        spec = market.machine_of(contract).spec
        link = market.links.setdefault(contract.id, Link(spec.inet_up, spec.inet_down))
        gateway = SocksGateway(link)
        await gateway.open()
        forwards: dict[int, PortForward] = {}
        binds = {port: free_port() for port in contract.order.ports}
        for port, private in binds.items():
            forwards[port] = PortForward(link, "127.0.0.1", private)
            await forwards[port].open()
        contract.public_ports = {port: forward.port for port, forward in forwards.items()}
        # The awaits above let a request in: the contract may have been stopped or destroyed meanwhile.
        if contract.state is not State.LOADING:
            await close_all(gateway.close(), *(forward.close() for forward in forwards.values()))
            return
        env = self._environment(contract, gateway.port, binds)
        process = MachineProcess(
            contract.order.onstart, self._folder(contract.id), self.log_path(contract.id), env, contract.api_key
        )
        self._boxes[contract.id] = Box(process, gateway, forwards)
        market.running(contract, process.pid, process.started)
        log.info("instance %d runs on machine %d as process %d", contract.id, contract.machine_id, process.pid)

    def _environment(self, contract: Contract, gateway_port: int, binds: dict[int, int]) -> dict[str, str]:
        spec = self.market.machine_of(contract).spec
        system = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(self._folder(contract.id)),
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "OMP_NUM_THREADS": "1",
            # An image would bring its font cache along; making one anew takes each machine seconds.
            "MPLCONFIGDIR": str(self.market.config.state_dir.absolute() / "matplotlib"),
        }
        provider = {
            "CONTAINER_ID": str(contract.id),
            "CONTAINER_API_KEY": contract.api_key,
            "VAST_URL": self.public_url,
            "PUBLIC_IPADDR": "127.0.0.1",
            "GPU_COUNT": str(spec.num_gpus),
            "ECHO2_GPU_NAME": spec.gpu_name,
            "ECHO2_SIM_TOKENS_PER_S": str(spec.speed),
            "ALL_PROXY": f"socks5://127.0.0.1:{gateway_port}",
            "NO_PROXY": "",
        }
        # What an image would have: an interpreter with vLLM.
        image = {name: os.environ[name] for name in ("ECHO2_VLLM_PYTHON",) if name in os.environ}
        ports = {f"VAST_TCP_PORT_{port}": str(public) for port, public in contract.public_ports.items()}
        bound = {f"ECHO2_BIND_{port}": str(private) for port, private in binds.items()}
        return {**system, **image, **contract.order.env, **provider, **ports, **bound}

    async def close(self) -> None:
        """End every process, SIGKILL after the grace; returns when none lives."""
        self._grace_s = min(self._grace_s, CLOSING_S)
        for contract in self.market.live():
            self.market.destroy(contract)
        deadline = self._grace_s + 10.0
        async with asyncio.timeout(deadline):
            while self._boxes:
                for number, box in list(self._boxes.items()):
                    await self._end(self.market.contracts[number], box)
                if self._boxes:
                    await asyncio.sleep(0.05)
        if self._tasks:
            await asyncio.gather(*self._tasks)
