"""What a node counts and reports when a version does not come, or does not work, as it should.

Invariant: a fault is counted whether or not its report is taken. Raised are Gone and Unauthorized only, when there is
nobody to work for any more, and WorkerFault, when installing has failed too often in a row.
"""

from __future__ import annotations

import logging
from typing import Literal

from app.protocol.errors import EchoError
from app.protocol.node import Report
from app.rollout_agent.client import NodeClient
from app.rollout_agent.delivery import report_softly
from app.rollout_agent.ledger import WorkLedger
from app.snapshots.sources import Source
from app.snapshots.store import Snapshot

log = logging.getLogger(__name__)


class Faults:
    """The puller's notices, and versions that the engine could not take."""

    def __init__(self, client: NodeClient, ledger: WorkLedger) -> None:
        self._client = client
        self._ledger = ledger

    async def not_installed(self, snapshot: Snapshot, error: EchoError | RuntimeError) -> None:
        """A version could not be put in force, or not at first."""
        detail = error.detail if isinstance(error, EchoError) else f"{type(error).__name__}: {error}"
        log.error("version %d could not be installed: %s", snapshot.version, detail)
        report = Report(kind="engine_error", subject="install", version=snapshot.version, detail=detail[:1000])
        await report_softly(self._client, report)
        self._ledger.fault("install_failed", detail)

    async def died(self) -> None:
        """The engine died while it sampled, and was loaded again."""
        detail = "the engine died and was loaded again"
        await report_softly(self._client, Report(kind="engine_error", subject="died", detail=detail))
        self._ledger.fault("engine_died", detail)

    async def hung(self, detail: str) -> None:
        """Nothing comes out of the engine."""
        self._ledger.errors["hung"] += 1
        await report_softly(self._client, Report(kind="engine_error", subject="hung", detail=detail[:1000]))

    async def lied(self, source: Source, version: int, detail: str) -> None:
        """A source sent what its signature contradicts. `version` −1: it can't be told."""
        await self._upstream("upstream_lied", source, version, detail)

    async def stalled(self, source: Source, version: int, detail: str) -> None:
        """A source was left in the middle of a version."""
        await self._upstream("upstream_stalled", source, version, detail)

    async def delta_refused(self, source: Source, version: int, detail: str) -> None:
        """A delta could not be applied."""
        await self._upstream("delta_refused", source, version, detail)

    async def hub_failed(self, path: str, detail: str) -> None:
        """A model file did not come from the Hugging Face Hub."""
        self._ledger.errors["hub_failed"] += 1
        await report_softly(self._client, Report(kind="hub_failed", subject=path[:200], detail=detail[:1000]))

    async def _upstream(
        self,
        kind: Literal["upstream_lied", "upstream_stalled", "delta_refused"],
        source: Source,
        version: int,
        detail: str,
    ) -> None:
        self._ledger.errors[kind] += 1
        subject = (source.node_id or source.kind)[:200]
        known = version if version >= 0 else None
        await report_softly(self._client, Report(kind=kind, subject=subject, version=known, detail=detail[:1000]))
