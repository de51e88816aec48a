"""The node's calls to the control service and the object store.

Invariant: every call has a timeout; only calls that may safely happen twice are repeated; an answer that is not a
success becomes one of the errors of `app.protocol.errors`; no token and no presigned URL gets into a message.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from app.protocol import errors
from app.protocol.errors import Unavailable
from app.protocol.node import Directives, Heartbeat, JoinAnswer, JoinRequest, Leave, Report, SnapshotUrls
from app.protocol.startup import StartProgress
from app.protocol.work import (
    CommitAnswer,
    CommitRequest,
    PartialAnswer,
    UploadRequest,
    UploadSlot,
    WorkAnswer,
    WorkRequest,
)
from app.rollout_agent.reach import Got, backoff, error_of, never_sent, reach
from app.rollout_agent.redirects import Origin, follow

log = logging.getLogger(__name__)

CALL_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
TRANSFER_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
SLOWEST_BYTES_PER_S = 1_000_000
"""A large file that comes slower than that is given up."""
LONG_POLL_MARGIN_S = 10.0
RETRIES = 4
RANGE_REFUSED = 416

Answer = TypeVar("Answer", bound=BaseModel)


STORE = Origin("the object store", TRANSFER_TIMEOUT, RETRIES)


class NodeClient:
    """Calls under `{control_url}/v1/nodes`. Counts payload bytes in both directions.

    Raises Unavailable when the other side can't be reached or fails, else the error that it answered with. `http` is
    the caller's to close.
    """

    def __init__(
        self,
        control_url: str,
        http: httpx.AsyncClient,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._base = f"{control_url.rstrip('/')}/v1/nodes"
        self._http = http
        self._sleep = sleep
        self._jitter = jitter
        self._node_id = ""
        self._headers: dict[str, str] = {}
        self.bytes_up = 0
        self.bytes_down = 0

    async def join(self, request: JoinRequest, join_token: str) -> JoinAnswer:
        """Trade the one-time token for a node token, which all later calls use.

        A lost answer is not asked for again: the token would be found used. A connection that never came about is.
        """
        headers = {"Authorization": f"Bearer {join_token}"}
        answer = await self._repeat(
            lambda: self._json("POST", "/join", JoinAnswer, request, headers=headers), repeatable=never_sent
        )
        self._node_id = answer.node_id
        self._headers = {"Authorization": f"Bearer {answer.node_token}"}
        return answer

    async def progress(self, told: StartProgress, join_token: str) -> None:
        """Tell how far the start is, before the join. Not repeated: the next one says more."""
        await self._send("POST", "/progress", told, headers={"Authorization": f"Bearer {join_token}"})

    async def heartbeat(self, beat: Heartbeat) -> Directives:
        """One heartbeat; the next one is its retry."""
        return await self._json("POST", self._own("/heartbeat"), Directives, beat)

    async def work(self, request: WorkRequest) -> WorkAnswer:
        """Long poll for work. Not repeated here: a lost answer may have leased items."""
        timeout = httpx.Timeout(request.wait_s + LONG_POLL_MARGIN_S, connect=5.0)
        return await self._json("POST", self._own("/work"), WorkAnswer, request, timeout=timeout)

    async def put(self, slot: UploadSlot, data: bytes) -> None:
        """Put a file into its slot (same key, same bytes: may happen twice)."""
        await self._repeat(lambda: self._put(slot, data))

    async def commit(self, request: CommitRequest) -> CommitAnswer:
        """Commit a file that was put; idempotent by key. Raises Refused when the file can't be accepted."""
        return await self._repeat(lambda: self._json("POST", self._own("/trajectories"), CommitAnswer, request))

    async def upload_slot(self, policy_version: int) -> UploadSlot:
        """Where to put a file whose oldest token is of this version. One that is not used costs nothing."""
        request = UploadRequest(policy_version=policy_version)
        return await self._repeat(lambda: self._json("POST", self._own("/uploads"), UploadSlot, request))

    async def partials(self, request: CommitRequest) -> PartialAnswer:
        """Hand unfinished groups over by a file that was put; idempotent by key. Raises Refused."""
        return await self._repeat(lambda: self._json("POST", self._own("/partials"), PartialAnswer, request))

    async def snapshot_urls(self, version: int, first: int, count: int) -> SnapshotUrls:
        """Presigned URLs of a version's manifest and chunks."""
        path = self._own(f"/snapshots/{version}")
        query: dict[str, str | int] = {"first": first, "count": count}
        return await self._repeat(lambda: self._json("GET", path, SnapshotUrls, None, params=query))

    async def report(self, report: Report) -> None:
        """Tell of a fault."""
        await self._repeat(lambda: self._send("POST", self._own("/reports"), report))

    async def leave(self, leave: Leave) -> None:
        """The last word."""
        await self._repeat(lambda: self._send("POST", self._own("/leave"), leave))

    async def download(self, url: str, max_bytes: int) -> bytes:
        """Get a small presigned object. Raises TooLarge when it exceeds `max_bytes`."""
        return await self._repeat(lambda: self._download(url, max_bytes))

    async def download_to(
        self,
        url: str,
        path: Path,
        max_bytes: int,
        on_bytes: Callable[[int], None] = lambda _: None,
        origin: Origin = STORE,
    ) -> None:
        """Get an object of any size into a file, from the byte on where an earlier try, or process, stopped.

        `on_bytes` is told the size of the file as it grows. Tries that come further don't count as failed ones. Raises
        TooLarge when it exceeds `max_bytes`.
        """
        while True:
            before = _size(path)
            try:
                await self._repeat(
                    lambda: self._download_to(url, path, max_bytes, on_bytes, origin), retries=origin.retries
                )
            except Unavailable:
                if _size(path) <= before:
                    raise
                continue
            return

    async def pause(self, seconds: float) -> None:
        """Wait as between two tries."""
        await self._sleep(seconds)

    def _own(self, path: str) -> str:
        return f"/{self._node_id}{path}"

    async def _repeat(
        self,
        call: Callable[[], Awaitable[Got]],
        repeatable: Callable[[Unavailable], bool] = lambda _: True,
        retries: int = RETRIES,
    ) -> Got:
        """Call until it answers, at most `retries` more times, with growing jittered pauses."""
        for attempt in range(retries):
            try:
                return await call()
            except Unavailable as error:
                if not repeatable(error):
                    raise
                await self._sleep(backoff(attempt, self._jitter()))
        return await call()

    async def _json(self, method: str, path: str, kind: type[Answer], body: BaseModel | None, **options: Any) -> Answer:
        response = await self._send(method, path, body, **options)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            fields = [".".join(map(str, e["loc"])) for e in error.errors()][:5]
            raise Unavailable(f"the control service's answer to {kind.__name__} can't be read: {fields}") from error

    async def _send(
        self,
        method: str,
        path: str,
        body: BaseModel | None,
        *,
        headers: dict[str, str] | None = None,
        params: dict[str, str | int] | None = None,
        timeout: httpx.Timeout = CALL_TIMEOUT,
    ) -> httpx.Response:
        content = b"" if body is None else body.model_dump_json().encode()
        sent = {**(self._headers if headers is None else headers), "Content-Type": "application/json"}
        response = await reach(
            self._http.request(
                method, self._base + path, content=content, headers=sent, params=params, timeout=timeout
            ),
            "the control service",
        )
        self.bytes_up += len(content)
        self.bytes_down += len(response.content)
        if not response.is_success:
            raise error_of(response)
        return response

    async def _put(self, slot: UploadSlot, data: bytes) -> None:
        response = await reach(
            self._http.put(slot.url, content=data, headers=slot.headers, timeout=TRANSFER_TIMEOUT), "the object store"
        )
        self.bytes_up += len(data)
        if not response.is_success:
            raise error_of(response)

    async def _download(self, url: str, max_bytes: int) -> bytes:
        async with asyncio.timeout(TRANSFER_TIMEOUT.read):
            return await reach(self._stream(url, max_bytes), "the object store")

    async def _download_to(
        self, url: str, path: Path, max_bytes: int, on_bytes: Callable[[int], None], origin: Origin
    ) -> None:
        with path.open("ab") as file:

            def take(part: bytes) -> None:
                file.write(part)
                on_bytes(file.tell())

            def restart() -> None:
                file.seek(0)
                file.truncate()

            if file.tell() >= max_bytes:
                # Whole already, or nothing of this object: the hash tells.
                return
            async with asyncio.timeout(max(TRANSFER_TIMEOUT.read or 0.0, max_bytes / SLOWEST_BYTES_PER_S)):
                stream = self._stream_into(url, max_bytes, take, start=file.tell(), restart=restart, origin=origin)
                await reach(stream, origin.name)

    async def _stream(self, url: str, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        await self._stream_into(url, max_bytes, parts.append)
        return b"".join(parts)

    async def _stream_into(
        self,
        url: str,
        max_bytes: int,
        take: Callable[[bytes], object],
        *,
        start: int = 0,
        restart: Callable[[], None] = lambda: None,
        origin: Origin = STORE,
    ) -> None:
        """`start`: so many bytes are there; a source that can't go on from them sends all of it, after `restart`."""
        size = start
        # Counted are the object's own bytes, so it may not come compressed.
        headers = {"Range": f"bytes={start}-", "Accept-Encoding": "identity"} if start else {}
        async with follow(self._http, url, headers, origin) as response:
            if not response.is_success:
                await response.aread()
                if response.status_code == RANGE_REFUSED:
                    restart()
                    raise Unavailable("the object is shorter than what is there of it; beginning anew")
                raise error_of(response)
            if start and not _goes_on(response, start):
                restart()
                size = 0
            async for part in response.aiter_bytes():
                size += len(part)
                self.bytes_down += len(part)
                if size > max_bytes:
                    raise errors.TooLarge(f"the object is larger than the {max_bytes} bytes that were announced")
                take(part)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _goes_on(response: httpx.Response, start: int) -> bool:
    """Whether an answer holds the bytes from `start` on, and not all of them."""
    found = response.headers.get("content-range", "")
    return response.status_code == 206 and found.replace("=", " ").startswith(f"bytes {start}-")
