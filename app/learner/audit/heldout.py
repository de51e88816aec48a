"""Answers to held-out prompts that were to be the likeliest ones, computed again.

A greedy answer is made of the tokens that have the highest probability, given those before them. Two honest
computations differ where two tokens are within rounding of each other; from there on they go different ways, and each
is still greedy given what it wrote itself. So each token of an answer is held against the likeliest one at its place,
in the learner's own pass over the very answer: behind by more than rounding explains, it was chosen otherwise.

Invariant: recorded log-probs of greedy answers are not looked at (all are next to 0); each token is held against the
version that its span claims; what can't be computed is said, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from app.learner.audit import decide
from app.learner.audit.decide import FAR, SAME_REWARD
from app.learner.audit.look import Scorer, token_versions
from app.learner.buffer import Group
from app.protocol.audits import Audit, Fault, Verdict

Kind = Literal["", "sampled", "greedy"]
"""How a held-out answer was to be chosen; empty: it is a group to train on."""
Array = npt.NDArray[np.float64]
SHARE = 0.005
"""Of a long answer's tokens, so many may be behind: an outlier now and then is no proof."""
_MOST = 20.0


def greedy(
    group: Group,
    scorer: Scorer,
    never: Callable[[int], bool],
    *,
    reward_off: float | None,
    max_rms: float,
    unscored: str = "",
) -> Audit:
    """What an audit of a greedy answer finds. `reward_off`, `never`, `unscored`: as for groups that are trained on."""
    versions = sorted({v for r in group.rollouts for v in r.span_versions})
    unpublished = next((v for v in versions if never(v)), None)
    behind = None if unpublished is not None else margins(group, versions, scorer)
    verdict, fault, detail = judge(
        behind, reward_off=reward_off, never=unpublished, versions=versions, bound=FAR * max_rms, unscored=unscored
    )
    nothing = behind is None or not len(behind)
    return Audit(
        node_id=group.node,
        work_item=group.work_item,
        version=versions[-1],
        verdict=verdict,
        fault=fault,
        heldout="greedy",
        tokens=0 if behind is None else len(behind),
        rms=0.0 if nothing or behind is None else float(np.sqrt(np.mean(np.square(behind)))),
        reward_ok=None if reward_off is None else fault != "reward",
        detail=detail[:500],
    )


def margins(group: Group, versions: Sequence[int], scorer: Scorer) -> Array | None:
    """By how many nats each token that the policy wrote is less likely than the likeliest one at its place, at most
    20; None if a version is not at hand, or its weights give no numbers."""
    found = [np.zeros(len(r.completion_ids)) for r in group.rollouts]
    for version in versions:
        scored = scorer.score(version, group.rollouts)
        if scored is None:
            return None
        for i, (rollout, one) in enumerate(zip(group.rollouts, scored, strict=True)):
            behind = np.asarray(one.top - one.logprob, dtype=np.float64)
            mine = np.asarray(token_versions(rollout)) == version
            found[i] = np.where(mine, np.minimum(behind, _MOST), found[i])
    own = [row[np.asarray(r.written, dtype=bool)] for row, r in zip(found, group.rollouts, strict=True)]
    joined = np.concatenate(own)
    return joined if np.isfinite(joined).all() else None


def judge(
    behind: Array | None,
    *,
    reward_off: float | None,
    never: int | None,
    versions: Sequence[int],
    bound: float,
    unscored: str = "",
) -> tuple[Verdict, Fault, str]:
    """Verdict, what it is about, and the figures in words. `behind`: margins; tokens with more than `bound` nats are
    not the likeliest ones. One may be chance, more are none. An answer of several versions proves nothing either way:
    what an engine keeps of its tokens' states may be of the older one."""
    if reward_off is not None and not reward_off <= SAME_REWARD:
        return "failed", "reward", f"a held-out reward is {reward_off:.6g} off"
    if never is not None:
        return "failed", "version", f"v{never} was never published"
    if behind is None:
        return "unclear", "", f"one of {', '.join(f'v{v}' for v in versions)} is not at hand"
    off = int(np.sum(behind > bound))
    if not off:
        return ("unclear", "", decide.unscored(unscored)) if unscored else ("passed", "", "")
    said = (
        f"{off} of {len(behind)} tokens are not the likeliest ones, by up to {float(behind.max()):.3g} nats "
        f"(bound {bound:.3g})"
    )
    if len(versions) > 1:
        return "unclear", "greedy", said + "; it has tokens of several versions"
    return ("failed" if off > 1 + SHARE * len(behind) else "suspect"), "greedy", said


def unread(node_id: str, work_item: str, kind: Kind, verdict: Verdict, detail: str) -> Audit:
    """An answer that can't be read: it does not count."""
    return Audit(
        node_id=node_id, work_item=work_item, version=0, verdict=verdict, fault="file", heldout=kind or "sampled",
        detail=detail[:500],
    )  # fmt: skip
