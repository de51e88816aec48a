"""Which groups are audited, and what the figures of one say. Pure.

Invariant: while a node is on probation, and under each version until one of its groups has passed, nothing of it is
trained on that was not audited; after that no node can know which of its groups will be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.learner.audit.proofs import Match, together
from app.learner.audit.statistics import Figures
from app.protocol.audits import Fault, Verdict
from app.protocol.trust_spec import TrustSpec

Route = Literal["first", "wait", "beside", "train"]
"""first: audited, and trained on only if it passes. wait: until another one has passed. beside: trained on, and audited
at the same time. train: not audited."""

FAR = 5.0
"""So many times the bound is no honest engine, if most tokens are beyond the bound: a few may be off for many
reasons."""
FEW = 8
"""Of fewer tokens nothing is said."""
SAME_REWARD = 1e-6
MISSES = TrustSpec().max_proof_misses
MOST_MISSED = 0.5
"""Proofs that miss a larger share are of other hidden states."""


def share(trust: TrustSpec, interruptible: bool) -> float:
    """The chance with which a group of a node is audited beside its training."""
    return min(1.0, trust.audit_share * (2 if interruptible else 1))


def route(
    trust: TrustSpec, *, passed: int, version_passed: bool, under_way: bool, interruptible: bool, draw: float
) -> Route:
    """What becomes of a group that came in.

    `passed`: audits that its node has passed; `version_passed`: one of them under the group's version; `under_way`: one
    of the node under that version waits for its audit now; `draw`: uniform in [0, 1), secret.
    """
    if passed < trust.probation:
        return "first"
    if trust.each_version and not version_passed:
        return "wait" if under_way else "first"
    return "beside" if draw < share(trust, interruptible) else "train"


@dataclass(frozen=True, slots=True)
class Look:
    """What was found out about a group. `copies`: how often a completion comes that should not come twice."""

    figures: Figures
    reward_off: float | None
    """Largest difference of a reward from the one computed again; None: they were not computed."""
    copies: int
    missing: int | None
    """A version that is not at hand, so that its log-probs could not be computed."""
    never: int | None = None
    """A version that was never published."""
    foreign: bool = False
    """Other nodes began it: its log-probs are not all the word of who handed it in."""
    proofs: tuple[Match, ...] = ()
    """What came of the proofs that it came with."""
    unscored: str = ""
    """Why its rewards could not be computed again, though they should have been; empty: they were, or needn't be."""


def judge(look: Look, max_rms: float, max_misses: float = MISSES) -> tuple[Verdict, Fault, str]:
    """Verdict, what it is about, and the figures in words. The bounds are those of the job's `trust`."""
    if look.reward_off is not None and not look.reward_off <= SAME_REWARD:
        return "failed", "reward", f"a reward is {look.reward_off:.6g} off"
    if look.never is not None:
        return ("unclear" if look.foreign else "failed"), "version", f"v{look.never} was never published"
    if look.missing is not None:
        return "unclear", "", f"v{look.missing} is not at hand"
    f = look.figures
    off = f"log-probs are off by {f.rms:.3g} nats RMS over {f.tokens} tokens (bound {max_rms:g})"
    if f.tokens >= FEW and f.rms > max_rms:
        far = f.rms > FAR * max_rms and f.median > max_rms
        if look.foreign:
            return "unclear", "logprobs", off + "; other nodes began it"
        return ("failed" if far else "suspect"), "logprobs", off
    p = together(look.proofs)
    if p.points >= FEW and p.misses > max_misses * p.points:
        missed = f"its proofs miss {p.misses} of {p.points} hidden states (bound {max_misses:.0%})"
        if look.foreign:
            return "unclear", "proof", missed + "; other nodes began it"
        return ("failed" if p.misses > MOST_MISSED * p.points else "suspect"), "proof", missed
    if look.copies:
        return ("unclear" if look.foreign else "failed"), "copied", f"one completion comes {look.copies} times"
    if look.unscored:
        return "unclear", "", unscored(look.unscored)
    return "passed", "", ""


def unscored(why: str) -> str:
    """In words, that rewards are neither right nor wrong."""
    return f"its rewards could not be computed again: {why}"
