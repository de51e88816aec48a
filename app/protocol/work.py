"""Work as node and control service speak of it: leased, handed in, handed over. `node.py` lists the calls.

Invariant: a message that validates has sizes and numbers within their bounds; who may say it, the service decides.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.protocol.base import Lenient, Strict

MOST = 2**53 - 1
"""Of anything that is counted: no node ever comes to that, and databases, metrics and JSON hold it exactly."""


class WorkRequest(Strict):
    """Ask for up to `max_items` groups."""

    max_items: int = Field(ge=1, le=1024)
    policy_version: int = Field(ge=0, le=MOST)
    """The version that the rollouts will be sampled under."""
    wait_s: float = Field(default=10, ge=0, le=30)


class PartialRef(Lenient):
    """What another node sampled of a group before it had to stop: a file as `app.protocol.partial` reads it, which may
    hold other groups as well."""

    key: str
    url: str
    """Presigned GET."""
    size: int
    blake3: str


class WorkItem(Lenient):
    """One prompt × group size, leased to one node until `deadline_s` from now."""

    id: str
    prompt_index: int
    group_size: int
    seed: int
    deadline_s: float
    split: Literal["train", "heldout"] = "train"
    """Which prompts `prompt_index` counts. Held-out ones are an evaluation: nobody trains on the answers."""
    temperature: float | None = None
    """Instead of the job's; next to 0 for the most likely answer."""
    partial: PartialRef | None = None
    """Where to go on from. The group is handed in whole all the same, or sampled from scratch if that can't be used."""


class UploadRequest(Strict):
    """Ask for a place to put a file."""

    policy_version: int = Field(ge=0, le=MOST)
    """The oldest version that anything in the file was sampled under; the object's key shows it."""


class UploadSlot(Lenient):
    """Where to PUT the trajectories of this work."""

    key: str
    url: str
    headers: dict[str, str] = Field(default_factory=dict)


class WorkAnswer(Lenient):
    """Leased items, or none with the reason why the node waits."""

    items: list[WorkItem]
    upload: UploadSlot | None = None
    reason: str = ""


class CommitRequest(Strict):
    """A file that was put, by reference."""

    key: str = Field(max_length=500)
    size: int = Field(ge=1, le=MOST)
    blake3: str = Field(pattern=r"^[0-9a-f]{64}$")
    work_items: list[str] = Field(min_length=1, max_length=4096)


class CommitAnswer(Lenient):
    """What was accepted. `late` items were already answered by someone else or are over the staleness budget."""

    accepted: list[str]
    late: list[str] = Field(default_factory=list)


class PartialAnswer(Lenient):
    """What was taken over: work items that are no longer leased to this node and will be finished from the file."""

    taken: list[str]
