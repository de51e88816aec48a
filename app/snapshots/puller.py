"""A node's download of snapshots: from its upstream, or from the next one that can give it.

Invariant: every leaf is verified before it is kept, so changing the source costs nothing but the leaf in transit; the
download goes on at the leaf where it stopped. A source that lied is asked again for the same version only when no other
could give it. The download never waits for an installation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Literal

import httpx

from app.protocol.errors import Conflict, IntegrityError
from app.protocol.node import BroadcastProgress
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
    handed out. It isn't called for what was in the store already. `on_lie` and `on_stall` run beside the download. What
    any of these raise ends `run()`, as do a full disk and a manifest whose hashes contradict each other.

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
    ) -> None:
        self.current: Source | None = None
        """The source that is being pulled from or waited on."""
        self.bytes_from: dict[str, int] = {}
        """Verified payload bytes by kind of source."""
        self._store = store
        self._sources = sources
        self._target = target
        self._on_complete = on_complete
        self._on_lie = on_lie
        self._on_stall = on_stall
        self._wire = Wire(client, token=token, stall_s=stall_s, fetch_urls=fetch_urls)
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
            self._incoming = None
            if snapshot is None:
                await asyncio.sleep(self._retry_s)
            else:
                self._fresh.set()

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
        for source in sources:
            self.current = source
            answer = await self._ask(source, sources)
            if answer == "again":
                return None
            if isinstance(answer, Announced):
                try:
                    return source, await asyncio.to_thread(self._store.begin, answer.document), answer
                except (IntegrityError, Conflict) as error:
                    answer.close()
                    self._lied(source, UNKNOWN_VERSION, error.detail)
        await asyncio.sleep(self._retry_s)
        return None

    async def _ask(self, source: Source, sources: tuple[Source, ...]) -> Announced | Literal["next", "again"]:
        have = self._have()
        try:
            if source.kind == "store":
                target = self._target()
                if target is None or target <= have:
                    return "next"
                return Announced(await self._wire.stored_document(target))
            return await self._wait_for_relay(source, sources, have)
        except Lost as error:
            log.info("%s announces nothing: %s", source.label, error)
        except IntegrityError as error:
            self._lied(source, UNKNOWN_VERSION, error.detail)
        return "next"

    async def _wait_for_relay(
        self, source: Source, sources: tuple[Source, ...], have: int
    ) -> Announced | Literal["next", "again"]:
        """One long poll, given up when the list changes or a newer version should long have been announced."""
        loop = asyncio.get_running_loop()
        started, behind_since = loop.time(), None
        poll = asyncio.create_task(self._wire.poll(source, have, POLL_WAIT_S))
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
        if announced is None:
            return "next" if loop.time() - started < SHORT_POLL_S else "again"
        return announced

    async def _pull(self, source: Source, incoming: Incoming, announced: Announced) -> Snapshot | None:
        """Fetch the leaves that are missing from `source`, then from the others; None when none could give them."""
        tried: set[Source] = set()
        stream = announced.stream
        if incoming.have:  # resumed: what follows the document begins at leaf 0
            announced.close()
            stream = None
        while incoming.have < incoming.manifest.leaves:
            self.current = source
            try:
                await self._fetch(source, incoming, stream)
            except IntegrityError as error:
                self._lied(source, incoming.version, error.detail)
            except Lost as error:
                if incoming.have == incoming.manifest.leaves:
                    break
                log.info("left %s at leaf %d of v%d: %s", source.label, incoming.have, incoming.version, error)
                if self._on_stall is not None:
                    self._notice(self._on_stall(source, incoming.version, str(error)))
            tried.add(source)
            stream = None
            following = next((s for s in self._sources() if s not in tried), None)
            if following is None:
                break
            source = following
        if incoming.have < incoming.manifest.leaves:
            return None
        return await asyncio.to_thread(incoming.complete)

    async def _fetch(self, source: Source, incoming: Incoming, stream: Connection | None) -> None:
        """Leaves from one source until the last, `stream` being where they come already. Lost or IntegrityError."""
        manifest, loop = incoming.manifest, asyncio.get_running_loop()
        if source.kind == "store":
            leaves = self._wire.stored_leaves(manifest, incoming.have)
        else:
            leaves = self._wire.relay_leaves(source, manifest, incoming.have, stream)
        inline = manifest.leaf_bytes <= INLINE_LEAF_BYTES
        try:
            async with asyncio.timeout(self._starve_s) as limit, aclosing(leaves) as arriving:
                async for n, leaf in arriving:
                    if inline:
                        incoming.write_leaf(n, leaf)
                    else:
                        await asyncio.to_thread(incoming.write_leaf, n, leaf)
                    self.bytes_from[source.kind] = self.bytes_from.get(source.kind, 0) + len(leaf)
                    last = incoming.have == manifest.leaves
                    # Reading on to the stream's end keeps the connection for the next version, if it comes at once.
                    limit.reschedule(loop.time() + (STREAM_END_S if last else self._starve_s))
        except TimeoutError as error:
            raise Lost(f"no leaf for {self._starve_s:g} s") from error

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
