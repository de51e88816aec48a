"""Composes the control service. No logic.

Invariant: every part gets its collaborators here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from sqlalchemy import func, select

from app import __version__
from app.api import (
    agents,
    aws,
    fleet,
    health,
    hooks,
    jobs,
    keys,
    learner,
    ledger,
    middleware,
    nodes,
    objects,
    problems,
    sns,
)
from app.api.deps import Services
from app.api.security import API_KEY, hash_key, new_key
from app.fleet import priors
from app.fleet.accounts import Accounts
from app.fleet.bills import Bills
from app.fleet.controller import Controller
from app.fleet.core import Core, Secrets
from app.fleet.exams import Exams
from app.fleet.jobs import Jobs
from app.fleet.learning import Learning
from app.fleet.leases import Leases
from app.fleet.lifecycle import Lifecycle
from app.fleet.market import Market
from app.fleet.metrics import Metrics
from app.fleet.nodes import Nodes
from app.fleet.notices import Notices
from app.fleet.notify import Notifier
from app.fleet.outward import Outward
from app.fleet.reconcile import Reconciler
from app.fleet.scheduler import Loop
from app.fleet.supervisor import Supervisor
from app.fleet.views import Views
from app.fleet.work import Work
from app.markets import open_providers
from app.settings import Settings
from app.storage.database import Database
from app.storage.models import ApiKey
from app.storage.stores import open_store
from app.tasks.files import TaskIntake
from app.tasks.registry import preload
from providers.base import Provider
from providers.ec2.events import notice as ec2_event

log = logging.getLogger("echo2")

HOOK_LIMIT = 256 << 10
COMMIT_LIMIT = 4 << 20

Announce = Callable[[str], None]
"""Shows a secret to whoever started the service, once; never goes to a log."""


def load_secret(settings: Settings) -> bytes:
    """The key that tokens are derived from: the setting's, or one made once and kept in the state folder."""
    if settings.secret_key is not None:
        return settings.secret_key.get_secret_value().encode()
    path = settings.state_dir / "secret"
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temp = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temp, path)
    return path.read_text().strip().encode()


def marketplace_key(settings: Settings) -> str:
    """Key of the embedded marketplace: the setting's, or one derived from this service's secret."""
    if settings.marketplace_api_key is not None:
        return settings.marketplace_api_key.get_secret_value()
    return Secrets(load_secret(settings)).derive("marketplace", "")


def build_services(
    settings: Settings,
    *,
    providers: Mapping[str, Provider] | None = None,
    clock: Callable[[], float] = time.time,
    supervisor: Callable[[Core], Supervisor] = Supervisor,
) -> Services:
    """All services on one core. `supervisor` makes what starts the learners."""
    metrics = Metrics()
    secret = Secrets(load_secret(settings))
    core = Core(
        db=Database(settings.database_url),
        settings=settings,
        providers=(
            providers
            if providers is not None
            else open_providers(settings, marketplace_key(settings), metrics.provider_request)
        ),
        objects=open_store(
            settings.object_store_url,
            endpoint_url=settings.s3_endpoint_url,
            public_url=settings.public_url,
            signing_key=secret.signing_key(),
        ),
        secrets=secret,
        clock=clock,
        metrics=metrics,
        benched=priors.read(settings.priors_file),
        started_at=clock(),
    )
    accounts = Accounts(core)
    exams = Exams(core)
    leases, market, work = Leases(core, accounts), Market(core), Work(core, exams)
    node_service = Nodes(core, leases)
    lifecycle = Lifecycle(core, node_service, supervisor(core))
    controller = Controller(core, market, leases, node_service, work, lifecycle, accounts)
    reconciler = Reconciler(core, leases)
    return Services(
        core=core,
        jobs=Jobs(core, lifecycle, TaskIntake(settings.task_dir, core.objects)),
        nodes=node_service,
        work=work,
        learning=Learning(core, exams, node_service),
        market=market,
        controller=controller,
        reconciler=reconciler,
        accounts=accounts,
        loop=Loop(core, controller, leases, reconciler, accounts, Bills(core)),
        views=Views(core),
        notifier=Notifier(core, Outward(allow_private=settings.notify_allow_private)),
        notices=Notices(core, leases, node_service, controller),
        sns=sns.Verifier(sns.fetch),
        read_aws_event=partial(ec2_event, provider="ec2"),
    )


async def ensure_admin_key(svc: Services, announce: Announce) -> None:
    """The admin key of the settings; or, at the first start without one, a new one that is shown once."""
    configured = svc.core.settings.admin_key
    async with svc.core.db.write() as session:
        if configured is None:
            if await session.scalar(select(func.count()).select_from(ApiKey)):
                return
            key = new_key(API_KEY)
        else:
            key = configured.get_secret_value()
            known = (await session.scalars(select(ApiKey).where(ApiKey.key_hash == hash_key(key)))).first()
            if known is not None:
                return
        session.add(
            ApiKey(
                id="key_" + secrets.token_hex(6),
                name="admin",
                key_hash=hash_key(key),
                admin=True,
                created_at=svc.core.clock(),
            )
        )
    if configured is None:
        announce(key)


def create_app(
    settings: Settings, *, services: Services | None = None, announce: Announce = lambda key: None, loop: bool = True
) -> FastAPI:
    """The HTTP application. With `loop` False nothing ticks: tests drive the rounds themselves."""
    svc = services or build_services(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if loop:
            # Before anybody is answered and anything ticks: whoever waits for the first job's post would pay for it.
            await asyncio.to_thread(preload)
            await svc.core.db.claim()
        await svc.core.db.migrate()
        await ensure_admin_key(svc, announce)
        if loop:
            await svc.loop.start()
            svc.notices.start()
            svc.notifier.start()
        try:
            yield
        finally:
            await svc.notifier.stop()
            await svc.notices.stop()
            await svc.loop.stop()
            await svc.market.aclose()
            svc.jobs.close()
            for provider in svc.core.providers.values():
                await provider.aclose()
            await svc.core.db.close()

    app = FastAPI(
        title="Echo2",
        version=__version__,
        lifespan=lifespan,
        docs_url="/docs" if settings.docs_enabled else None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs_enabled else None,
    )
    app.state.services = svc
    problems.install(app)
    middleware.install(app, limit_for=_limit(settings))
    for module in (jobs, fleet, ledger, hooks, aws, agents, nodes, learner, objects, keys, health):
        app.include_router(module.router)
    return app


def _limit(settings: Settings) -> middleware.LimitFor:
    def limit(method: str, path: str) -> int | None:
        if path.startswith("/v1/objects/"):
            return settings.max_upload_bytes
        if path.startswith("/v1/hooks/"):
            return HOOK_LIMIT
        return COMMIT_LIMIT if "/learner/" in path or path.endswith("/trajectories") else None

    return limit


def state_folder(settings: Settings) -> Path:
    """The state folder, made if it is not there."""
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    return settings.state_dir
