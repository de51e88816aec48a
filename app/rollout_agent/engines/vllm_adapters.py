"""Versions that are adapters: several may be in the engine at once, one of them is in force.

Invariant: a request stays with the adapter that it began under, so a completion is of one version; an adapter is
forgotten once nothing is under way of it and it isn't the one in force, and there are never more of them than the
engine can hold: what runs under the oldest is cut then.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from app.protocol.errors import BadInput, EchoError, IntegrityError, Unavailable
from app.rollout_agent.engines.vllm_command import BASE_NAME, MAX_LORAS
from app.rollout_agent.engines.vllm_life import DRAIN_S, Life
from app.rollout_agent.engines.vllm_payload import write_adapter

log = logging.getLogger(__name__)


class Adapters:
    """The adapters of one server, oldest first."""

    def __init__(self, life: Life, model: Path, folder: Path) -> None:
        self._life = life
        self._model = model
        self._folder = folder
        self._names: list[str] = []
        self._brought = 0
        self.name = BASE_NAME
        """What a new request is of."""

    async def bring(self, payload: Path, version: int) -> str:
        """Load a version beside the others; its name. Raises IntegrityError, and then nothing has changed."""
        if not self._brought:
            # Of a server that has ended, in this process or in an earlier one.
            await asyncio.to_thread(shutil.rmtree, self._folder, True)
        await self._make_room()
        self._brought += 1
        name = f"echo2-v{version}-{self._brought}"
        folder = self._folder / name
        await asyncio.to_thread(write_adapter, folder, self._model, payload)
        try:
            await self._life.http.load_adapter(name, str(folder))
        except (BadInput, Unavailable) as error:
            await asyncio.to_thread(shutil.rmtree, folder, True)
            raise IntegrityError(f"the engine does not take the adapter v{version}: {error.detail}"[:500]) from error
        self._names.append(name)
        return name

    async def put_in_force(self, name: str, *, cut: bool) -> None:
        """New requests are of this one. `cut`: what runs under the others comes back as it is, or ends under them if
        the engine does not cut it in time: this one is in force all the same."""
        self.name = name
        for other in [n for n in self._names if n != name]:
            if cut:
                try:
                    await self._cut(other)
                except Unavailable as error:
                    log.warning("what runs under adapter %s goes on: %s", other, error.detail)
            if not self._life.models()[other]:
                await self.drop(other)

    async def drop(self, name: str) -> None:
        """Forget an adapter. That it was not forgotten costs memory and nothing else."""
        self._names.remove(name)
        try:
            await self._life.http.unload_adapter(name)
        except EchoError as error:
            log.warning("adapter %s was not unloaded: %s", name, error.detail)
        await asyncio.to_thread(shutil.rmtree, self._folder / name, True)

    async def _make_room(self) -> None:
        for name in [n for n in self._names if n != self.name and not self._life.models()[n]]:
            await self.drop(name)
        while len(self._names) >= MAX_LORAS:
            oldest = next(n for n in self._names if n != self.name)
            await self._cut(oldest)
            await self.drop(oldest)

    async def _cut(self, name: str) -> None:
        try:
            await self._life.abort(DRAIN_S, model=name)
        except TimeoutError:
            raise Unavailable(f"the engine has not cut its requests in {DRAIN_S:.0f} s") from None
