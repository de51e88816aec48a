"""As much of a control service and an object store as one worker needs, inside the bench's own process.

Invariant: there is always work unless `open` is False; a file is kept as it came, and only read when it is counted:
what a service does with it takes no time of a node's.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import httpx
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.protocol import trajectory
from app.protocol.node import JoinAnswer
from app.protocol.work import CommitAnswer, CommitRequest, PartialAnswer, UploadSlot, WorkAnswer, WorkItem, WorkRequest

BASE = "http://control"


@dataclass
class Stub:
    """Groups of `group_size`, prompts 0 to `prompts` - 1 in turn."""

    group_size: int
    prompts: int
    joined: JoinAnswer
    open: bool = True
    """Whether there is work."""
    files: dict[str, bytes] = field(default_factory=dict)
    committed: list[bytes] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def client(self) -> httpx.AsyncClient:
        """A client that reaches it without a socket."""
        node = "/v1/nodes/{node}"
        routes = [
            Route("/v1/nodes/join", self._join, methods=["POST"]),
            Route(f"{node}/work", self._work, methods=["POST"]),
            Route(f"{node}/uploads", self._upload, methods=["POST"]),
            Route(f"{node}/trajectories", self._commit, methods=["POST"]),
            Route(f"{node}/partials", self._partials, methods=["POST"]),
            Route(f"{node}/reports", self._nothing, methods=["POST"]),
            Route("/store/{key:path}", self._put, methods=["PUT"]),
        ]
        return httpx.AsyncClient(transport=httpx.ASGITransport(Starlette(routes=routes)), base_url=BASE)

    def handed_in(self) -> int:
        """Completion tokens of all files that were committed; each is read and checked as the service would."""
        tables = (trajectory.read_table(data) for data in self.committed)
        return sum(sum(map(len, table.column("completion_ids").to_pylist())) for table in tables)

    def _slot(self) -> UploadSlot:
        key = f"file-{next(self._count)}"
        return UploadSlot(key=key, url=f"{BASE}/store/{key}")

    async def _join(self, request: Request) -> Response:
        return _answer(self.joined)

    async def _work(self, request: Request) -> Response:
        wanted = WorkRequest.model_validate_json(await request.body())
        if not self.open:
            # A long poll, as of a service without work.
            await asyncio.sleep(wanted.wait_s)
            return _answer(WorkAnswer(items=[], upload=None))
        items = [
            WorkItem(
                id=f"w{n}", prompt_index=n % self.prompts, group_size=self.group_size, seed=n, deadline_s=600.0
            )
            for n in itertools.islice(self._count, wanted.max_items)
        ]  # fmt: skip
        return _answer(WorkAnswer(items=items, upload=self._slot()))

    async def _upload(self, request: Request) -> Response:
        return _answer(self._slot())

    async def _put(self, request: Request) -> Response:
        self.files[request.path_params["key"]] = await request.body()
        return Response(status_code=200)

    async def _commit(self, request: Request) -> Response:
        commit = CommitRequest.model_validate_json(await request.body())
        self.committed.append(self.files.pop(commit.key))
        return _answer(CommitAnswer(accepted=commit.work_items))

    async def _partials(self, request: Request) -> Response:
        commit = CommitRequest.model_validate_json(await request.body())
        self.files.pop(commit.key)
        return _answer(PartialAnswer(taken=commit.work_items))

    async def _nothing(self, request: Request) -> Response:
        return Response(status_code=204)


def _answer(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
