"""On the machine itself: what the instance metadata service (IMDSv2) says about its end.

Invariant: the service is asked every few seconds for as long as the machine lives; a question that fails is asked
again, and silence never counts as a notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

from providers.base import MalformedAnswer, Notice, ProviderError, Transient

from .events import parse_time

log = logging.getLogger(__name__)
BASE_URL = "http://169.254.169.254"
TOKEN_TTL_S = 21_600
POLL_S = 5.0
"""AWS's advice."""
_ROOT = "/latest/meta-data"


class Imds:
    """One machine's metadata service."""

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None = None, base_url: str = BASE_URL, provider: str = "ec2"
    ) -> None:
        self._http = httpx.AsyncClient(base_url=base_url, transport=transport, timeout=2.0, trust_env=False)
        self._token: str | None = None
        self._provider = provider

    async def _send(self, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
        try:
            return await self._http.request(method, path, headers=headers)
        except httpx.HTTPError as error:
            raise Transient(f"metadata: {type(error).__name__} {error}", provider=self._provider) from error

    async def read(self, path: str) -> httpx.Response | None:
        """A value under /latest/meta-data; None where the service has none (404). A spent token is renewed once."""
        for _ in range(2):
            if self._token is None:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
                made = await self._send("PUT", "/latest/api/token", ttl)
                if not made.is_success or not made.text:
                    raise Transient(f"metadata: no token (HTTP {made.status_code})", provider=self._provider)
                self._token = made.text
            answer = await self._send("GET", f"{_ROOT}/{path}", {"X-aws-ec2-metadata-token": self._token})
            if answer.status_code == 404:
                return None
            if answer.is_success:
                return answer
            if answer.status_code != 401:
                break
            self._token = None
        raise Transient(f"metadata: {path} answered HTTP {answer.status_code}", provider=self._provider)

    async def _when(self, path: str, field: str) -> tuple[str, dict[str, object]] | None:
        answer = await self.read(path)
        if answer is None:
            return None
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict) or not isinstance(value.get(field), str):
            raise MalformedAnswer(f"metadata: {path} has no {field}", provider=self._provider, raw=answer.text)
        return value[field], value

    async def poll(self) -> list[Notice]:
        """What the service says now, the interruption first; [] while it says nothing."""
        name = await self.read("instance-id")
        if name is None:
            raise MalformedAnswer("metadata: no instance-id", provider=self._provider)
        found = []
        action = await self._when("spot/instance-action", "time")
        if action is not None:
            found.append(Notice(self._provider, name.text, "interruption", parse_time(action[0])))
        advice = await self._when("events/recommendations/rebalance", "noticeTime")
        if advice is not None:
            found.append(Notice(self._provider, name.text, "rebalance", parse_time(advice[0])))
        return found

    async def aclose(self) -> None:
        """Close connections."""
        await self._http.aclose()


async def watch(
    imds: Imds, *, poll_s: float = POLL_S, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[Notice]:
    """Each notice of this machine once; ends after the interruption, without which it goes on. Cancel to stop."""
    seen: set[Notice] = set()
    while True:
        try:
            notices = await imds.poll()
        except ProviderError as error:
            log.debug("metadata service: %s", error)
            notices = []
        for notice in notices:
            if notice not in seen:
                seen.add(notice)
                yield notice
        if any(notice.kind == "interruption" for notice in seen):
            return
        await sleep(poll_s)
