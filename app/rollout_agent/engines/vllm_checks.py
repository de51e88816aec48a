"""When the engine is asked for its checksums, and what it is held against.

Invariant: the engine stands still while it hashes, so it is asked at every version only where that takes next to no
time; elsewhere a bounded share of the time goes into it, and a version that is looked at is held against the last one
that was, whatever came in between. One server's life long: a new process is looked at anew, before its first version.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from app.protocol.errors import BadInput, Unavailable
from app.protocol.node import Weights
from app.rollout_agent.engines.checksums import Mark, Seen, check
from app.rollout_agent.engines.marks import marks_of
from app.rollout_agent.engines.vllm_command import VllmOptions, keeps_values, kind_of
from app.rollout_agent.engines.vllm_http import EngineHttp

log = logging.getLogger(__name__)

CHEAP_S = 0.1
"""A look that takes no longer is taken at every version."""
TIMES_PROBED, TIMES_ALONE = 100.0, 20.0
"""A longer one not before so many times its length have passed: 1 % of the time, or, where no probe says anything of
the numbers, 5 %."""


def due(cost_s: float, since_s: float | None, *, probed: bool) -> bool:
    """Whether to look at a version. `cost_s`: what the last look took; `since_s`: when it was, None before the first
    version; `probed`: whether the version's log-probs are compared as well."""
    if since_s is None or cost_s <= CHEAP_S:
        return True
    return since_s >= cost_s * (TIMES_PROBED if probed else TIMES_ALONE)


def make_checks(http: EngineHttp, options: VllmOptions, model: Path, version: str, dtype: torch.dtype) -> WeightChecks:
    """For a server that was started with these options and model files, of this version of vLLM."""
    config = json.loads((model / "config.json").read_bytes())
    machine = torch.cuda.get_device_name(0) if options.device == "cuda" and torch.cuda.is_available() else "cpu"
    kind = kind_of(version, str(dtype).removeprefix("torch."), machine, options.extra_args)
    return WeightChecks(http, dtype, lossless=keeps_values(options.extra_args, config), kind=kind)


class WeightChecks:
    """The checksums of one running server. `lossless`: see `checksums`; `dtype`: what the engine keeps weights in;
    `kind`: what decides in which form, but for how many workers share the model."""

    def __init__(
        self,
        http: EngineHttp,
        dtype: torch.dtype,
        *,
        lossless: bool,
        kind: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = http
        self._dtype = dtype
        self._lossless = lossless
        self._kind = kind
        self._told: Weights | None = None
        """Of the version that was looked at last."""
        self._clock = clock
        self._seen: Seen | None = None
        self._looked_at: float | None = None
        """When a version was looked at last."""
        self._cost_s = 0.0
        self._off = False

    def told_of(self, version: int | None) -> Weights | None:
        """What the engine said when it was looked at with this version; None if it was not."""
        return self._told if self._told is not None and self._told.version == version else None

    async def prepare(self, file: Path, *, probed: bool) -> Mapping[str, Mark] | None:
        """What the engine has to be once it has loaded `file`; None: this version is not looked at.

        To be asked before the engine is touched. The first time it is looked at as it is, in force or not: if that
        fails, it is never again. Raises IntegrityError.
        """
        if self._off:
            return None
        if self._seen is None:
            try:
                self._seen = Seen(await self._look(), {})
            except (Unavailable, BadInput) as error:
                self._off = True
                log.warning("the engine's checksums are not used: %s", error.detail)
                return None
        since = None if self._looked_at is None else self._clock() - self._looked_at
        if not due(self._cost_s, since, probed=probed):
            return None
        return await asyncio.to_thread(marks_of, file, self._seen.names, self._dtype)

    async def verify(self, marks: Mapping[str, Mark] | None, version: int) -> None:
        """Hold the engine, which stands still, against what `prepare` gave. Raises Tainted, Unavailable."""
        if marks is None or self._seen is None:
            return
        first = self._looked_at is None
        self._seen = check(self._seen, marks, await self._look(), lossless=self._lossless)
        self._looked_at = self._clock()
        kind = f"{self._kind}, {self._seen.workers} workers"
        self._told = Weights(version=version, engine=kind[:300], digest=self._seen.digest)
        if first:
            log.info("checksums take %.3f s: %s", self._cost_s, self._seen.coverage)

    async def _look(self) -> dict[str, str]:
        began = self._clock()
        found = await self._http.checksums()
        self._cost_s = self._clock() - began
        return found
