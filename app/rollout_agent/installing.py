"""Putting a version in force in the engine.

Invariant: an engine whose weights are not what the learner signed is loaded again before it samples anything.
"""

from __future__ import annotations

import logging
from pathlib import Path

from app.rollout_agent.engines.base import Engine, StreamEngine, Tainted
from app.snapshots.store import Snapshot

log = logging.getLogger(__name__)


def put_in_force(engine: Engine, model: Path, snapshot: Snapshot) -> Tainted | None:
    """Install a snapshot; what went wrong at first when it took loading the engine from the folder `model` again.

    Runs in the engine's thread, in one go, so that no batch comes between the failure and the second try. Raises what
    `Engine.install` raises; the second failure is final.
    """

    def install() -> None:
        engine.install(snapshot.payload_path, snapshot.manifest, snapshot.version)

    try:
        install()
    except Tainted as error:
        log.error("version %d: %s; loading the engine again", snapshot.version, error.detail)
        engine.load(model)
        install()
        return error
    return None


async def put_in_force_live(engine: StreamEngine, model: Path, snapshot: Snapshot) -> Tainted | None:
    """The same for an engine that goes on sampling meanwhile: samples that run are not waited for."""
    try:
        await engine.install(snapshot.payload_path, snapshot.manifest, snapshot.version)
    except Tainted as error:
        log.error("version %d: %s; loading the engine again", snapshot.version, error.detail)
        await engine.load(model)
        await engine.install(snapshot.payload_path, snapshot.manifest, snapshot.version)
        return error
    return None
