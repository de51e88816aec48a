"""A node described for the control service.

Invariant: a heartbeat says what is, and nothing that isn't known: what a part that doesn't exist yet would measure is
left out. Byte counts are totals since the start and never go back; measured rates are told once.
"""

from __future__ import annotations

from app.protocol.node import Heartbeat, Interruption, NodeState, Weights
from app.protocol.startup import StartProgress
from app.rollout_agent.client import NodeClient
from app.rollout_agent.flow import FlowMeter
from app.rollout_agent.ledger import WorkLedger
from app.rollout_agent.links import measured_links
from app.rollout_agent.measure import Meter, Rates
from app.snapshots.puller import Puller
from app.snapshots.rates import News
from app.snapshots.relay import Relay


def describe(
    state: NodeState,
    policy_version: int | None,
    now: float,
    *,
    client: NodeClient,
    ledger: WorkLedger,
    meter: Meter | FlowMeter | None,
    puller: Puller | None,
    relay: Relay | None,
    news: News,
    interruption: Interruption | None,
    start: StartProgress | None = None,
    probe: Rates | None = None,
    weights: Weights | None = None,
) -> Heartbeat:
    """The node at `now` (monotonic seconds). `policy_version`: the engine's. Parts that aren't there yet are None.

    `probe`: the speed that the self-test found, told until there is work to measure. `weights`: what the engine says of
    those that it has.
    """
    worked = meter.rates if meter is not None else None
    rates = worked or probe
    by_kind = puller.bytes_from if puller is not None else {}
    relayed = relay.bytes_served if relay is not None else 0
    current = puller.current if puller is not None else None
    return Heartbeat(
        state=state,
        policy_version=policy_version,
        rollouts_per_s=rates.rollouts_per_s if rates is not None else None,
        tokens_per_s=rates.tokens_per_s if rates is not None else None,
        probed=worked is None and probe is not None,
        busy_share=meter.busy_share(now) if meter is not None else None,
        tokens_generated=ledger.tokens_generated,
        tokens_wasted=dict(ledger.tokens_wasted),
        in_flight=ledger.in_flight,
        bytes_down=client.bytes_down + sum(by_kind.values()),
        bytes_up=client.bytes_up + relayed,
        bytes_from={
            "learner": by_kind.get("learner", 0),
            "peer": by_kind.get("peer", 0),
            "store": by_kind.get("store", 0),
        },
        bytes_relayed=relayed,
        deltas_applied=puller.deltas_applied if puller is not None else 0,
        bytes_saved=puller.bytes_saved if puller is not None else 0,
        **measured_links(news, puller, relay),
        upstream=(current.node_id or current.kind)[:200] if current is not None else "",
        progress=puller.progress if puller is not None else None,
        errors=dict(ledger.errors),
        start=start,
        weights=weights,
        interruption=interruption,
    )
