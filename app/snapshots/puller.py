"""A node's download of snapshots: from its upstream, or from the next one that can give it.

Invariant: every leaf is verified before it is kept, so changing the source costs nothing but the leaf in transit; the
download goes on at the leaf where it stopped. A source that lied is asked again for the same version only when no other
could give it; a single wrong leaf is fetched elsewhere while the stream goes on. The download never waits for an
installation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Literal

import httpx

from app.protocol.errors import Conflict, IntegrityError
from app.protocol.node import BroadcastProgress
from app.snapshots.choice import LIES_FORGIVEN, following, patience, repairers
from app.snapshots.connection import Connection, Lost
from app.snapshots.incoming import Incoming, Snapshot
from app.snapshots.store import SnapshotStore
from app.snapshots.upstream import Announced, FetchUrls, Source, Wire

__all__ = ["Puller", "Source"]

log = logging.getLogger(__name__)

POLL_WAIT_S = 25.0
TICK_S = 0.2
"""How often the source list and the target are looked at while waiting for an announcement."""
SHORT_POLL_S = 1.0
"""A relay that answers "nothing new" faster than this is not waiting as asked: turn to the next."""
INLINE_LEAF_BYTES = 1024 * 1024
"""Leaves up to this size are hashed and written in the event loop; larger ones in a thread."""
STREAM_END_S = 0.5
"""How long a relay may take to end its stream after the last leaf."""
UNKNOWN_VERSION = -1

Notice = Callable[[Source, int, str], Awaitable[None]]
"""(source, version or −1 when it can't be told, detail)."""


class Puller:
    """Keeps a SnapshotStore at the newest version. Run `run()` as a task of the node's event loop.

    `sources` gives the upstreams in order of preference, `target` the newest published version as far as known.
    `on_complete` gets the newest complete version; while it works further ones may arrive, and those between are not
    handed out. It isn't called for what was in the store already. `on_lie`, `on_stall` and `on_refused` (a delta that
    could not be applied) run beside the download. What any of these raise ends `run()`, as do a full disk and a
    manifest whose hashes contradict each other.

    Times are seconds. `stall_s`: silence after which a source is left; `starve_s`: time without a whole leaf after
    which even one that says it is alive is left; `retry_s`: pause after all sources failed.
    """

    def __init__(
        self,
        store: SnapshotStore,
        *,
        token: str,
        sources: Callable[[], Sequence[Source]],
        target: Callable[[], int | None],
        fetch_urls: FetchUrls,
        on_complete: Callable[[Snapshot], Awaitable[None]],
        on_lie: Notice,
        client: httpx.AsyncClient,
        stall_s: float = 5.0,
        announce_grace_s: float = 2.0,
        starve_s: float = 60.0,
        retry_s: float = 0.5,
        on_stall: Notice | None = None,
        on_refused: Notice | None = None,
    ) -> None:
        self.current: Source | None = None
        """The source that is being pulled from or waited on."""
        self.bytes_from: dict[str, int] = {}
        """Verified payload bytes by kind of source."""
        self.deltas_applied = 0
        self.bytes_saved = 0
        """What the versions have more that came as deltas than the deltas had."""
        self._store = store
        self._sources = sources
        self._target = target
        self._on_complete = on_complete
        self._on_lie = on_lie
        self._on_stall = on_stall
        self._on_refused = on_refused
        self._whole_only = False
        """After a delta could not be used: name no base, until a version has come."""
        self._wire = Wire(client, token=token, stall_s=stall_s, fetch_urls=fetch_urls)
        self._stall_s = stall_s
        self._announce_grace_s = announce_grace_s
        self._starve_s = starve_s
        self._retry_s = retry_s
        self._incoming: Incoming | None = None
        self._fresh = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def progress(self) -> BroadcastProgress | None:
        """How far the running download is; None when there is none."""
        incoming = self._incoming
        if incoming is None:
            return None
        return BroadcastProgress(
            version=incoming.version,
            bytes_have=incoming.bytes_have,
            bytes_total=incoming.manifest.payload_bytes,
            source=self.current.kind if self.current is not None else None,
        )

    async def run(self) -> None:
        """Pull for ever. Ends by cancellation, or with what a callback or the disk raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._install_newest())
                await self._pull_for_ever()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            self.current = self._incoming = None
            self._wire.close()
            self._store.close()

    async def _pull_for_ever(self) -> None:
        while True:
            announced = await self._announcement()
            if announced is None:
                continue
            source, self._incoming, following = announced
            snapshot = await self._pull(source, self._incoming, following)
            self._count(self._incoming, snapshot)
            self._incoming = None
            if snapshot is None:
                await asyncio.sleep(self._retry_s)
            else:
                self._fresh.set()

    def _count(self, incoming: Incoming, snapshot: Snapshot | None) -> None:
        """A version that is here can be the base of the next; what its delta saved is counted."""
        if snapshot is None:
            return
        self._whole_only = False
        if incoming.manifest.kind == "delta":
            self.deltas_applied += 1
            self.bytes_saved += snapshot.manifest.payload_bytes - incoming.manifest.payload_bytes

    async def _install_newest(self) -> None:
        while True:
            await self._fresh.wait()
            self._fresh.clear()
            snapshot = self._store.latest()
            if snapshot is None:
                continue
            with self._store.pin(snapshot.version):
                # It may have been removed before it was pinned; then a newer one is about to set the event.
                if self._store.get(snapshot.version) is not None:
                    await self._on_complete(snapshot)

    async def _announcement(self) -> tuple[Source, Incoming, Announced] | None:
        """Ask the sources in turn for a version newer than ours; None: begin again (after the pause if all failed)."""
        sources = tuple(self._sources())
        quiet = False
        for source in sources:
            if quiet and source.kind != "learner":
                continue
            self.current = source
            answer = await self._ask(source, sources, 0.0 if quiet else POLL_WAIT_S)
            if answer == "again":
                return None
            # Two peers may be waiting for each other: after a long poll without news look at the learner, too.
            quiet = quiet or answer == "quiet"
            if isinstance(answer, Announced):
                try:
                    return source, await asyncio.to_thread(self._begin, answer), answer
                except (IntegrityError, Conflict) as error:
                    answer.close()
                    # Who offers a delta of a base that wasn't named to it may do so again.
                    self._whole_only = self._whole_only or bool(answer.delta)
                    self._lied(source, UNKNOWN_VERSION, error.detail)
        if not quiet:
            await asyncio.sleep(self._retry_s)
        return None

    def _begin(self, announced: Announced) -> Incoming:
        if announced.delta:
            return self._store.begin_delta(announced.delta, announced.document)
        return self._store.begin(announced.document)

    async def _ask(
        self, source: Source, sources: tuple[Source, ...], wait_s: float
    ) -> Announced | Literal["next", "again", "quiet"]:
        have = self._have()
        try:
            if source.kind == "store":
                target = self._target()
                if target is None or target <= have:
                    return "next"
                return await self._wire.stored_step(target, have, self._held())
            return await self._wait_for_relay(source, sources, have, wait_s)
        except Lost as error:
            log.info("%s announces nothing: %s", source.label, error)
        except IntegrityError as error:
            self._lied(source, UNKNOWN_VERSION, error.detail)
        return "next"

    async def _wait_for_relay(
        self, source: Source, sources: tuple[Source, ...], have: int, wait_s: float
    ) -> Announced | Literal["next", "again", "quiet"]:
        """One long poll, given up when the list changes or a newer version should long have been announced."""
        loop = asyncio.get_running_loop()
        started, behind_since = loop.time(), None
        poll = asyncio.create_task(self._wire.poll(source, have, wait_s, self._held()))
        try:
            while not (await asyncio.wait({poll}, timeout=TICK_S))[0]:
                now = loop.time()
                if tuple(self._sources()) != sources:
                    return "again"
                target = self._target()
                if target is None or target <= have:
                    behind_since = None
                elif behind_since is None:
                    behind_since = now
                elif now - behind_since >= self._announce_grace_s:
                    log.info("%s has not announced v%d in time", source.label, target)
                    return "next"
            announced = poll.result()
        finally:
            if poll.cancel():
                await asyncio.wait({poll}, timeout=TICK_S)
        if announced is not None:
            return announced
        if loop.time() - started < SHORT_POLL_S:
            return "next"
        return "quiet"

    async def _pull(self, source: Source, incoming: Incoming, announced: Announced) -> Snapshot | None:
        """Fetch the leaves that are missing from `source`, then from the others; None when none could give them."""
        tried: set[Source] = set()
        lies: Counter[Source] = Counter()
        stream = announced.stream
        if incoming.have:  # resumed: what follows the document begins at leaf 0
            announced.close()
            stream = None
        while incoming.have < incoming.manifest.leaves:
            self.current = source
            lied = False
            try:
                await self._fetch(source, incoming, stream, tried, lies)
            except IntegrityError as error:
                lied = True
                self._lied(source, incoming.version, error.detail)
            except Lost as error:
                if incoming.have == incoming.manifest.leaves:
                    break
                log.info("left %s at leaf %d of v%d: %s", source.label, incoming.have, incoming.version, error)
                if self._on_stall is not None:
                    self._notice(self._on_stall(source, incoming.version, str(error)))
            tried.add(source)
            stream = None
            after = following(self._sources(), tried, lied=lied)
            if after is None:
                break
            source = after
        if incoming.have < incoming.manifest.leaves:
            return None
        try:
            return await asyncio.to_thread(incoming.complete)
        except IntegrityError as error:
            if incoming.manifest.kind == "full":
                raise
            self._refused(source, incoming.version, error.detail)
            return None

    def _refused(self, source: Source, version: int, detail: str) -> None:
        """A delta that came as it was signed can't be applied: take the version whole."""
        log.warning("the delta of v%d can't be applied: %s", version, detail)
        self._whole_only = True
        if self._on_refused is not None:
            self._notice(self._on_refused(source, version, detail))

    async def _fetch(
        self,
        source: Source,
        incoming: Incoming,
        stream: Connection | None,
        tried: set[Source],
        lies: Counter[Source],
    ) -> None:
        """Leaves from one source until the last, `stream` being where they come already. Lost or IntegrityError."""
        manifest, loop = incoming.manifest, asyncio.get_running_loop()
        if source.kind == "store":
            leaves = self._wire.stored_leaves(manifest, incoming.have)
        else:
            leaves = self._wire.relay_leaves(source, manifest, incoming.have, stream)
        starve_s = patience(self._starve_s, self._stall_s, moved=bool(tried))
        try:
            async with asyncio.timeout(starve_s) as limit, aclosing(leaves) as arriving:
                async for n, leaf in arriving:
                    try:
                        await self._write(source, incoming, n, leaf)
                    except IntegrityError as error:
                        lies[source] += 1
                        if lies[source] > LIES_FORGIVEN or not await self._repair(source, incoming, n, tried):
                            raise
                        self._lied(source, incoming.version, error.detail)
                    last = incoming.have == manifest.leaves
                    # Reading on to the stream's end keeps the connection for the next version, if it comes at once.
                    limit.reschedule(loop.time() + (STREAM_END_S if last else starve_s))
        except TimeoutError as error:
            raise Lost(f"no leaf for {starve_s:g} s") from error

    async def _write(self, source: Source, incoming: Incoming, n: int, leaf: bytes | memoryview) -> None:
        if len(leaf) <= INLINE_LEAF_BYTES:
            incoming.write_leaf(n, leaf)
        else:
            await asyncio.to_thread(incoming.write_leaf, n, leaf)
        self.bytes_from[source.kind] = self.bytes_from.get(source.kind, 0) + len(leaf)

    async def _repair(self, liar: Source, incoming: Incoming, n: int, tried: set[Source]) -> bool:
        """Fetch one leaf elsewhere that `liar` got wrong; its stream waits meanwhile. False: nobody had it right."""
        for other in repairers(self._sources(), liar, tried):
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._write(other, incoming, n, await self._wire.one_leaf(other, incoming.manifest, n))
                log.info("leaf %d of v%d comes from %s instead of %s", n, incoming.version, other.label, liar.label)
                return True
            except (Lost, TimeoutError) as error:
                log.info("%s has no leaf %d of v%d: %s", other.label, n, incoming.version, error or "too late")
            except IntegrityError as error:
                self._lied(other, incoming.version, error.detail)
        return False

    def _held(self) -> list[int]:
        """Versions that may be the base of a delta."""
        return [] if self._whole_only else self._store.versions

    def _have(self) -> int:
        latest = self._store.latest()
        return -1 if latest is None else latest.version

    def _lied(self, source: Source, version: int, detail: str) -> None:
        log.warning("%s lied about v%d: %s", source.label, version, detail)
        self._notice(self._on_lie(source, version, detail))

    def _notice(self, notice: Awaitable[None]) -> None:
        """Let a callback run beside the download."""

        async def deliver() -> None:
            await notice

        assert self._tasks is not None
        self._tasks.create_task(deliver())
