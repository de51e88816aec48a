"""One run of the engine's server, from its start to its end, and what was asked of it.

Invariant: `settled` is set unless a version is being put in force; while it is not, no completion is given out, because
what was sampled since the new weights came may turn out to be of no version. `bad` names the version that did.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.protocol.errors import BadInput, Unavailable
from app.rollout_agent.engines.base import EngineDied, Tainted
from app.rollout_agent.engines.blueprint import Blueprint
from app.rollout_agent.engines.vllm_answers import PROBE_TOLERANCE, scoring_params
from app.rollout_agent.engines.vllm_answers import prompt_logprobs as logprobs_of
from app.rollout_agent.engines.vllm_command import BASE_NAME, VllmOptions, command, copies, environment
from app.rollout_agent.engines.vllm_features import CHECKSUM_ROUTE, missing_routes
from app.rollout_agent.engines.vllm_http import URGENT, EngineHttp
from app.rollout_agent.engines.vllm_process import EngineProcess, free_port

LOOK_S = 0.2
"""Between two looks whether the server has come up."""
SETTLE_S = 1800.0
"""A version is in force or given up long before: the sum of what a swap's calls may take."""
DYING_S = 3.0
"""So long after a failed call a dying server has to be gone."""
SALVAGE_S = 3.0
DRAIN_S = 15.0
STOP_S = 60.0
"""Ending a server, and what else there is to do before the next one starts, takes no longer."""


class Life:
    """A server that runs, and its requests. Made by `begin`."""

    def __init__(self, process: EngineProcess, http: EngineHttp, copies: int = 1) -> None:
        self.process = process
        self.http = http
        self._copies = copies
        self.settled = asyncio.Event()
        self.settled.set()
        self.bad: int | None = None
        self.hashes = False
        """The server can tell checksums of its weights."""
        self.over = False
        """Nothing more is asked of it."""
        self._asked: dict[str, str] = {}
        """Requests under way → the model or adapter that they are of."""
        self._changed = asyncio.Event()

    @classmethod
    async def begin(cls, options: VllmOptions, model: Path, blueprint: Blueprint, env: Mapping[str, str]) -> Life:
        """Start a server and wait until a token comes out of it. Raises BadInput, Unavailable."""
        key, port = secrets.token_urlsafe(32), free_port()
        arguments = command(options, model, port, blueprint)
        log_path = options.work_dir / "engine.log"
        process = await EngineProcess.start(arguments, environment(options, env, key), log_path)
        life, good = cls(process, EngineHttp(port, key), copies(options, blueprint.split)), False
        try:
            async with asyncio.timeout(options.start_timeout_s):
                await life._come_up(blueprint)
            good = True
        except TimeoutError:
            detail = f"the engine did not come up in {options.start_timeout_s:.0f} s: {process.tail()}"
            raise Unavailable(detail[:1500]) from None
        finally:
            if not good:
                await asyncio.shield(life.end(grace_s=0.0))
        return life

    async def _come_up(self, blueprint: Blueprint) -> None:
        while not await self.http.up():
            if await self.process.ended(LOOK_S):
                raise Unavailable(f"the engine ended while it started: {self.process.tail()}"[:1500])
        paths = await self.http.paths()
        self.hashes = CHECKSUM_ROUTE in paths
        lacking = missing_routes(paths, lora=blueprint.adapter is not None)
        if lacking:
            raise BadInput(f"vLLM {await self.http.version()} has no {', '.join(lacking)}; install vllm 0.32.0")
        await self.one_token(blueprint.eos[0], salt="start")

    async def one_token(self, token: int, *, salt: str, model: str = BASE_NAME, timeout_s: float = 60.0) -> None:
        """Have one token sampled. Raises Unavailable."""
        await self.score([token], salt=salt, model=model, timeout_s=timeout_s)

    async def score(
        self, token_ids: Sequence[int], *, salt: str, model: str = BASE_NAME, timeout_s: float = 600.0
    ) -> list[float]:
        """Log-prob of each token but the first, ahead of all that waits, as the model's first copy has it once all of
        them have answered. Raises BadInput, Unavailable, Tainted if they are not of one mind."""
        asked = [self._score(token_ids, salt, model, timeout_s, copy) for copy in range(self._copies)]
        first, *others = await asyncio.gather(*asked)
        for copy, found in enumerate(others, 1):
            off = sum(abs(a - b) for a, b in zip(found, first, strict=True)) / max(1, len(first))
            if not off <= PROBE_TOLERANCE:
                raise Tainted(f"copies 0 and {copy} of the engine's model are {off:.3f} nats apart")
        return first

    async def _score(self, token_ids: Sequence[int], salt: str, model: str, timeout_s: float, copy: int) -> list[float]:
        answer = await self.http.generate(
            token_ids,
            scoring_params(),
            request_id=f"score-{secrets.token_hex(8)}",
            salt=salt,
            model=model,
            priority=URGENT,
            copy=copy if self._copies > 1 else None,
            timeout_s=timeout_s,
        )
        return logprobs_of(answer, token_ids)

    async def generate(self, token_ids: Sequence[int], sampling: Mapping[str, Any], salt: str, model: str) -> Any:
        """One answer, told apart from others until it is there. Raises BadInput, Unavailable, EngineDied."""
        async with self._under_way(model) as request_id:
            try:
                answer = await self.http.generate(token_ids, sampling, request_id=request_id, salt=salt, model=model)
            except Unavailable as error:
                if await self.dead():
                    raise EngineDied(f"the engine died: {error.detail}") from error
                raise
        return answer

    @asynccontextmanager
    async def _under_way(self, model: str) -> AsyncIterator[str]:
        request_id = secrets.token_hex(12)
        self._asked[request_id] = model
        try:
            yield request_id
        finally:
            del self._asked[request_id]
            self._changed.set()

    def models(self) -> Counter[str]:
        """Requests under way by model or adapter."""
        return Counter(self._asked.values())

    async def wait_settled(self) -> None:
        """Wait for the verdict on a version. Raises Unavailable if there is none."""
        if self.settled.is_set():
            return
        try:
            async with asyncio.timeout(SETTLE_S):
                await self.settled.wait()
        except TimeoutError:
            raise Unavailable(f"no version was in force after {SETTLE_S:.0f} s") from None

    async def abort(self, timeout_s: float, *, model: str | None = None) -> None:
        """Cut what is under way now (of one model), and wait until it is answered; in vain if the server is stuck.

        Asked again and again, because a request may still be on its way into the server. Raises Unavailable.
        """
        mine = {name for name, of in self._asked.items() if model in (None, of)}
        async with asyncio.timeout(timeout_s):
            while mine := mine & self._asked.keys():
                self._changed.clear()
                await self.http.abort(sorted(mine))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()

    async def last_words(self) -> str:
        """After a call that failed, to be added to what is said of it: what the engine printed, if it has died."""
        return f"; the engine died: {self.process.tail()}"[:1000] if await self.dead() else ""

    async def dead(self) -> bool:
        """After a call that failed: whether the engine has died or is dying; a server outlives its engine a moment."""
        if await self.process.ended(0.05):
            return True
        if await self.http.up():
            return False
        return await self.process.ended(DYING_S) or not await self.http.up()

    async def condemn(self, version: int) -> None:
        """The weights in force are of no version: save what was sampled before, and end."""
        self.bad = version
        if self.process.alive:
            with contextlib.suppress(TimeoutError, Unavailable, BadInput):
                await self.abort(SALVAGE_S)
        await self.end(grace_s=0.0)

    async def end(self, grace_s: float = 8.0) -> None:
        """End the server. What still waits for an answer gets an error."""
        self.over = True
        try:
            await self.process.stop(grace_s)
        finally:
            self.settled.set()
            await self.http.aclose()
