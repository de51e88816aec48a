"""What an audit of a group found, as the learner tells it to the control service: `POST /audits`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.protocol.base import Lenient, Strict

Verdict = Literal["passed", "suspect", "failed", "unclear"]
"""suspect: may be chance once, and is none if it comes again. failed: no honest engine does that. unclear: the version
that the node claims is not at hand, or its rewards could not be computed again, so that only what else could be looked
at was."""
Fault = Literal["", "reward", "logprobs", "version", "copied", "greedy", "file", "proof"]


class Audit(Strict):
    """One group that was computed again. Figures are over the tokens that the policy wrote."""

    node_id: str = Field(max_length=200)
    work_item: str = Field(max_length=200)
    version: int = Field(ge=0)
    """Newest version that the group claims."""
    verdict: Verdict
    fault: Fault = ""
    tokens: int = Field(default=0, ge=0)
    """Those whose log-probs were compared."""
    rms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Root mean square of Δ = recorded − computed again, nats."""
    bias: float = Field(default=0.0, allow_inf_nan=False)
    """Mean of Δ."""
    kl: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Mismatch KL: the mean of r − 1 − log r with log r = −Δ."""
    surprise: float = Field(default=0.0, allow_inf_nan=False)
    """Σ (−log p − H): how much less likely the tokens were than those of the distribution usually are, nats."""
    variance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Σ of the variance of −log p, which is that of `surprise`."""
    spread: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Σ of the standard deviation of −log p."""
    jump: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The largest entropy H: no token can lower `surprise` by more."""
    excess: float = Field(default=0.0, allow_inf_nan=False)
    """As `surprise`, but each token counts for at most a bound above its mean: no single rare token decides."""
    heldout: Literal["", "sampled", "greedy"] = ""
    """An answer to a held-out prompt, and how it was to be chosen; empty: a group to train on. Of a greedy one `rms` is
    that of how much less likely its tokens are than the likeliest."""
    reward_ok: bool | None = None
    """None: it was not computed again."""
    proof_points: int = Field(default=0, ge=0)
    """Hidden states that a proof was held against; 0: the job asks for none."""
    proof_misses: int = Field(default=0, ge=0)
    """Those that it does not go through."""
    detail: str = Field(default="", max_length=500)

    @property
    def clean(self) -> bool:
        """Whether no fault was found."""
        return self.verdict == "passed" or (self.verdict == "unclear" and not self.fault)


class AuditReport(Strict):
    """Audits that are done. The same ones again are harmless."""

    audits: list[Audit] = Field(min_length=1, max_length=256)


class AuditAnswer(Lenient):
    """What follows."""

    withdrawn: list[str] = Field(default_factory=list)
    """Work items that are pending again; the learner forgets that it ever had them."""
    quarantined: list[str] = Field(default_factory=list)
    """All nodes of the job that are in quarantine: nothing of theirs is trained on from here on."""
