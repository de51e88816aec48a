"""A joined node: model files, snapshots, relay and worker, and how it describes itself.

Invariant: the state that a heartbeat shows is true: warming until the first version is installed, active from then,
draining from the moment it leases nothing more; the version is the one that the next batch is sampled under.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from app.protocol.errors import EchoError
from app.protocol.node import Directives, Heartbeat, Interruption, JoinAnswer, NodeState
from app.protocol.startup import StartPhase, StartProgress
from app.rollout_agent import selftest
from app.rollout_agent.assets import fetch_assets, remove_others
from app.rollout_agent.client import NodeClient
from app.rollout_agent.closing import close_parts
from app.rollout_agent.config import AgentSettings, RelayAddress
from app.rollout_agent.engines.base import Engine, StreamEngine
from app.rollout_agent.faults import Faults
from app.rollout_agent.heartbeats import describe
from app.rollout_agent.hub import Hub
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.measure import Rates
from app.rollout_agent.proofs import start_proving
from app.rollout_agent.relaying import start_relay
from app.rollout_agent.startup import Startup
from app.rollout_agent.stream import StreamWorker
from app.rollout_agent.task_side import open_task, score_threads
from app.rollout_agent.text_side import TextSide
from app.rollout_agent.watching import watch_of
from app.rollout_agent.worker import Worker
from app.rollout_agent.working import Parts, make_host, make_worker
from app.snapshots.puller import Puller
from app.snapshots.rates import News
from app.snapshots.relay import Relay
from app.snapshots.sources import Source
from app.snapshots.store import Snapshot, SnapshotStore

log = logging.getLogger(__name__)

PULL_TIMEOUT = httpx.Timeout(30.0, connect=5.0)


class Node:
    """Runs one node between join and end. `changed` is called when a heartbeat should go out at once."""

    def __init__(
        self,
        settings: AgentSettings,
        joined: JoinAnswer,
        client: NodeClient,
        engine: Engine | StreamEngine,
        relay: RelayAddress,
        changed: Callable[[], None],
        clock: Callable[[], float],
        startup: Startup | None = None,
        check_room: Callable[[JoinAnswer], None] = lambda _: None,
    ) -> None:
        self._folder = settings.agent_dir
        self._joined = joined
        self._client = client
        self._engine = engine
        self._relay_address = relay
        self._changed = changed
        self._clock = clock
        self._startup = startup or Startup(clock)
        self._check_room = check_room
        self._probe: Rates | None = None
        """What the self-test found."""
        self._engine_pool = ThreadPoolExecutor(1, "engine")
        self._host = make_host(engine, self._folder / "model", self._engine_pool)
        self._score_pool = ThreadPoolExecutor(score_threads(joined.task), "score")
        self._pull_http = httpx.AsyncClient(timeout=PULL_TIMEOUT)
        self._ledger = WorkLedger(clock)
        self._faults = Faults(client, self._ledger)
        self._hub = Hub(settings.hf_endpoint, self._faults.hub_failed)
        self._news = News()
        self._relay: Relay | None = None
        self._puller: Puller | None = None
        self._worker: Worker | StreamWorker | None = None
        self._draining = asyncio.Event()
        self._state = NodeState.JOINING
        self._version: int | None = None
        """Installed last. The engine's own is None while it is loaded again."""
        self.directives = joined.directives
        self.drain_reason = ""

    async def run(self) -> None:
        """Warm up and work until drained. Raises what ends the node: EchoError, or a fault of its parts."""
        work = asyncio.create_task(self._live(), name="live")
        drained = asyncio.create_task(self._draining.wait(), name="drain")
        try:
            await asyncio.wait({work, drained}, return_when=asyncio.FIRST_COMPLETED)
            # A node that has not come to working yet has nothing to deliver.
            if work.done() or self._worker is not None:
                await work
        finally:
            for task in (work, drained):
                task.cancel()
            await asyncio.gather(work, drained, return_exceptions=True)

    def directed(self, directives: Directives) -> None:
        """Newest directives; the puller looks at them by itself."""
        if directives.reason and directives.reason != self.directives.reason:
            log.info("the control service says: %s", directives.reason)
        self.directives = directives

    def drain(self, reason: str, within_s: float) -> None:
        """Lease nothing more; what is not generated in `within_s` seconds is handed over to other nodes. `run` ends
        once all is delivered. A second call can only shorten that time."""
        if self._draining.is_set():
            if self._worker is not None:
                self._worker.drain(within_s)
            return
        log.info("draining: %s", reason)
        self.drain_reason = reason
        self._set_state(NodeState.DRAINING)
        if self._worker is not None:
            self._worker.drain(within_s)
        self._draining.set()

    def interrupt(self) -> None:
        """Sample nothing more: the node ends at once."""
        self._host.interrupt()

    @property
    def ledger(self) -> WorkLedger:
        """What there is to hand back, and the counts."""
        return self._ledger

    @property
    def bytes_relayed(self) -> int | None:
        """Snapshot payload bytes served to peers; None without a relay."""
        return self._relay.bytes_served if self._relay is not None else None

    def heartbeat(self, now: float, interruption: Interruption | None = None) -> Heartbeat:
        """The node as it is, and what its machine was told."""
        return describe(
            self._state,
            self._engine.version,
            now,
            client=self._client,
            ledger=self._ledger,
            meter=self._worker.meter if self._worker is not None else None,
            puller=self._puller,
            relay=self._relay,
            news=self._news,
            interruption=interruption,
            start=self._start(),
            probe=self._probe,
            weights=self._host.weights,
        )

    def _start(self) -> StartProgress:
        coming = self._puller.progress if self._puller is not None else None
        if coming is None or self._startup.phase is not StartPhase.WARMING:
            return self._startup.told()
        return self._startup.told(coming.bytes_have, coming.bytes_total)

    async def close(self) -> None:
        """Stop the relay and free the engine. Raises TimeoutError when one of them does not come to an end."""
        await close_parts(self._relay, self._pull_http, self._host.close, self._engine_pool, self._score_pool)

    async def _live(self) -> None:
        model = self._folder / "model"
        loading = asyncio.create_task(open_task(self._client, self._joined, self._folder / "task"))
        try:
            await asyncio.to_thread(remove_others, model, self._joined.assets)
            await asyncio.to_thread(self._check_room, self._joined)
            self._startup.enter(StartPhase.FETCHING)
            await fetch_assets(self._client, self._joined.assets, model, self._startup.bytes, self._hub)
            self._startup.enter(StartPhase.LOADING)
            await self._host.load()
            start_proving(self._engine, self._joined.proofs)
            text = TextSide(
                await loading,
                self._engine.tokenizer,
                scores=self._joined.rewards != "learner",
                at_once=score_threads(self._joined.task),
            )
        finally:
            loading.cancel()
            # It may have failed as well: then that is not the news.
            await asyncio.gather(loading, return_exceptions=True)
        store = await asyncio.to_thread(
            SnapshotStore,
            self._folder / "snapshots",
            job_id=self._joined.job_id,
            public_key=self._joined.manifest_public_key,
        )
        self._host.pin = store.pin
        self._relay = await start_relay(
            store, self._relay_address, self._joined, failed=lambda: self._ledger.errors.update(["relay"])
        )
        puller = self._make_puller(store)
        worker = make_worker(self._host, self._engine, text, self._parts())
        self._puller, self._worker = puller, worker
        if self._draining.is_set():
            return
        self._startup.enter(StartPhase.WARMING)
        self._set_state(NodeState.WARMING)
        pulling = asyncio.create_task(self._pull(store, puller), name="puller")
        working = asyncio.create_task(worker.run(), name="worker")
        watch = watch_of(
            worker, self._host, self._engine, self._faults, probe=lambda: self._probe,
            max_tokens=self._joined.sampling.max_tokens, clock=self._clock,
        )  # fmt: skip
        watching = asyncio.create_task(watch.run(), name="stalls")
        parts = (pulling, working, watching)
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in parts:
                task.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def _make_puller(self, store: SnapshotStore) -> Puller:
        return Puller(
            store,
            token=self._joined.relay_token,
            sources=self._sources,
            target=lambda: self.directives.target_version,
            fetch_urls=self._client.snapshot_urls,
            on_complete=self._install,
            on_lie=self._faults.lied,
            on_stall=self._faults.stalled,
            on_refused=self._faults.delta_refused,
            client=self._pull_http,
        )

    def _parts(self) -> Parts:
        return Parts(
            joined=self._joined,
            client=self._client,
            ledger=self._ledger,
            faults=self._faults,
            engine_pool=self._engine_pool,
            score_pool=self._score_pool,
            version=lambda: self._version,
            directives=lambda: self.directives,
            clock=self._clock,
            vocabulary=lambda: selftest.vocabulary(self._folder / "model", self._engine.tokenizer),
        )

    async def _pull(self, store: SnapshotStore, puller: Puller) -> None:
        found = await asyncio.to_thread(store.latest)
        if found is not None:
            with store.pin(found.version):
                await self._install(found)
        await puller.run()

    def _sources(self) -> list[Source]:
        return [Source(kind=u.kind, url=u.url, node_id=u.node_id) for u in self.directives.upstreams]

    async def _install(self, snapshot: Snapshot) -> None:
        """Install, between two batches or while samples run. A node that is left without a version ends; one whose
        engine has the version before goes on with that."""
        try:
            mended = await self._host.install(snapshot)
        except (EchoError, RuntimeError) as error:
            await self._faults.not_installed(snapshot, error)
            if self._engine.version is None:
                raise
            return
        if mended is not None:
            await self._faults.not_installed(snapshot, mended)
        if self._probe is None and not self._draining.is_set():
            await self._self_test()
        self._version = snapshot.version
        log.info("installed version %d", snapshot.version)
        if self._worker is not None:
            self._worker.installed()
        if self._draining.is_set():
            self._changed()
        else:
            self._set_state(NodeState.ACTIVE)

    async def _self_test(self) -> None:
        """Before the first work. Raises Unfit, Interrupted."""
        self._startup.enter(StartPhase.TESTING)
        sampling = self._joined.sampling
        shape = selftest.shape_for(self._folder / "model", self._engine.tokenizer, sampling.max_tokens)
        sample = selftest.sampler(self._engine, self._engine_pool, sampling)
        self._probe = await selftest.examine(sample, shape, max_tokens=sampling.max_tokens, clock=self._clock)
        log.info("self-test: %.4g tokens/s", self._probe.tokens_per_s)
        self._startup.enter(StartPhase.ACTIVE)

    def _set_state(self, state: NodeState) -> None:
        self._state = state
        self._changed()
