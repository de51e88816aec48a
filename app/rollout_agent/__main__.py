"""The agent as a process.

Invariant: exit status 0: ended in order; 1: a fault, or it never got to work; 2: its settings can't be used. Nothing
secret is logged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from contextlib import AsyncExitStack

import httpx

from app.open_files import allow_open_files
from app.protocol.errors import BadInput, EchoError
from app.protocol.startup import MachineFacts
from app.rollout_agent.agent import Agent
from app.rollout_agent.choice import engine_for, has_vllm
from app.rollout_agent.config import AgentSettings, load_settings, relay_address, self_destruct
from app.rollout_agent.engines.base import Engine, StreamEngine
from app.rollout_agent.engines.registry import choose_device, gpu_name, make_engine
from app.rollout_agent.facts import machine_facts, open_nvml
from app.rollout_agent.lifecycle import Ending
from app.rollout_agent.preemption.watch import source_of
from app.rollout_agent.tuning import keep_windows

log = logging.getLogger(__name__)


def run_agent() -> int:
    """Run one node until it ends; settings come from the environment. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # At INFO it logs every URL, and presigned ones are secrets.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    allow_open_files()
    try:
        settings = load_settings()
    except BadInput as error:
        log.error("%s", error.detail)
        return 2
    try:
        if settings.tune_network:
            keep_windows()
        facts = machine_facts(settings.agent_dir, open_nvml())
        on_gpu = choose_device(settings.device) == "cuda"
        chosen = engine_for(settings.engine, facts, on_gpu=on_gpu, has_vllm=has_vllm(settings))
        settings = settings.model_copy(update={"engine": chosen})
        engine = make_engine(settings)
        ending = asyncio.run(_run(settings, engine, facts, on_gpu))
    except EchoError as error:
        log.error("%s", error.detail)
        return 1
    log.log(logging.ERROR if ending.code else logging.INFO, "ended: %s", ending.reason)
    _leave_stuck_threads(ending.code)
    return ending.code


async def _run(settings: AgentSettings, engine: Engine | StreamEngine, facts: MachineFacts, on_gpu: bool) -> Ending:
    notices = source_of(settings.notices, os.environ)
    async with httpx.AsyncClient() as http, AsyncExitStack() as stack:
        if notices is not None:
            stack.push_async_callback(notices.aclose)
        agent = Agent(
            settings,
            engine,
            http,
            relay=relay_address(settings.relay_port, os.environ),
            self_destruct=self_destruct(os.environ),
            gpu_name=settings.gpu_name or gpu_name(),
            notices=notices,
            facts=facts,
            on_gpu=on_gpu,
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, agent.stop)
        loop.add_signal_handler(signal.SIGTERM, agent.terminated)
        return await agent.run()


def _leave_stuck_threads(code: int) -> None:
    """End at once if a thread hangs (in a task's reward): the interpreter would wait for it on a paid machine."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(timeout=1.0)
            if thread.is_alive():
                log.error("thread %s hangs; leaving it", thread.name)
                logging.shutdown()
                os._exit(code)


if __name__ == "__main__":
    sys.exit(run_agent())
