"""A node's download of snapshots: from its upstream, or from the next one that can give it.

Invariant: every leaf is verified before it is kept, so changing the source costs nothing but the leaf in transit; the
download goes on at the leaf where it stopped. A source that lied is asked again for the same version only when no other
could give it. The download never waits for an installation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import httpx

from app.protocol.errors import IntegrityError
from app.protocol.node import BroadcastProgress
from app.snapshots.download import Download, Traffic
from app.snapshots.incoming import Incoming, Snapshot
from app.snapshots.listening import Listener
from app.snapshots.notices import Notice, Notices
from app.snapshots.rates import ReceiveMeter
from app.snapshots.sources import Announced, FetchUrls, Source
from app.snapshots.store import SnapshotStore
from app.snapshots.upstream import Wire

CLOSE_S = 1.0


class Puller:
    """Keeps a SnapshotStore at the newest version. Run `run()` as a task of the node's event loop.

    `sources` gives the upstreams in order of preference, `target` the newest published version as far as known.
    `on_complete` gets the newest complete version; while it works further ones may arrive, and those between are not
    handed out. It isn't called for what was in the store already. `on_lie`, `on_stall` and `on_refused` (a delta that
    could not be applied) run beside the download. What any of these raise ends `run()`, as do a full disk and a
    manifest whose hashes contradict each other.

    Times are seconds. `stall_s`: silence after which a source is left; `starve_s`: time without a whole leaf (or
    document) after which even one that says it is alive is left; `retry_s`: pause after all sources failed.
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
        self.deltas_applied = 0
        self.bytes_saved = 0
        """What the versions have more that came as deltas than the deltas had."""
        self._store = store
        self._sources = sources
        self._on_complete = on_complete
        self._stall_s = stall_s
        self._starve_s = starve_s
        self._retry_s = retry_s
        self._notices = Notices(on_lie=on_lie, on_stall=on_stall, on_refused=on_refused)
        self._traffic = Traffic()
        self._wire = Wire(client, token=token, stall_s=stall_s, answer_s=starve_s, fetch_urls=fetch_urls)
        self._listener = Listener(
            store,
            self._wire,
            sources,
            target,
            notices=self._notices,
            traffic=self._traffic,
            grace_s=announce_grace_s,
            retry_s=retry_s,
        )
        self._incoming: Incoming | None = None
        self._fresh = asyncio.Event()

    @property
    def current(self) -> Source | None:
        """The source that is being pulled from or waited on."""
        return self._traffic.source

    @property
    def bytes_from(self) -> dict[str, int]:
        """Verified payload bytes by kind of source."""
        return self._traffic.bytes_from

    @property
    def meters(self) -> Mapping[str, ReceiveMeter]:
        """The rates at which they came, by kind of source."""
        return self._traffic.meters

    @property
    def progress(self) -> BroadcastProgress | None:
        """How far the running download is; None when there is none."""
        incoming, source = self._incoming, self.current
        if incoming is None:
            return None
        return BroadcastProgress(
            version=incoming.version,
            bytes_have=incoming.bytes_have,
            bytes_total=incoming.manifest.payload_bytes,
            source=source.kind if source is not None else None,
        )

    async def run(self) -> None:
        """Pull for ever. Ends by cancellation, or with what a callback or the disk raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._notices.within(tasks)
                tasks.create_task(self._install_newest())
                await self._pull_for_ever()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            self._traffic.source = self._incoming = None
            self._wire.close()
            await self._close_store()

    async def _close_store(self) -> None:
        """In a thread: what is on the disk may be hashed, or synced, at this moment. That is not waited for long, for
        a machine that leaves costs money."""
        closing = asyncio.create_task(asyncio.to_thread(self._store.close))
        await asyncio.wait({closing}, timeout=CLOSE_S)

    async def _pull_for_ever(self) -> None:
        while True:
            announced = await self._listener.announcement()
            if announced is None:
                continue
            self._incoming = announced[1]
            snapshot = await self._pull(*announced)
            self._count(self._incoming, snapshot)
            self._incoming = None
            if snapshot is None:
                await asyncio.sleep(self._retry_s)
            else:
                self._fresh.set()

    async def _pull(self, source: Source, incoming: Incoming, announced: Announced) -> Snapshot | None:
        """Fetch what is missing and put the version into place; None when nobody could give it, or it is no use."""
        download = Download(
            incoming,
            self._wire,
            self._sources,
            notices=self._notices,
            traffic=self._traffic,
            stall_s=self._stall_s,
            starve_s=self._starve_s,
        )
        if not await download.run(source, announced):
            return None
        try:
            return await asyncio.to_thread(incoming.complete)
        except IntegrityError as error:
            if incoming.manifest.whole:
                raise
            # A delta that came as it was signed can't be applied: take the version whole.
            self._listener.whole_only = True
            self._notices.refused(self._traffic.source or source, incoming.version, error.detail)
            return None

    def _count(self, incoming: Incoming, snapshot: Snapshot | None) -> None:
        """A version that is here can be the base of the next; what its delta saved is counted."""
        if snapshot is None:
            return
        self._listener.whole_only = False
        if incoming.manifest.kind == "delta":
            self.deltas_applied += 1
            self.bytes_saved += snapshot.manifest.payload_bytes - incoming.manifest.payload_bytes

    async def _install_newest(self) -> None:
        handed: int | None = None
        while True:
            await self._fresh.wait()
            self._fresh.clear()
            snapshot = self._store.latest()
            # One that came in a thread may be here before it sets the event, which an older one had set.
            if snapshot is None or snapshot.version == handed:
                continue
            with self._store.pin(snapshot.version):
                # It may have been removed before it was pinned; then a newer one is about to set the event.
                if self._store.get(snapshot.version) is not None:
                    handed = snapshot.version
                    await self._on_complete(snapshot)
