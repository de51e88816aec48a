"""One node's life: join, warm up, work, end.

Invariant: whatever happens, the agent ends with one `Ending`: it has handed back what it did not finish (if the control
service can hear it), stopped its relay and its engine, and, if its lease is over and it can, ended its machine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import httpx

from app import __version__
from app.protocol.errors import EchoError, Gone, Unauthorized, Unavailable
from app.protocol.node import Directives, Heartbeat, Interruption, JoinAnswer, JoinRequest
from app.protocol.startup import MachineFacts
from app.rollout_agent import room
from app.rollout_agent.client import NodeClient
from app.rollout_agent.config import AgentSettings, RelayAddress, SelfDestruct
from app.rollout_agent.engines.base import Engine, StreamEngine
from app.rollout_agent.goodbye import destroy_machine, leave
from app.rollout_agent.lifecycle import Ending, LeaseWatch, ending_of, join_ending
from app.rollout_agent.node import Node
from app.rollout_agent.preemption.board import Board
from app.rollout_agent.preemption.metadata import Source
from app.rollout_agent.preemption.watch import watch_machine
from app.rollout_agent.proofs import provable
from app.rollout_agent.reach import Unreached
from app.rollout_agent.startup import Startup, tell

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""After a signal: so long to deliver what is finished, and to hand over what is not."""
UNHEARD_S = 2.0
"""A control service that has not answered by then takes nothing over either: nothing is waited for any more."""
SIGNAL_CUT_S = 0.4
"""After a signal: so long until samples are cut."""
NOTICE_CUT_S = 10.0
"""After a notice of interruption: it may come 30 seconds ahead."""
DRAIN_CUT_S = 30.0
"""After the word of the control service: what takes longer is finished elsewhere, by a machine that stays."""
TELL_AGAIN_S = 1.0
"""A notice that was not heard is told again so soon: the machine may have 30 seconds."""
TELL_TIMEOUT_S = 5.0
"""So long a machine that will be interrupted and has no work left waits until its notice was heard."""
RELAY_S, RELAY_LOOK_S = 15.0, 1.0
"""So long it then serves its peers, while each look finds that they took something."""
LAST_S = 5.0
"""So long a node that ends without a drain has to hand in what is finished, and over what is not."""
CLOSE_TIMEOUT_S = 10.0
HEARTBEAT_MIN_S, HEARTBEAT_MAX_S = 0.05, 60.0


class Agent:
    """Composes one node from its parts and sees to its end. `http` and `notices` are the caller's to close."""

    def __init__(
        self,
        settings: AgentSettings,
        engine: Engine | StreamEngine,
        http: httpx.AsyncClient,
        *,
        relay: RelayAddress,
        self_destruct: SelfDestruct | None = None,
        gpu_name: str = "",
        notices: Source | None = None,
        facts: MachineFacts | None = None,
        on_gpu: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._http = http
        self._relay = relay
        self._self_destruct = self_destruct
        self._gpu_name = gpu_name
        self._notices = notices
        self._facts = facts
        self._on_gpu = on_gpu
        self._board = Board()
        self._clock = clock
        self._client = NodeClient(settings.control_url, http)
        self._ending: asyncio.Future[Ending] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._kick = asyncio.Event()
        self._startup = Startup(clock, self._kick.set)
        self._node: Node | None = None
        self._unreachable = False

    async def run(self) -> Ending:
        """Live and end. Never raises for what the outside does."""
        self._ending = asyncio.get_running_loop().create_future()
        join = asyncio.create_task(self._join())
        first: set[asyncio.Future[Any]] = {join, self._ending}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not join.done():
            join.cancel()
            return await self._ending
        try:
            sent_at, joined = join.result()
        except EchoError as error:
            return join_ending(error)
        log.info("joined as %s for job %s", joined.node_id, joined.job_id)
        watch = LeaseWatch.start(self._settings.orphan_timeout_s, sent_at, joined.directives)
        node = Node(
            self._settings, joined, self._client, self._engine, self._relay, self._kick.set, self._clock,
            self._startup, self._check_room,
        )  # fmt: skip
        self._node = node
        self._spawn(self._beat(node, watch), "heartbeat")
        self._spawn(self._watch(watch), "lease watch")
        self._spawn(self._serve(node), "node")
        if self._notices is not None:
            self._spawn(watch_machine(self._notices, self._noticed), "notices")
        self._obey(node, joined.directives)
        ending = await self._ending
        await self._wind_up(node, ending)
        return ending

    def terminated(self) -> None:
        """SIGTERM: the machine shuts down, and says so before it leaves."""
        self._noticed(Interruption(kind="interruption", source="signal", detail="SIGTERM"))
        self.stop()
        asyncio.get_running_loop().call_later(UNHEARD_S, self._give_up)

    def _give_up(self) -> None:
        if self._board.pending is not None:
            self._end(Ending("stopped by a signal, and nobody heard it", reachable=False))

    def stop(self) -> None:
        """A signal: drain for a moment, then leave."""
        if self._node is None:
            self._end(Ending("stopped by a signal before the join", reachable=False))
            return
        self._node.drain("stopped by a signal", SIGNAL_CUT_S)
        asyncio.get_running_loop().call_later(STOP_GRACE_S, self._end, Ending("stopped by a signal"))

    def _noticed(self, notice: Interruption) -> None:
        """The machine was told something about its end: the control service hears it at once."""
        if self._node is None or not self._board.put(notice):
            return
        log.warning("notice of %s: %s", notice.kind, notice.detail)
        if notice.kind == "interruption":
            self._node.drain(f"this machine will be interrupted ({notice.detail})", NOTICE_CUT_S)
        self._kick.set()

    async def _join(self) -> tuple[float, JoinAnswer]:
        """When the join was sent, and its answer. Goes on while the control service can't even be reached."""
        request = JoinRequest(
            agent_version=__version__, engine=self._settings.engine, gpu_name=self._gpu_name[:200],
            relay_url=self._relay.public_url, facts=self._facts, proofs=provable(self._engine),
        )  # fmt: skip
        token = self._settings.join_token.get_secret_value()
        telling = asyncio.create_task(tell(lambda told: self._client.progress(told, token), self._startup))
        self._tasks.append(telling)
        try:
            return await self._join_with(request, token)
        except (EchoError, asyncio.CancelledError):
            telling.cancel()
            raise

    async def _join_with(self, request: JoinRequest, token: str) -> tuple[float, JoinAnswer]:
        give_up = self._clock() + self._settings.orphan_timeout_s
        while True:
            sent_at = self._clock()
            try:
                return sent_at, await self._client.join(request, token)
            except Unreached as error:
                if self._clock() > give_up:
                    raise
                log.warning("can't join yet: %s", error.detail)

    def _check_room(self, joined: JoinAnswer) -> None:
        """Raises Unfit for a job that this machine has no room for. Runs in a thread of its own."""
        if self._facts is None:
            return
        assert self._ending is not None
        folder, loop = self._settings.agent_dir / "model", self._ending.get_loop()
        split = partial(room.fetched_split, self._client, joined.assets, folder, loop)
        room.check_job(joined, self._settings, self._facts, on_gpu=self._on_gpu, split=split)

    async def _serve(self, node: Node) -> None:
        await node.run()
        if self._board.doomed:
            await self._last_moments(node)
        self._end(Ending(node.drain_reason or "drained"))

    async def _last_moments(self, node: Node) -> None:
        """A doomed machine without work: the control service has to know why, and peers may be in a download."""
        if not await self._board.told(TELL_TIMEOUT_S):
            log.warning("the notice of interruption was not heard")
        until, served = self._clock() + RELAY_S, None
        while node.bytes_relayed != served and self._clock() < until:
            served = node.bytes_relayed
            await asyncio.sleep(RELAY_LOOK_S)

    async def _beat(self, node: Node, watch: LeaseWatch) -> None:
        interval_s = node.directives.heartbeat_interval_s
        while True:
            due_s = interval_s if self._board.pending is None else min(interval_s, TELL_AGAIN_S)
            try:
                async with asyncio.timeout(min(HEARTBEAT_MAX_S, max(HEARTBEAT_MIN_S, due_s))):
                    await self._kick.wait()
            except TimeoutError:
                log.debug("heartbeat is due")
            self._kick.clear()
            sent_at = self._clock()
            notice = self._board.pending
            directives = await self._heartbeat(node.heartbeat(sent_at, notice))
            if directives is not None:
                self._board.answered(notice)
                watch.contact(sent_at, directives)
                interval_s = directives.heartbeat_interval_s
                self._obey(node, directives)

    async def _heartbeat(self, beat: Heartbeat) -> Directives | None:
        """One heartbeat; None when it was not answered properly. Raises Gone, Unauthorized."""
        try:
            directives = await self._client.heartbeat(beat)
        except (Gone, Unauthorized):
            raise
        except EchoError as error:
            if not self._unreachable or not isinstance(error, Unavailable):
                log.warning("heartbeat failed: %s", error.detail)
            self._unreachable = True
            return None
        if self._unreachable:
            log.info("the control service answers again")
        self._unreachable = False
        return directives

    def _obey(self, node: Node, directives: Directives) -> None:
        node.directed(directives)
        if directives.shutdown:
            self._end(Ending(f"told to shut down: {directives.reason}".rstrip(": ")))
        elif directives.drain:
            node.drain(f"told to drain: {directives.reason}".rstrip(": "), DRAIN_CUT_S)

    async def _watch(self, watch: LeaseWatch) -> None:
        while True:
            ending = watch.ending(self._clock())
            if ending is not None:
                self._end(ending)
                return
            await asyncio.sleep(watch.next_check_s(self._clock()))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if not isinstance(error, EchoError):
            log.error("%s failed", task.get_name(), exc_info=error)
        self._end(ending_of(error, task.get_name()))

    def _end(self, ending: Ending) -> None:
        """The first ending counts."""
        if self._ending is not None and not self._ending.done():
            log.info("ending: %s", ending.reason)
            self._ending.set_result(ending)

    async def _drain_at_last(self, node: Node, ending: Ending) -> None:
        """Deliver what there is, unless nobody hears it, or a drain has had its time already."""
        serving = [task for task in self._tasks if task.get_name() == "node" and not task.done()]
        if ending.reachable and serving and not node.drain_reason:
            node.drain(ending.reason, 0.0)
            await asyncio.wait(serving, timeout=LAST_S)

    async def _wind_up(self, node: Node, ending: Ending) -> None:
        await self._drain_at_last(node, ending)
        node.interrupt()
        for task in self._tasks:
            task.cancel()
        _, stuck = await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        for task in stuck:
            log.warning("%s does not end", task.get_name())
        if ending.reachable:
            await leave(self._client, node.ledger, ending)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await node.close()
        except TimeoutError:
            log.warning("the node's parts did not stop within %g s", CLOSE_TIMEOUT_S)
        if ending.destroy and self._self_destruct is not None:
            await destroy_machine(self._http, self._self_destruct)
