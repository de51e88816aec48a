"""Learners with `placement: attached`: somebody else starts them, wherever they like, as often as they like.

Invariant: nothing is rented, and nothing stays rented for long, for a job whose learner is not there; a job waits for
its learner with a reason and a since-when, and goes on whichever of the two was started first.
"""

from __future__ import annotations

from enum import StrEnum

from app.storage.models import Job

SILENCE_S = 20.0
"""After so long without a word the learner is away."""
AWAY_S = 300.0
"""After so long the nodes are given back. A learner that is started again at once finds them at work."""
WAITS = "waits for an attached learner"
LOADS = "the learner loads the model and the task"
AWAY = "away"
"""`learner_state` of a learner that is not heard from."""


class Presence(StrEnum):
    """Of a learner that is not ours to start."""

    NEVER = "never"
    HERE = "here"
    AWAY = "away"
    GONE = "gone"


def presence(seen_at: float | None, now: float, listening_since: float) -> Presence:
    """What to make of the learner's last sign of life. Nobody is away for silence while nobody listened. Pure."""
    if seen_at is None:
        return Presence.NEVER
    quiet = now - max(seen_at, listening_since)
    if quiet < SILENCE_S:
        return Presence.HERE
    return Presence.AWAY if quiet < AWAY_S else Presence.GONE


def is_attached(job: Job) -> bool:
    """Whether somebody else starts this job's learner."""
    return bool(job.spec["learner"].get("placement") == "attached")


def waiting(job: Job, found: Presence) -> str:
    """What a pending job waits for."""
    if found is Presence.NEVER:
        return WAITS
    if found is not Presence.HERE:
        return f"{WAITS}, which was at step {job.step}"
    return LOADS
