"""Putting a version in force in the engine.

Invariant: an engine whose weights are not what the learner signed, or that has died, is loaded again before it samples
anything. A version that fails twice is left for the one before it, whose weights the engine has then; there is no third
try.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from app.protocol.errors import EchoError, IntegrityError, Unavailable
from app.rollout_agent.engines.base import Engine, Tainted
from app.snapshots.manifest import Manifest
from app.snapshots.store import Snapshot

log = logging.getLogger(__name__)


class Loadable(Protocol):
    """What of an engine that samples all the time is needed here; see StreamEngine."""

    @property
    def version(self) -> int | None:
        """Installed policy version."""
        ...

    async def load(self, model_dir: Path) -> None:
        """Prepare, without a version."""
        ...

    async def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        """Put a version in force."""
        ...


class NotTaken(IntegrityError):
    """A version doesn't go into this engine; the one before it is in force again."""


def put_in_force(engine: Engine, model: Path, snapshot: Snapshot, before: Snapshot | None = None) -> Tainted | None:
    """Install a snapshot; what went wrong at first when it took loading the engine from the folder `model` again.

    Runs in the engine's thread, in one go, so that no batch comes between the failure and the second try. `before` was
    in force last: after a second failure it is put in force again, and NotTaken raised. Raises what `Engine.install`
    raises, and Tainted when `before` fails as well.
    """

    def install(this: Snapshot) -> None:
        engine.install(this.payload_path, this.manifest, this.version)

    def anew(this: Snapshot) -> None:
        engine.load(model)
        install(this)

    try:
        install(snapshot)
        return None
    except Tainted as error:
        first = error
    _log_first(snapshot, first)
    try:
        anew(snapshot)
    except (EchoError, RuntimeError) as error:
        if before is None:
            raise
        _log_second(snapshot, before, error)
        try:
            anew(before)
        except (EchoError, RuntimeError) as worse:
            raise _lost(error, before, worse) from worse
        raise _not_taken(error, before) from error
    return first


async def put_in_force_live(
    engine: Loadable, model: Path, snapshot: Snapshot, before: Snapshot | None = None
) -> EchoError | None:
    """The same for an engine that goes on sampling meanwhile: samples that run are not waited for. One that is found
    dead, as it may have been for long while there was no work, is treated as if the version had killed it."""

    async def install(this: Snapshot) -> None:
        await engine.install(this.payload_path, this.manifest, this.version)

    async def anew(this: Snapshot) -> None:
        await engine.load(model)
        await install(this)

    try:
        await install(snapshot)
        return None
    except EchoError as error:
        if not isinstance(error, Tainted) and not _dead(engine, before, error):
            raise
        first = error
    _log_first(snapshot, first)
    try:
        await anew(snapshot)
    except (EchoError, RuntimeError) as error:
        if before is None:
            raise
        _log_second(snapshot, before, error)
        try:
            await anew(before)
        except (EchoError, RuntimeError) as worse:
            raise _lost(error, before, worse) from worse
        raise _not_taken(error, before) from error
    return first


def _dead(engine: Loadable, before: Snapshot | None, error: EchoError) -> bool:
    """Whether an engine that has not taken a version does not live: it had one and has it no more, or it can't be
    reached at all."""
    return engine.version is None and (before is not None or isinstance(error, Unavailable))


def _log_first(snapshot: Snapshot, error: EchoError) -> None:
    log.error("version %d: %s; loading the engine again", snapshot.version, error.detail)


def _log_second(snapshot: Snapshot, before: Snapshot, error: Exception) -> None:
    log.error("version %d again: %s; going back to version %d", snapshot.version, _said(error), before.version)


def _not_taken(error: Exception, before: Snapshot) -> NotTaken:
    return NotTaken(f"{_said(error)[:800]}; version {before.version} is in force again")


def _lost(error: Exception, before: Snapshot, worse: Exception) -> Tainted:
    then = f"nor could version {before.version} be put in force again: {_said(worse)[:400]}"
    return Tainted(f"{_said(error)[:400]}; {then}")


def _said(error: Exception) -> str:
    return error.detail if isinstance(error, EchoError) else f"{type(error).__name__}: {error}"
