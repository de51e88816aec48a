"""vLLM in a process of its own, which this one starts, feeds and ends.

Invariant: `version` is that of the weights in the engine, as far as a comparison with the learner can show, or None. A
version goes in whole or the engine is condemned: whatever fails between the first changed weight and the verdict (an
error, a timeout, a parameter that was not filled, log-probs that are not the learner's) ends the process, and what was
sampled since is given to nobody. This process never imports vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from app.protocol.errors import BadInput, EchoError, IntegrityError, Unavailable
from app.protocol.node import Weights
from app.rollout_agent.engines.base import Completion, EngineDied, Load, Span, Tainted, check_kind
from app.rollout_agent.engines.blueprint import Blueprint, read_blueprint
from app.rollout_agent.engines.vllm_adapters import Adapters
from app.rollout_agent.engines.vllm_answers import (
    certain,
    check_probe,
    check_prompt,
    check_report,
    completion_of,
    cut,
    load_of,
    sampling_params,
    tokens_made,
)
from app.rollout_agent.engines.vllm_checks import WeightChecks, make_checks
from app.rollout_agent.engines.vllm_command import BASE_NAME, VllmOptions
from app.rollout_agent.engines.vllm_features import features
from app.rollout_agent.engines.vllm_life import DRAIN_S, SETTLE_S, STOP_S, Life
from app.rollout_agent.engines.vllm_payload import check_payload, readable
from app.rollout_agent.engines.vllm_process import installed_version
from app.snapshots.manifest import Manifest

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""Between two looks at the length of the server's log."""


class VllmEngine:
    """A `StreamEngine` over a vLLM server of its own."""

    def __init__(self, options: VllmOptions, env: Mapping[str, str] | None = None) -> None:
        self._options = options
        self._env = os.environ if env is None else env
        self._dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        self._blueprint: Blueprint | None = None
        self._life: Life | None = None
        self._watch: asyncio.Task[None] | None = None
        self._adapters: Adapters | None = None
        self._checks: WeightChecks | None = None
        self._version: int | None = None
        self._quantisation: str | None = None
        self._swap = asyncio.Lock()

    @property
    def version(self) -> int | None:
        """Installed policy version; None before the first `install`, when tainted, and when the process has died."""
        return self._version

    @property
    def quantisation(self) -> str | None:
        """How the installed weights were quantised before they were sent."""
        return self._quantisation

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that `load` opened."""
        return self._blueprint.tokenizer if self._blueprint is not None else None

    @property
    def weights(self) -> Weights | None:
        """Of the version in force, if the engine was looked at with it."""
        return None if self._checks is None else self._checks.told_of(self._version)

    @property
    def patience_s(self) -> float:
        """The sum of what the calls of a start, or of a swap, may take."""
        return max(self._options.start_timeout_s + STOP_S, SETTLE_S)

    @property
    def pid(self) -> int | None:
        """The process that leads the engine's group; None while there is none."""
        return self._life.process.pid if self._life is not None and self._life.process.alive else None

    @property
    def base_url(self) -> str | None:
        """Where the server listens; None while there is none. It answers nobody without its key."""
        return self._life.http.base_url if self._life is not None else None

    async def load(self, model_dir: Path) -> None:
        """Start the server, after ending the one before. Raises BadInput, Unavailable."""
        # First, so that a swap that hangs fails now instead of being waited for.
        await self._end()
        async with self._swap:
            await self._end()
            await self._start(model_dir)

    async def _start(self, model_dir: Path) -> None:
        version = features(await installed_version(self._options.python, self._env))
        if not version.tested:
            log.warning("vLLM %s was never tested with this agent; 0.32.0 was", version.version)
        self._blueprint = await asyncio.to_thread(read_blueprint, model_dir)
        await asyncio.to_thread(self._options.work_dir.mkdir, parents=True, exist_ok=True)
        life = await Life.begin(self._options, model_dir, self._blueprint, self._env)
        if self._blueprint.adapter is not None:
            self._adapters = Adapters(life, model_dir, self._options.work_dir / "adapters")
        elif life.hashes:
            self._checks = make_checks(life.http, self._options, model_dir, version.version, self._dtype)
        self._life = life
        self._watch = asyncio.create_task(self._watch_over(life), name="engine watch")
        log.info("vLLM %s runs as process %d", version.version, life.process.pid)

    async def _watch_over(self, life: Life) -> None:
        """Notice the end of a server that nobody ended, and keep its log short meanwhile."""
        while not await life.process.ended(LOOK_S):
            await asyncio.to_thread(life.process.trim_log)
        if not life.over:
            self._lost(life)

    def _lost(self, life: Life) -> None:
        if life is self._life and not life.over:
            life.over = True
            self._version = None
            life.process.kill()
            log.error("the engine died: %s", life.process.tail()[:1500])

    async def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        """Check everything aside, then swap in place. Raises IntegrityError (nothing has changed), Tainted."""
        async with self._swap:
            life, blueprint = self._living(), self._ready()
            check_kind(manifest, adapted=self._adapters is not None)
            await asyncio.to_thread(check_payload, payload, manifest, blueprint.layout)
            aside = self._options.work_dir / "restored.safetensors"
            async with readable(payload, manifest, aside, self._dtype) as file:
                if self._adapters is not None:
                    await self._adapt(self._adapters, file, manifest, version)
                else:
                    await self._replace(life, file, manifest, version)

    async def _replace(self, life: Life, file: Path, manifest: Manifest, version: int) -> None:
        """The swap itself. Nothing is given out between the pause and the verdict."""
        good, checks = False, self._checks
        marks = await checks.prepare(file, probed=manifest.probe is not None) if checks is not None else None
        life.settled.clear()
        try:
            await life.http.pause("keep" if self._options.on_swap == "continue" else "abort")
            check_report(await life.http.load_weights(str(file)), len(manifest.weights))
            if checks is not None:
                await checks.verify(marks, version)
            await life.http.label(version)
            await self._resume_with_probe(life, manifest, version)
            good = True
        except (EchoError, LookupError, TypeError, ValueError) as error:
            died = await life.last_words() if isinstance(error, Unavailable) else ""
            raise Tainted(f"v{version} did not go into the engine: {_said(error)}"[:500] + died) from error
        finally:
            if good:
                self._version, self._quantisation = version, manifest.quantisation
                life.settled.set()
            else:
                if life is self._life:
                    self._version = None
                # Cancelled or not: what has these weights must not go on.
                await asyncio.shield(life.condemn(version))

    async def _resume_with_probe(self, life: Life, manifest: Manifest, version: int) -> None:
        """The probe is sent while the scheduler still stands, so that it is in the first step and waits for no other:
        that step fills the caches of all that runs, and takes its time."""
        try:
            async with asyncio.TaskGroup() as calls:
                calls.create_task(self._probe(life, manifest, str(version), BASE_NAME))
                calls.create_task(life.http.resume())
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _adapt(self, adapters: Adapters, file: Path, manifest: Manifest, version: int) -> None:
        """Bring an adapter beside the one in force; if it is not the learner's, it never gets into force."""
        name = await adapters.bring(file, version)
        try:
            await self._probe(self._living(), manifest, name, name)
        except EchoError as error:
            await adapters.drop(name)
            raise IntegrityError(f"the adapter v{version} is not the learner's: {_said(error)}"[:500]) from error
        self._version, self._quantisation = version, manifest.quantisation
        await adapters.put_in_force(name, cut=self._options.on_swap == "resubmit")

    async def _probe(self, life: Life, manifest: Manifest, salt: str, model: str) -> None:
        """Hold the engine's log-probs against the learner's; without a probe in the manifest one token has to do."""
        probe = manifest.probe
        if probe is None:
            await life.one_token(self._ready().eos[0], salt=salt, model=model)
            return
        check_probe(await life.score(probe.token_ids, salt=salt, model=model), probe.logprobs)

    async def sample(self, prompt_ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float) -> Completion:
        """One completion. Raises BadInput, Unavailable, EngineDied."""
        blueprint = self._ready()
        check_prompt(prompt_ids, blueprint.vocabulary)
        wanted = sampling_params(seed=seed, max_tokens=max_tokens, temperature=temperature, eos=blueprint.eos)
        life, version = await self._in_force()
        model = self._adapters.name if self._adapters is not None else BASE_NAME
        spans = None if self._adapters is None else [Span(version, 0)]
        try:
            answer = await life.generate(prompt_ids, wanted, str(version), model)
        except EngineDied:
            self._lost(life)
            raise
        await life.wait_settled()
        completion = completion_of(answer, spans)
        if not wanted["temperature"]:
            completion = certain(completion)
        return completion if life.bad is None else cut(completion, life.bad)

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float) -> list[float]:
        """Log-probs of a completion. Raises BadInput, Unavailable."""
        if temperature != 1.0:
            raise BadInput(f"vLLM scores at temperature 1 only, not at {temperature}")
        if not completion_ids:
            return []
        check_prompt([*prompt_ids[:1], *prompt_ids, *completion_ids], self._ready().vocabulary)
        life, version = await self._in_force()
        model = self._adapters.name if self._adapters is not None else BASE_NAME
        found = await life.score([*prompt_ids, *completion_ids], salt=str(version), model=model)
        return found[len(prompt_ids) - 1 :]

    async def abort(self) -> None:
        """Cut everything. Raises Unavailable if the engine does not obey."""
        life = self._living()
        try:
            await life.abort(DRAIN_S)
        except TimeoutError:
            raise Unavailable(f"the engine has not cut its requests in {DRAIN_S:.0f} s") from None

    async def load_figures(self) -> Load:
        """From the engine's own metrics."""
        return load_of(await self._living().http.metrics())

    async def healthy(self, timeout_s: float) -> bool:
        """Whether a token comes out: of a probe, or, where the engine is full, of anything that runs."""
        life = self._life
        if life is None or life.over or self._blueprint is None:
            return False
        try:
            before = tokens_made(await life.http.metrics())
            return await self._token_comes(life, before, timeout_s)
        except EchoError:
            return False

    async def _token_comes(self, life: Life, before: float, timeout_s: float) -> bool:
        try:
            await life.one_token(self._ready().eos[0], salt="probe", timeout_s=timeout_s)
        except EchoError:
            return tokens_made(await life.http.metrics()) > before
        return True

    async def close(self) -> None:
        """End the server and all that it started."""
        await self._end()

    async def _end(self) -> None:
        life, self._life, self._version, self._adapters, self._checks = self._life, None, None, None, None
        if life is not None:
            await life.end()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None

    async def _in_force(self) -> tuple[Life, int]:
        """The server and the version that a request is of, once no swap is under way. Raises Unavailable."""
        await self._living().wait_settled()
        life = self._living()
        if self._version is None:
            raise Unavailable("no policy version is installed")
        return life, self._version

    def _living(self) -> Life:
        if self._life is None or self._life.over:
            raise Unavailable("the engine does not run; it has to be loaded first")
        return self._life

    def _ready(self) -> Blueprint:
        if self._blueprint is None:
            raise Unavailable("the engine was not loaded yet")
        return self._blueprint


def _said(error: Exception) -> str:
    return error.detail if isinstance(error, EchoError) else repr(error)
