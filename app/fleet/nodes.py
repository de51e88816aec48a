"""Nodes: joining, heartbeats, where they pull from, and when they are lost.

Invariant: a join token works once, for the lease that it was made for; a node is told the whole of what is wanted of
it at each heartbeat, so a lost answer changes nothing.
"""

from __future__ import annotations

import logging
import secrets

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet import broadcasts, links, model_files, partials, proving, returns, starts, tokens, waiting
from app.fleet.labels import token_hash
from app.fleet.leases import UNFIT_S
from app.fleet.measured import take_node
from app.fleet.roster import LIES_TOLERATED, LIVE, PRESIGN_MAX_S, Roster
from app.protocol.errors import Gone, Unauthorized
from app.protocol.job import JobSpec, JobStatus
from app.protocol.node import (
    AssetRef,
    Directives,
    Heartbeat,
    JoinAnswer,
    JoinRequest,
    Leave,
    NodeState,
    Report,
    Upstream,
)
from app.protocol.startup import StartPhase, StartProgress
from app.storage.models import Job, Lease, LeaseState, Node

log = logging.getLogger(__name__)


class Nodes(Roster):
    """What the agents talk to."""

    async def progress(self, token: str, told: StartProgress) -> None:
        """How far a machine is that has not joined yet. Raises as `join` does; the token stays good."""
        await self._turn_strangers_away(token)
        async with self.core.db.write() as session:
            lease, _ = await self._by_join_token(session, token)
            starts.take(lease, told, self.core.clock())

    async def join(self, token: str, request: JoinRequest) -> JoinAnswer:
        """Turn a one-time join token into a node. Raises Unauthorized, or Gone for a used token, a closed lease, or a
        machine that is less than what was rented, or gives no proofs where the job asks for them."""
        node_token = "nt_" + secrets.token_urlsafe(32)
        await self._turn_strangers_away(token)
        async with self.core.db.write() as session:
            lease, job = await self._by_join_token(session, token)
            lack = starts.shortfall(lease, request.facts) or proving.lack(
                request.engine, request.proofs, JobSpec.model_validate(job.spec).trust.proofs
            )
            if lack:
                await self._turn_away(session, lease, lack)
            else:
                node = self._new_node(session, job, lease, request, node_token)
                await self._arrange(session, job)
                directives = await self._directives(session, job, lease, node)
            lease.facts = request.facts.model_dump() if request.facts is not None else None
        self.core.announce(job.id)
        if lack:
            raise Gone(f"this machine is less than what was wanted: {lack}")
        return await self._join_answer(job, lease, node, node_token, directives)

    async def _turn_strangers_away(self, token: str) -> None:
        """Raises as `_by_join_token`, without the lock that all writers share: anybody may call."""
        async with self.core.db.read() as session:
            await self._by_join_token(session, token)

    async def _by_join_token(self, session: AsyncSession, token: str) -> tuple[Lease, Job]:
        """Who may still join. Raises Unauthorized, Gone."""
        lease = (await session.scalars(select(Lease).where(Lease.join_token_hash == token_hash(token)))).first()
        if lease is None:
            raise Unauthorized("the join token is not known; a machine gets a new one when it is rented")
        if lease.join_token_used_at is not None:
            raise Gone("the join token was used before; each machine can join once")
        job = (await session.scalars(select(Job).where(Job.id == lease.job_id))).one()
        usable = LeaseState(lease.state).usable and not lease.release_wanted
        if not usable or JobStatus(job.status).final:
            raise Gone("the lease of this machine is over")
        return lease, job

    async def _turn_away(self, session: AsyncSession, lease: Lease, lack: str) -> None:
        """A machine that is not what was paid for never becomes a node."""
        lease.join_token_used_at = self.core.clock()
        self.core.emit(session, lease.job_id, "machine_short", f"machine {lease.machine_id}: {lack}", lease=lease.id)
        await self.leases.cool_down(session, lease, lack, s=UNFIT_S)
        self.leases.request_release(session, lease, lack)

    def _new_node(self, session: AsyncSession, job: Job, lease: Lease, request: JoinRequest, node_token: str) -> Node:
        now = self.core.clock()
        lease.join_token_used_at = now
        if lease.phase is not None:
            starts.take(lease, StartProgress(phase=StartPhase.JOINING), now)
        if worn := starts.damage(request.facts):
            self.core.emit(session, job.id, "gpu_errors", f"machine {lease.machine_id}: {worn}", lease=lease.id)
        if lease.instance_id is not None:
            self.leases.move(lease, LeaseState.ACTIVE, "its node has joined")
        node = Node(
            id="node_" + secrets.token_hex(8),
            job_id=job.id,
            lease_id=lease.id,
            token_hash=token_hash(node_token),
            state=NodeState.JOINING,
            state_since=now,
            engine=request.engine,
            relay_url=request.relay_url,
            joined_at=now,
            heartbeat_at=now,
            upstreams=[],
            bytes_from={},
            errors={},
        )
        session.add(node)
        took = now - lease.created_at
        self.core.emit(
            session, job.id, "node_joined", f"{lease.gpu_name} joined after {took:.1f} s", node=node.id, lease=lease.id
        )
        return node

    async def _join_answer(
        self, job: Job, lease: Lease, node: Node, node_token: str, directives: Directives
    ) -> JoinAnswer:
        spec = JobSpec.model_validate(job.spec)
        expires = int(min(self.core.settings.lease_hours * 3600, PRESIGN_MAX_S))
        assets = [
            AssetRef(**asset, url=self.core.objects.presign_get(f"jobs/{job.id}/model/{asset['path']}", expires))
            for asset in job.assets
        ]
        task_files = [
            AssetRef(
                path=file.name,
                size=file.size,
                blake3=file.blake3,
                url=self.core.objects.presign_get(file.key(job.id), expires),
            )
            for file in spec.task.files
        ]
        return JoinAnswer(
            node_id=node.id,
            node_token=node_token,
            job_id=job.id,
            task=spec.task,
            sampling=spec.sampling,
            group_size=spec.batch.group_size,
            seed=spec.seed,
            assets=assets,
            manifest_public_key=job.manifest_public_key,
            relay_token=self.core.secrets.relay_token(job.id),
            uplink_bytes_per_s=lease.up_mbps * 1e6 / 8 if lease.up_mbps else None,
            max_upload_bytes=self.core.settings.max_upload_bytes,
            prune=spec.batch.prune,
            parameters=job.parameters,
            snapshot_bytes=job.snapshot_bytes,
            task_files=task_files,
            rewards=spec.rewards,
            proofs=spec.trust.proofs,
            directives=directives,
        )

    async def heartbeat(self, node_id: str, beat: Heartbeat) -> Directives:
        """Take a node's state and answer what is wanted of it."""
        finished: int | None = None
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            lease = await session.get_one(Lease, node.lease_id)
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            if node.state in (NodeState.LOST, NodeState.GONE):
                return self._over("this node was given up; its lease is over")
            was = node.policy_version
            self._take(session, node, lease, beat)
            # A folder is read through this service, which all nodes share.
            roomy = self.core.settings.object_store_url.startswith("s3://")
            if await take_node(session, job, node, lease, beat, store_has_room=roomy):
                await self.links_changed(session, job)
            if beat.policy_version is not None and beat.policy_version != was:
                finished = await broadcasts.settle(self.core, session, job)
            directives = await self._directives(session, job, lease, node)
        if beat.policy_version != was or finished is not None:
            self.core.announce(job.id)
        return directives

    def _take(self, session: AsyncSession, node: Node, lease: Lease, beat: Heartbeat) -> None:
        now = self.core.clock()
        passed_s, node.heartbeat_at = now - node.heartbeat_at, now
        node.policy_version = beat.policy_version
        node.versions_at = broadcasts.seen(node.versions_at, beat.policy_version, now)
        # Who drains does so to its end, whatever it says: its time to leave must not begin anew.
        # Only `leave`, which also gives the lease back, makes it gone.
        ending = node.drain or node.state == NodeState.DRAINING or beat.state in (NodeState.GONE, NodeState.LOST)
        state = NodeState.DRAINING if ending else beat.state
        if state != node.state:
            if state is NodeState.ACTIVE:
                took = now - node.joined_at
                self.core.emit(
                    session,
                    node.job_id,
                    "node_active",
                    f"{lease.gpu_name} works {took:.1f} s after it joined",
                    node=node.id,
                )
            node.state, node.state_since = state, now
        if differ := self.core.weights.take(node.job_id, node.id, beat.weights):
            self.core.emit(session, node.job_id, "weights_differ", differ.message, node=node.id, **differ.data)
        if said := waiting.believe(node, beat, passed_s=passed_s, waited_s=self.core.waits.take(node.id)):
            message = f"{lease.gpu_name} says {said:.4g} rollouts/s, and is believed {node.mu_measured:.4g} of them"
            self.core.emit(session, node.job_id, "speed_doubted", message, node=node.id)
        node.busy_share = beat.busy_share
        tokens.count(self.core, node, beat)
        node.bytes_down, node.bytes_up = beat.bytes_down, beat.bytes_up
        node.bytes_from = {str(kind): size for kind, size in beat.bytes_from.items()}
        node.bytes_relayed = beat.bytes_relayed
        node.deltas_applied, node.bytes_saved = beat.deltas_applied, beat.bytes_saved
        node.upstream = beat.upstream
        node.progress = beat.progress.model_dump() if beat.progress else None
        node.errors = dict(beat.errors)
        node.reason = beat.detail
        if beat.start is not None:
            starts.take(lease, beat.start, now)
        paid_s = now - (lease.gpu_since or lease.created_at)
        lease.download_bytes = links.believed_bytes(beat.bytes_down, lease.download_bytes, lease.down_mbps, paid_s)
        lease.upload_bytes = links.believed_bytes(beat.bytes_up, lease.upload_bytes, lease.up_mbps, paid_s)

    async def _directives(self, session: AsyncSession, job: Job, lease: Lease, node: Node) -> Directives:
        settings, now = self.core.settings, self.core.clock()
        # The learner's address is the job's, and may change while the chains don't.
        upstreams = [
            Upstream(**{**u, "url": job.relay_url} if u["kind"] == "learner" else u)
            for u in node.upstreams
            if u["kind"] != "learner" or job.relay_url
        ]
        over = not LeaseState(lease.state).usable or JobStatus(job.status).final
        return Directives(
            upstreams=upstreams,
            target_version=job.published_version,
            oldest_admissible=max(0, job.step - job.staleness_budget),
            drain=node.drain,
            shutdown=over,
            lease_expires_in_s=max(0.0, lease.expires_at - now),
            heartbeat_interval_s=settings.heartbeat_seconds,
            reason=lease.reason if over or node.drain else "",
        )

    def _over(self, reason: str) -> Directives:
        return Directives(
            upstreams=[], target_version=None, drain=True, shutdown=True, lease_expires_in_s=0.0,
            heartbeat_interval_s=self.core.settings.heartbeat_seconds, reason=reason,
        )  # fmt: skip

    async def leave(self, node_id: str, leave: Leave) -> None:
        """The node's last word: its work goes back, its lease is released."""
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            if node.state in (NodeState.LOST, NodeState.GONE):
                return
            lease = await session.get_one(Lease, node.lease_id)
            tokens.count(self.core, node, leave)
            await self._depart(session, node, NodeState.GONE, leave.reason)
            if leave.unfit:
                self.core.emit(session, node.job_id, "node_unfit", f"{lease.gpu_name}: {leave.reason}", node=node.id)
                await self.leases.cool_down(session, lease, leave.reason, s=UNFIT_S)
            self.leases.request_release(
                session, lease, lease.reason if node.drain else f"its node left: {leave.reason}"
            )
        self.core.announce(node.job_id, "work")
        self.core.signals.notify("tick")

    async def report(self, node_id: str, report: Report) -> None:
        """A fault that a node saw, or work that it gives back. Who lies about bytes twice loses its place and its
        lease."""
        async with self.core.db.write() as session:
            node = await session.get_one(Node, node_id)
            message = f"{report.kind} {report.subject}: {report.detail}"
            self.core.emit(
                session, node.job_id, report.kind, message,
                node=node.id, subject=report.subject, groups=len(returns.named(report)),
            )  # fmt: skip
            spare = await returns.take(self.core, session, node, report)
            await self._act_on(session, node, report)
        await partials.release(self.core, spare)
        if returns.named(report):
            self.core.announce(node.job_id, "work")

    async def _act_on(self, session: AsyncSession, node: Node, report: Report) -> None:
        if report.kind == "hub_failed":
            job = (await session.scalars(select(Job).where(Job.id == node.job_id))).one()
            job.assets = model_files.want(job.assets)
        # Only who may pull from a node can know that it lies.
        seen = report.kind == "upstream_lied" and report.subject in {u["node_id"] for u in node.upstreams}
        liar = await session.get(Node, report.subject) if seen else None
        if liar is None:
            return
        liar.lies += 1
        if liar.lies >= LIES_TOLERATED and liar.state in LIVE:
            lease = await session.get_one(Lease, liar.lease_id)
            why = f"served bytes that do not match their hash, {liar.lies} times"
            await self._depart(session, liar, NodeState.LOST, why)
            await self.leases.cool_down(session, lease, why)
            self.leases.request_release(session, lease, why)
