"""EC2: what the instance metadata service (IMDSv2) says about the machine's end.

Invariant: every value is asked for with a session token, which is renewed once where it is spent.
"""

from __future__ import annotations

from datetime import UTC, datetime

import httpx

from app.protocol.errors import Unavailable
from app.protocol.node import Interruption
from app.rollout_agent.preemption.metadata import ADDRESS, Metadata, unclear

TOKEN_TTL_S = 21_600
POLL_S = 5.0
"""AWS's advice."""
ACTION, ADVICE = "spot/instance-action", "events/recommendations/rebalance"
_ROOT = "/latest/meta-data"


class Imds:
    """One machine's metadata service."""

    def __init__(self, base_url: str = ADDRESS, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.pause_s = POLL_S
        self._metadata = Metadata(base_url, transport)
        self._token: str | None = None

    async def poll(self) -> list[Interruption]:
        """What it says now. Raises Unavailable."""
        action = await self._read(ACTION)
        if action is not None:
            what, at = _field(ACTION, action, "action"), _time(ACTION, action, "time")
            return [Interruption(kind="interruption", source="ec2", at=at, detail=f"{ACTION}: {what}"[:200])]
        advice = await self._read(ADVICE)
        if advice is None:
            return []
        told = f"{ADVICE}: {_field(ADVICE, advice, 'noticeTime')}"
        return [Interruption(kind="rebalance", source="ec2", detail=told[:200])]

    async def aclose(self) -> None:
        """Close connections."""
        await self._metadata.aclose()

    async def _read(self, path: str) -> httpx.Response | None:
        """A value under /latest/meta-data; None where the service has none (404)."""
        for _ in range(2):
            token = self._token or await self._new_token()
            answer = await self._metadata.ask("GET", f"{_ROOT}/{path}", {"X-aws-ec2-metadata-token": token})
            if answer.status_code == 404:
                return None
            if answer.is_success:
                return answer
            if answer.status_code != 401:
                break
            self._token = None
        raise unclear(path, answer)

    async def _new_token(self) -> str:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        made = await self._metadata.ask("PUT", "/latest/api/token", ttl)
        if not made.is_success or not made.text.isascii() or not made.text.isprintable() or not made.text:
            raise Unavailable(f"the metadata service gives no token (HTTP {made.status_code})")
        self._token = made.text
        return made.text


def _field(path: str, answer: httpx.Response, name: str) -> str:
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        raise unclear(path, answer)
    return str(value[name])


def _time(path: str, answer: httpx.Response, name: str) -> datetime:
    """An instant of the answer, UTC unless it says otherwise."""
    try:
        found = datetime.fromisoformat(_field(path, answer, name))
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise unclear(path, answer) from None
