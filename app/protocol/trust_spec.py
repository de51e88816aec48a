"""How far a job trusts the nodes that work for it: the job's part `trust`."""

from __future__ import annotations

from pydantic import Field

from app.protocol.base import Spec


class TrustSpec(Spec):
    """What of a node's work the learner computes again; docs/trust.md."""

    audit_share: float = Field(default=0.02, ge=0, le=1)
    """Share of each node's groups, chosen at random where no node can know it; twice that of a machine that may be
    taken away, which changes hands more often."""
    probation: int = Field(default=8, ge=0, le=10_000)
    """So many of a node's groups have to pass before one of its groups is trained on without an audit."""
    each_version: bool = True
    """After its probation, too, the first group of a node under each version waits until it has passed, and the node's
    others under that version wait with it: who keeps old weights is found out before it is trained on."""
    max_logprob_rms: float = Field(default=0.035, gt=0, le=10)
    """Root mean square, in nats, of the difference between a node's log-probs and those computed again, above which a
    group is suspect. Two honest computations of one model differ by rounding: below 1e-4 where both are in float32,
    0.025 between bfloat16 and float32 (135M parameters, H200). A lie of 0.05 lies above both. An engine that
    rounds more (eight-bit weights or caches of its own) needs a higher bound, or it is taken for a liar."""

    @property
    def off(self) -> bool:
        """Whether nothing at all is computed again."""
        return self.audit_share == 0 and self.probation == 0 and not self.each_version
