"""`/v1/nodes`: what rollout agents call (app/protocol/node.py). No decisions here."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from app.api.deps import NodeDep, ServicesDep
from app.api.security import bearer
from app.protocol.node import Directives, Heartbeat, JoinAnswer, JoinRequest, Leave, Report, SnapshotUrls
from app.protocol.startup import StartProgress
from app.protocol.work import (
    MOST,
    CommitAnswer,
    CommitRequest,
    PartialAnswer,
    UploadRequest,
    UploadSlot,
    WorkAnswer,
    WorkRequest,
)

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])


@router.post("/progress", status_code=204)
async def progress(body: StartProgress, request: Request, svc: ServicesDep) -> None:
    """How far a machine is that has not joined; its join token stays good."""
    await svc.nodes.progress(bearer(request), body)


@router.post("/join")
async def join(body: JoinRequest, request: Request, svc: ServicesDep) -> JoinAnswer:
    """A machine becomes a node, with its one-time join token."""
    return await svc.nodes.join(bearer(request), body)


@router.post("/{node_id}/heartbeat")
async def heartbeat(body: Heartbeat, node_id: NodeDep, svc: ServicesDep) -> Directives:
    """State in, directives out."""
    if body.interruption is not None:
        await svc.notices.heard(node_id, body.interruption)
    return await svc.nodes.heartbeat(node_id, body)


@router.post("/{node_id}/work")
async def work(body: WorkRequest, node_id: NodeDep, svc: ServicesDep) -> WorkAnswer:
    """Lease work; waits while admission lets none out."""
    return await svc.work.lease(node_id, body)


@router.post("/{node_id}/trajectories")
async def commit(body: CommitRequest, node_id: NodeDep, svc: ServicesDep) -> CommitAnswer:
    """Commit a file that was put."""
    return await svc.work.commit(node_id, body)


@router.post("/{node_id}/uploads")
async def upload(body: UploadRequest, node_id: NodeDep, svc: ServicesDep) -> UploadSlot:
    """A place to put one more file."""
    return await svc.work.upload(node_id, body)


@router.post("/{node_id}/partials")
async def partials(body: CommitRequest, node_id: NodeDep, svc: ServicesDep) -> PartialAnswer:
    """Hand back groups that were begun, by a file that was put."""
    return await svc.work.take_partials(node_id, body)


@router.get("/{node_id}/snapshots/{version}")
async def snapshot(
    version: Annotated[int, Path(ge=0, le=MOST)],
    node_id: NodeDep,
    svc: ServicesDep,
    first: Annotated[int, Query(ge=0, le=MOST)] = 0,
    count: Annotated[int, Query(ge=0, le=1000)] = 64,
) -> SnapshotUrls:
    """Presigned URLs of a version in the object store."""
    return await svc.work.snapshot_urls(node_id, version, first, count)


@router.post("/{node_id}/reports", status_code=204)
async def report(body: Report, node_id: NodeDep, svc: ServicesDep) -> None:
    """A fault that the node saw."""
    await svc.nodes.report(node_id, body)


@router.post("/{node_id}/leave", status_code=204)
async def leave(body: Leave, node_id: NodeDep, svc: ServicesDep) -> None:
    """The node's last word."""
    await svc.nodes.leave(node_id, body)
