"""How far a job trusts the nodes that work for it: the job's part `trust`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from app.protocol.base import Spec
from app.protocol.proofs import Proofs


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
    twin_share: float = Field(default=0.02, ge=0, le=1)
    """Share of groups whose prompt another node is given, too, so that the rewards of the two can be compared: who
    sends the best of several answers is found that way. Five times that of nodes that are new or in doubt. Both groups
    are trained on. Not with `batch.prune` or rewards "learner"."""

    proofs: Proofs = "none"
    """`toploc`: each completion comes with proofs of the hidden states that it was drawn from, which audits check.
    Nodes need the engine `transformers`."""
    max_proof_misses: float = Field(default=0.1, gt=0, lt=1)
    """Share of the hidden states looked at that a group's proofs may miss before it is suspect. Of float32 on both
    sides none are missed, of bfloat16 on either side at most 0.014 (30 layers, 576 wide); of weights that are off by
    one percent of their spread 0.13, of four-bit ones 0.86."""

    @model_validator(mode="after")
    def _proofs_are_checked(self) -> Self:
        if self.proofs != "none" and self.off:
            raise ValueError("proofs are looked at by audits only: set probation, each_version or audit_share, too")
        return self

    @property
    def off(self) -> bool:
        """Whether nothing at all is computed again."""
        return self.audit_share == 0 and self.probation == 0 and not self.each_version
