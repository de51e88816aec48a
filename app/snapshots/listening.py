"""Waiting until a source announces a version newer than ours.

Invariant: nobody is waited on for longer than one long poll, and not that long once the list of sources has changed or
a newer version should have been announced. An answer that nobody takes is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from app.protocol.errors import Conflict, IntegrityError
from app.snapshots.connection import Lost
from app.snapshots.download import Traffic
from app.snapshots.incoming import Incoming
from app.snapshots.notices import UNKNOWN_VERSION, Notices
from app.snapshots.sources import Announced, Source
from app.snapshots.store import SnapshotStore
from app.snapshots.upstream import Wire

log = logging.getLogger(__name__)

POLL_WAIT_S = 25.0
TICK_S = 0.2
"""How often the source list and the target are looked at while waiting for an announcement."""
SHORT_POLL_S = 1.0
"""A relay that answers "nothing new" faster than this is not waiting as asked: turn to the next."""

Silence = Literal["next", "again", "quiet"]
"""Why nothing was announced: turn to the next source; begin again; the source had nothing new for a whole poll."""


class Listener:
    """Asks the sources in turn. `grace_s`: how long after a version is known to be out it may go unannounced."""

    def __init__(
        self,
        store: SnapshotStore,
        wire: Wire,
        sources: Callable[[], Sequence[Source]],
        target: Callable[[], int | None],
        *,
        notices: Notices,
        traffic: Traffic,
        grace_s: float,
        retry_s: float,
    ) -> None:
        self.whole_only = False
        """After a delta could not be used: name no base, until a version has come."""
        self._store = store
        self._wire = wire
        self._sources = sources
        self._target = target
        self._notices = notices
        self._traffic = traffic
        self._grace_s = grace_s
        self._retry_s = retry_s

    async def announcement(self) -> tuple[Source, Incoming, Announced] | None:
        """Ask the sources in turn for a version newer than ours; None: begin again (after the pause if all failed)."""
        sources = tuple(self._sources())
        quiet = False
        for source in sources:
            if quiet and source.kind != "learner":
                continue
            self._traffic.source = source
            answer = await self._ask(source, sources, 0.0 if quiet else POLL_WAIT_S)
            if answer == "again":
                return None
            # Two peers may be waiting for each other: after a long poll without news look at the learner, too.
            quiet = quiet or answer == "quiet"
            if isinstance(answer, Announced):
                try:
                    return source, await self._begin(answer), answer
                except (IntegrityError, Conflict) as error:
                    # Who offers a delta of a base that wasn't named to it may do so again.
                    self.whole_only = self.whole_only or bool(answer.delta)
                    self._notices.lied(source, UNKNOWN_VERSION, error.detail)
        if not quiet:
            await asyncio.sleep(self._retry_s)
        return None

    async def _begin(self, announced: Announced) -> Incoming:
        try:
            if announced.delta:
                return await asyncio.to_thread(self._store.begin_delta, announced.delta, announced.document)
            return await asyncio.to_thread(self._store.begin, announced.document)
        except BaseException:
            # Cancelled or a full disk too, nobody else knows the connection: it is closed, and the error goes on.
            announced.close()
            raise

    async def _ask(self, source: Source, sources: tuple[Source, ...], wait_s: float) -> Announced | Silence:
        have = self._have()
        try:
            if source.kind == "store":
                target = self._target()
                if target is None or target <= have:
                    return "next"
                return await self._wire.store.step(target, have, self._held())
            return await self._wait_for_relay(source, sources, have, wait_s)
        except Lost as error:
            log.info("%s announces nothing: %s", source.label, error)
        except IntegrityError as error:
            self._notices.lied(source, UNKNOWN_VERSION, error.detail)
        return "next"

    async def _wait_for_relay(
        self, source: Source, sources: tuple[Source, ...], have: int, wait_s: float
    ) -> Announced | Silence:
        """One long poll, given up when the list changes or a newer version should long have been announced."""
        loop = asyncio.get_running_loop()
        started, behind_since = loop.time(), None
        poll = asyncio.create_task(self._wire.poll(source, have, wait_s, self._held()))
        answered = False
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
                elif now - behind_since >= self._grace_s:
                    log.info("%s has not announced v%d in time", source.label, target)
                    return "next"
            answered = True
        finally:
            if not answered:
                poll.add_done_callback(_drop)
                poll.cancel()
                await asyncio.wait({poll}, timeout=TICK_S)
        announced = poll.result()
        if announced is not None:
            return announced
        return "next" if loop.time() - started < SHORT_POLL_S else "quiet"

    def _held(self) -> list[int]:
        """Versions that may be the base of a delta."""
        return [] if self.whole_only else self._store.versions

    def _have(self) -> int:
        latest = self._store.latest()
        return -1 if latest is None else latest.version


def _drop(poll: asyncio.Task[Announced | None]) -> None:
    """A poll that was given up may have had its answer in that very moment."""
    if poll.cancelled() or poll.exception() is not None:
        return
    announced = poll.result()
    if announced is not None:
        announced.close()
