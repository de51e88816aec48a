"""`/v1/jobs/{job_id}/learner`: what the learner calls (app/protocol/learner.py). No decisions here."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app.api.deps import EpochDep, LearnerDep, ServicesDep
from app.protocol.audits import AuditAnswer, AuditReport
from app.protocol.learner import (
    Done,
    Drops,
    EvalReport,
    LearnerDirectives,
    LearnerHeartbeat,
    Published,
    Ready,
    ReadyAnswer,
    StartAnswer,
    StartRequest,
    StepReport,
    TrajectoryPage,
)
from app.protocol.work import MOST

router = APIRouter(prefix="/v1/jobs/{job_id}/learner", tags=["learner"])


@router.post("/start")
async def start(body: StartRequest, job_id: LearnerDep, svc: ServicesDep) -> StartAnswer:
    """A learner process begins; older ones are fenced off."""
    return await svc.learning.start(job_id, body)


@router.post("/ready")
async def ready(body: Ready, job_id: LearnerDep, epoch: EpochDep, svc: ServicesDep) -> ReadyAnswer:
    """Model and task load."""
    return await svc.learning.ready(job_id, epoch, body)


@router.post("/heartbeat")
async def heartbeat(body: LearnerHeartbeat, job_id: LearnerDep, epoch: EpochDep, svc: ServicesDep) -> LearnerDirectives:
    """It lives."""
    return await svc.learning.heartbeat(job_id, epoch, body)


@router.get("/trajectories")
async def trajectories(
    job_id: LearnerDep,
    epoch: EpochDep,
    svc: ServicesDep,
    after: Annotated[int, Query(ge=0, le=MOST)] = 0,
    wait_s: Annotated[float, Query(ge=0, le=30)] = 10.0,
) -> TrajectoryPage:
    """Accepted files with groups to train on."""
    return await svc.learning.trajectories(job_id, epoch, after, wait_s)


@router.post("/published")
async def published(body: Published, job_id: LearnerDep, epoch: EpochDep, svc: ServicesDep) -> LearnerDirectives:
    """A version can be pulled."""
    return await svc.learning.published(job_id, epoch, body)


@router.post("/steps")
async def step(body: StepReport, job_id: LearnerDep, epoch: EpochDep, svc: ServicesDep) -> LearnerDirectives:
    """A step was made."""
    return await svc.learning.step(job_id, epoch, body)


@router.post("/drops")
async def drops(body: Drops, job_id: LearnerDep, epoch: EpochDep, svc: ServicesDep) -> LearnerDirectives:
    """Groups that will never be trained on."""
    return await svc.learning.drops(job_id, epoch, body)


@router.post("/evals")
async def evals(body: EvalReport, job_id: LearnerDep, epoch: EpochDep, svc: ServicesDep) -> LearnerDirectives:
    """Held-out reward."""
    return await svc.learning.evaluated(job_id, epoch, body)


@router.post("/audits")
async def audits(body: AuditReport, job_id: LearnerDep, epoch: EpochDep, svc: ServicesDep) -> AuditAnswer:
    """What was computed again of nodes' groups."""
    return await svc.learning.audits(job_id, epoch, body)


@router.post("/done", status_code=204)
async def done(body: Done, job_id: LearnerDep, epoch: EpochDep, svc: ServicesDep) -> None:
    """The learner's last word."""
    await svc.learning.done(job_id, epoch, body)
