"""The leaves of one version: from the source that announced it, then from the next one that can give them.

Invariant: a leaf counts once it is verified and written, so changing the source costs the leaf in transit and nothing
else. Every source is turned to at most once in a version; a single wrong leaf is fetched elsewhere while the liar's
stream goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from app.protocol.errors import IntegrityError
from app.snapshots.choice import LIES_FORGIVEN, following, patience, repairers
from app.snapshots.connection import Connection, Lost
from app.snapshots.incoming import Incoming
from app.snapshots.notices import Notices
from app.snapshots.rates import ReceiveMeter
from app.snapshots.sources import Announced, Source
from app.snapshots.upstream import Wire

log = logging.getLogger(__name__)

INLINE_LEAF_BYTES = 1024 * 1024
"""Leaves up to this size are hashed and written in the event loop; larger ones in a thread."""
STREAM_END_S = 0.5
"""How long a relay may take to end its stream after the last leaf."""


@dataclass(slots=True)
class Traffic:
    """What comes from where, over all versions."""

    source: Source | None = None
    """The source that is being pulled from or waited on."""
    bytes_from: dict[str, int] = field(default_factory=dict)
    """Verified payload bytes by kind of source."""
    meters: dict[str, ReceiveMeter] = field(
        default_factory=lambda: {kind: ReceiveMeter() for kind in ("learner", "peer", "store")}
    )

    def got(self, source: Source, count: int) -> None:
        """`count` verified bytes have come."""
        self.bytes_from[source.kind] = self.bytes_from.get(source.kind, 0) + count
        self.meters[source.kind].got(count)


class Download:
    """One version. `stall_s`, `starve_s`: as the Puller's."""

    def __init__(
        self,
        incoming: Incoming,
        wire: Wire,
        sources: Callable[[], Sequence[Source]],
        *,
        notices: Notices,
        traffic: Traffic,
        stall_s: float,
        starve_s: float,
    ) -> None:
        self._incoming = incoming
        self._wire = wire
        self._sources = sources
        self._notices = notices
        self._traffic = traffic
        self._stall_s = stall_s
        self._starve_s = starve_s
        self._tried: set[Source] = set()
        self._lies: Counter[Source] = Counter()

    async def run(self, source: Source, announced: Announced) -> bool:
        """Fetch what is missing, from `source` first. True: all leaves are here; False: none could give the rest."""
        incoming = self._incoming
        stream = announced.stream
        if incoming.have:  # resumed: what follows the document begins at leaf 0
            announced.close()
            stream = None
        while incoming.have < incoming.manifest.leaves:
            self._traffic.source = source
            lied = False
            try:
                await self._fetch(source, stream)
            except IntegrityError as error:
                lied = True
                self._notices.lied(source, incoming.version, error.detail)
            except Lost as error:
                if incoming.have == incoming.manifest.leaves:
                    break
                log.info("left %s at leaf %d of v%d: %s", source.label, incoming.have, incoming.version, error)
                self._notices.stalled(source, incoming.version, str(error))
            self._tried.add(source)
            stream = None
            after = following(self._sources(), self._tried, lied=lied)
            if after is None:
                break
            source = after
        return incoming.have == incoming.manifest.leaves

    async def _fetch(self, source: Source, stream: Connection | None) -> None:
        """Leaves from one source until the last, `stream` being where they come already. Lost or IntegrityError."""
        manifest, loop = self._incoming.manifest, asyncio.get_running_loop()
        if source.kind == "store":
            leaves = self._wire.store.leaves(manifest, self._incoming.have)
        else:
            leaves = self._wire.relay_leaves(source, manifest, self._incoming.have, stream)
        starve_s = patience(self._starve_s, self._stall_s, moved=bool(self._tried))
        try:
            async with asyncio.timeout(starve_s) as limit, aclosing(leaves) as arriving:
                async for n, leaf in arriving:
                    await self._take(source, n, leaf)
                    last = self._incoming.have == manifest.leaves
                    # Reading on to the stream's end keeps the connection for the next version, if it comes at once.
                    limit.reschedule(loop.time() + (STREAM_END_S if last else starve_s))
        except TimeoutError as error:
            raise Lost(f"no leaf for {starve_s:g} s") from error

    async def _take(self, source: Source, n: int, leaf: bytes | memoryview) -> None:
        """Write a leaf, or the right one from elsewhere. IntegrityError when the source is to be left."""
        try:
            await self._write(source, n, leaf)
        except IntegrityError as error:
            self._lies[source] += 1
            if self._lies[source] > LIES_FORGIVEN or not await self._repair(source, n):
                raise
            self._notices.lied(source, self._incoming.version, error.detail)

    async def _write(self, source: Source, n: int, leaf: bytes | memoryview) -> None:
        if len(leaf) <= INLINE_LEAF_BYTES:
            self._incoming.write_leaf(n, leaf)
        else:
            await asyncio.to_thread(self._incoming.write_leaf, n, leaf)
        self._traffic.got(source, len(leaf))

    async def _repair(self, liar: Source, n: int) -> bool:
        """Fetch one leaf elsewhere that `liar` got wrong; its stream waits meanwhile. False: nobody had it right."""
        manifest, version = self._incoming.manifest, self._incoming.version
        for other in repairers(self._sources(), liar, self._tried):
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._write(other, n, await self._wire.one_leaf(other, manifest, n))
                log.info("leaf %d of v%d comes from %s instead of %s", n, version, other.label, liar.label)
                return True
            except (Lost, TimeoutError) as error:
                log.info("%s has no leaf %d of v%d: %s", other.label, n, version, error or "too late")
            except IntegrityError as error:
                self._notices.lied(other, version, error.detail)
        return False
