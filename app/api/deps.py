"""What routers need: the services, and who calls.

Invariant: a router gets a caller only after the caller's key was checked; a node or learner token opens the paths of
that node or job and nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request
from sqlalchemy import select

from app.api import sns
from app.api.security import NODE_TOKEN, bearer, hash_key
from app.fleet.accounts import Accounts
from app.fleet.controller import Controller
from app.fleet.core import Core
from app.fleet.jobs import Jobs
from app.fleet.learning import Learning
from app.fleet.market import Market
from app.fleet.nodes import Nodes
from app.fleet.notices import Notices
from app.fleet.notify import Notifier
from app.fleet.reconcile import Reconciler
from app.fleet.scheduler import Loop
from app.fleet.views import Views
from app.fleet.work import Work
from app.protocol.errors import Forbidden, Malformed, Unauthorized
from app.storage.models import ApiKey, Node
from providers.base import Notice

REMEMBERED_TOKENS = 10_000


@dataclass
class Services:
    """Everything behind the HTTP boundary."""

    core: Core
    jobs: Jobs
    nodes: Nodes
    work: Work
    learning: Learning
    market: Market
    controller: Controller
    reconciler: Reconciler
    accounts: Accounts
    loop: Loop
    views: Views
    notifier: Notifier
    notices: Notices
    sns: sns.Verifier
    read_aws_event: Callable[[str], Notice | None]
    """An event of EventBridge as a notice; None for another event. Raises ValueError for what is none."""
    node_tokens: dict[str, str] = field(default_factory=dict, repr=False)
    """Hash of a node token → node id, as seen in the database before."""
    answering: dict[tuple[str, str], tuple[str, asyncio.Event]] = field(default_factory=dict, repr=False)
    """Idempotency key and owner → the request that is worked on under it, by its hash, and the end of that."""


def services(request: Request) -> Services:
    """The services of this application."""
    return cast(Services, request.app.state.services)


ServicesDep = Annotated[Services, Depends(services)]


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of an API key."""

    id: str
    admin: bool


async def caller(request: Request, svc: ServicesDep) -> Caller:
    """Who holds this API key. Raises Unauthorized."""
    key_hash = hash_key(bearer(request))
    async with svc.core.db.read() as session:
        row = (await session.scalars(select(ApiKey).where(ApiKey.key_hash == key_hash))).first()
    if row is None or row.revoked_at is not None:
        raise Unauthorized("this API key is not known, or was revoked")
    return Caller(row.id, row.admin)


CallerDep = Annotated[Caller, Depends(caller)]


async def admin(who: CallerDep) -> Caller:
    """A caller who may manage keys. Raises Forbidden."""
    if not who.admin:
        raise Forbidden("only an admin key may do this")
    return who


AdminDep = Annotated[Caller, Depends(admin)]


async def node(node_id: str, request: Request, svc: ServicesDep) -> str:
    """The node of the path, if the token is its own. Raises Unauthorized, or Forbidden for another node's token."""
    token = bearer(request)
    if not token.startswith(NODE_TOKEN):
        raise Unauthorized("this call needs a node token")
    digest = hash_key(token)
    # A token belongs to one node for ever; what the node may still do is decided by its state.
    found = svc.node_tokens.get(digest)
    if found is None:
        async with svc.core.db.read() as session:
            found = await session.scalar(select(Node.id).where(Node.token_hash == digest))
        if found is None:
            raise Unauthorized("this node token is not known")
        if len(svc.node_tokens) >= REMEMBERED_TOKENS:
            svc.node_tokens.clear()
        svc.node_tokens[digest] = found
    if found != node_id:
        raise Forbidden("this token belongs to another node")
    return node_id


NodeDep = Annotated[str, Depends(node)]


async def learner(job_id: str, request: Request, svc: ServicesDep) -> str:
    """The job of the path, if the token is its learner's. Raises Unauthorized, NotFound."""
    token = bearer(request)
    if not hmac.compare_digest(token.encode(), svc.core.secrets.learner_token(job_id).encode()):
        raise Unauthorized("this is not the learner token of this job")
    await svc.jobs.get(job_id)
    return job_id


LearnerDep = Annotated[str, Depends(learner)]


def epoch(request: Request) -> int:
    """The learner's epoch. Raises Malformed without the header."""
    value = request.headers.get("echo2-epoch", "")
    if not value.isdecimal() or len(value) > 9:
        raise Malformed("the header Echo2-Epoch is missing or not a number")
    return int(value)


EpochDep = Annotated[int, Depends(epoch)]
