"""What a node's audits say of it, all together. Pure.

Invariant: one failed audit is enough, for no honest engine fails one; what may be chance decides only when it has come
so often that chance is out of the question. Standings of the same audits are the same, in whatever order a control
service came to know them within rounding, and survive it.

Three things are watched.

* *Drift*: suspect audits, whose log-probs are off by more than the bound, add up, others wear it off (a CUSUM of the
  mean square over the bound's). Noise of 0.05 nats under a bound of 0.035 adds 1 an audit and is out at the fifth. An
  honest node at two thirds of the bound loses 0.5 an audit, so that three outliers have to come nearly in a row.
* *Calibration*: by Freedman's inequality a martingale whose steps are at most b reaches x, while its variance is at
  most V, with a probability of at most exp(−x² / 2(V + b·x/3)) (Ann. Probab. 3, 1975). Downwards no token can go
  further than its entropy; upwards tokens are counted only so far (`excess`), which can but lower the sum. z is that
  exponent as if it were a normal's: |z| > 6 comes by chance once in 65 million nodes' lives. TOLERANCE leaves out what
  the roundings of an engine may do to its distribution, or a long life would convict everybody.
* *Likeliest answers*. Tokens of a greedy held-out answer that are not the likeliest ones by far more than rounding
  explains: such answers of a node add up, and hardly wear off. Drift and calibration leave greedy answers out.
* *Failures*.

Held-out answers are no help on probation: that ends with groups that are trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from app.protocol.audits import Audit

MOST_DRIFT = 5.0
MOST_Z = 6.0
MOST_UNGREEDY = 3.0
UNGREEDY_WEAR = 0.02
"""What a greedy answer that passed takes off: one outlier in fifty convicts nobody."""
CAUGHT = frozenset({"copied", "replayed"})
"""Reasons of a refused file that chance or a fault of an honest node does not explain."""
STRANGE = 5
"""So many liars among the first nodes of a job are none: engine, model files or task differ from the learner's."""
TOLERANCE = 0.02
"""Of a token's standard deviation, by which the tokens of an honest engine may be likelier or less likely on average.
A temperature of 0.9 instead of 1 makes ten times as much."""
UPWARDS = 5.0
"""What a token counts upwards at most, nats; as the learner counts."""
FEW = 8
"""Tokens, below which an audit says nothing of drift."""
MEMORY = 0.2
"""Weight of the newest audit in what is shown as a node's drift."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a node."""

    audits: int = 0
    passed: int = 0
    failures: int = 0
    """Audits that were suspect or failed."""
    rms: float | None = None
    """Nats, smoothed."""
    kl: float | None = None
    drift: float = 0.0
    surprise: float = 0.0
    variance: float = 0.0
    spread: float = 0.0
    jump: float = 0.0
    excess: float = 0.0
    ungreedy: float = 0.0

    @property
    def z(self) -> float:
        """How far its tokens are from being drawn from the distribution that it claims; negative: too likely."""
        slack = TOLERANCE * self.spread
        if self.surprise < 0:
            return -_deviations(-self.surprise - slack, self.variance, self.jump)
        return _deviations(self.excess - slack, self.variance, UPWARDS)


def _deviations(x: float, variance: float, jump: float) -> float:
    below = variance + jump * x / 3
    return x / math.sqrt(below) if x > 0 and below > 0 else 0.0


def after(standing: Standing, audit: Audit, max_rms: float) -> Standing:
    """The standing with one audit more."""
    greedy = audit.heldout == "greedy"
    told = audit.tokens > 0 and not greedy
    drift = standing.drift
    if audit.tokens >= FEW and audit.verdict != "unclear" and not greedy:
        least = 1.0 if audit.fault == "proof" else -1.0
        drift = max(0.0, drift + min(2.0, max(least, (audit.rms / max_rms) ** 2 - 1)))
    return replace(
        standing,
        audits=standing.audits + 1,
        passed=standing.passed + (audit.verdict == "passed" and not audit.heldout),
        failures=standing.failures + (audit.verdict in ("suspect", "failed")),
        rms=_smooth(standing.rms, audit.rms) if told else standing.rms,
        kl=_smooth(standing.kl, audit.kl) if told else standing.kl,
        drift=drift,
        surprise=standing.surprise + audit.surprise,
        variance=standing.variance + audit.variance,
        spread=standing.spread + audit.spread,
        jump=max(standing.jump, audit.jump),
        excess=standing.excess + audit.excess,
        ungreedy=_ungreedy(standing.ungreedy, audit) if greedy else standing.ungreedy,
    )


def _ungreedy(before: float, audit: Audit) -> float:
    if audit.fault == "greedy" and audit.verdict == "suspect":
        return before + 1.0
    return max(0.0, before - UNGREEDY_WEAR) if audit.verdict == "passed" else before


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + MEMORY * (new - old)


def hopeless(convicted: int, passed: int) -> bool:
    """Whether it is rather the job than its nodes: so many were convicted, and no audit of any has ever passed."""
    return convicted >= STRANGE and passed == 0


def guilt(standing: Standing, audit: Audit, max_rms: float) -> str:
    """Why a node is to be quarantined after this audit; empty: it is not. `standing` is that with the audit."""
    if audit.verdict == "failed":
        return f"{audit.fault}: {audit.detail} (work item {audit.work_item})"
    if standing.drift >= MOST_DRIFT and audit.fault == "proof":
        return f"drift: audit after audit is suspect, and in this one {audit.detail} (work item {audit.work_item})"
    if standing.drift >= MOST_DRIFT:
        return (
            f"drift: its log-probs are off by {standing.rms or 0.0:.3g} nats RMS, audit after audit "
            f"(trust.max_logprob_rms is {max_rms:g}; {standing.failures} of {standing.audits} audits not passed)"
        )
    if standing.ungreedy >= MOST_UNGREEDY:
        return (
            "greedy: again and again its answers to held-out prompts are not those that its version finds likeliest "
            f"(the last: {audit.detail}, work item {audit.work_item})"
        )
    if abs(standing.z) > MOST_Z:
        what = "likelier" if standing.z < 0 else "less likely"
        return (
            f"calibration: its tokens are {what} than tokens of the policy that it claims are (z = {standing.z:.1f} "
            f"after {standing.audits} audits): another temperature, or a choice among answers"
        )
    return ""
