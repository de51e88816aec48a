"""Groups that can't be sampled or scored: given up by one node after the other, in the end by the job. Pure.

Invariant: a group that failed often enough is never leased again; what one node failed at goes to others as long as
there is one that has not tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

MOST = 3
"""So often a group is given up before it is dropped."""
NODES = 2
"""So many nodes must have failed at it, unless the job has no other: one of them may be what is wrong. A job fails only
if so many failed at its groups: with fewer it loses the node."""
BATCHES = 2
"""A job of which groups for so many steps were dropped like that, before any was accepted, is wrong itself."""


class Tried(Protocol):
    """What is known of a group or a held-out prompt."""

    failures: int
    failed_by: list[str]


def count(item: Tried, node_id: str) -> None:
    """One failure more."""
    item.failures += 1
    if node_id not in item.failed_by:
        item.failed_by = [*item.failed_by, node_id]


def hopeless(failures: int, nodes: Collection[str], at_work: Collection[str]) -> bool:
    """Whether a group that `nodes` gave up so often is dropped. `at_work`: the nodes of the job that work now."""
    return failures >= MOST and (len(set(nodes)) >= NODES or not set(at_work) - set(nodes))


def held_back(nodes: Collection[str], node_id: str, at_work: Collection[str]) -> bool:
    """Whether a node does not get a group that it failed at: somebody at work has not tried yet."""
    return node_id in nodes and bool(set(at_work) - set(nodes))


def said(failures: int, nodes: Sequence[str], detail: str) -> str:
    """Why a group was dropped, in words."""
    return f"given up {failures} times, by {len(set(nodes))} node(s), the last time: {detail}"[:500]


def named(failed_by: Iterable[Iterable[str]]) -> set[str]:
    """The nodes that failed at any of these groups, given who did at each."""
    return {node_id for nodes in failed_by for node_id in nodes}


def job_is_wrong(dropped: Collection[Collection[str]], accepted: int, prompts: int) -> bool:
    """Whether it is rather the job than its prompts or a node: no group was ever accepted, and so many failed
    everywhere. `dropped`: who failed at each group that was given up."""
    return accepted == 0 and len(dropped) >= BATCHES * prompts and len(named(dropped)) >= NODES
