"""Watching for the machine's end.

Invariant: each notice is told once, as soon as it is seen; silence never counts as a notice, and a machine without a
metadata service costs three questions and one line of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import httpx

from app.protocol.errors import BadInput, Unavailable
from app.protocol.node import Interruption
from app.rollout_agent.preemption.gce import Gce
from app.rollout_agent.preemption.imds import Imds
from app.rollout_agent.preemption.metadata import ADDRESS, Source

log = logging.getLogger(__name__)

START_TRIES = 3
Cloud = Literal["", "ec2", "gce"]


def source_of(cloud: Cloud, env: Mapping[str, str]) -> Source | None:
    """The metadata service to ask; None where there is none. `env` may name another address, as the clouds' own
    libraries have it: `AWS_EC2_METADATA_SERVICE_ENDPOINT` (a URL), `GCE_METADATA_HOST` (host and port). Raises BadInput
    if that is none."""
    try:
        if cloud == "ec2":
            return Imds(env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or ADDRESS)
        if cloud == "gce":
            host = env.get("GCE_METADATA_HOST")
            return Gce(f"http://{host}" if host else ADDRESS)
    except httpx.InvalidURL:
        name = "AWS_EC2_METADATA_SERVICE_ENDPOINT" if cloud == "ec2" else "GCE_METADATA_HOST"
        raise BadInput(f"{name} is no address of a metadata service; leave it out for the cloud's own") from None
    return None


async def watch_machine(
    source: Source,
    tell: Callable[[Interruption], None],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Tell each notice of this machine once. Ends after an interruption, or if the service is not there at the start;
    else it goes on: cancel to stop."""
    seen: set[Interruption] = set()
    misses, answered = 0, False
    while True:
        try:
            found = await source.poll()
        except Unavailable as error:
            misses += 1
            if not answered and misses >= START_TRIES:
                log.warning("this machine can't tell when it will be interrupted: %s", error.detail)
                return
            if answered and misses == 1:
                log.warning("no notice of interruption can be seen for now: %s", error.detail)
        else:
            misses, answered = 0, True
            for notice in found:
                if notice not in seen:
                    seen.add(notice)
                    tell(notice)
            if any(notice.kind == "interruption" for notice in found):
                return
        await sleep(source.pause_s)
