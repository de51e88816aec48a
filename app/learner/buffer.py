"""The replay buffer: whole groups, oldest admissible first.

Invariant: a group that `take` returns satisfies t − x ≤ S at that moment, x the version of its oldest token; a work
item leaves the buffer once, either to be trained on or with a reason. A step that was made before, by a process that
died, is made from the same groups in the same order as long as all of them come.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.learner.refill import Spare, extra, has_signal
from app.protocol.learner import DroppedGroup, DropReason
from app.protocol.trajectory import Rollout

log = logging.getLogger(__name__)
BORROWED = "borrowed:"
"""What the work items of groups of another model begin with; none of our own does."""
REMEMBERED = 200_000
"""Work items that are remembered to refuse a second copy."""


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one work item, sorted by sample index."""

    work_item: str
    rollouts: tuple[Rollout, ...]
    node: str = ""
    """Who sampled it."""

    @property
    def borrowed(self) -> bool:
        """Whether another job's model sampled it: its versions are not ours."""
        return self.work_item.startswith(BORROWED)

    @property
    def oldest_version(self) -> int:
        """The version that staleness counts from."""
        return min(r.oldest_version for r in self.rollouts)

    @property
    def signal(self) -> bool:
        """Whether its answers got different rewards, so that it has a gradient."""
        return has_signal([r.reward for r in self.rollouts])

    @property
    def tokens(self) -> int:
        """Completion tokens that the policy wrote."""
        return sum(r.own_tokens for r in self.rollouts)


def admissible(version: int, t: int, staleness_budget: int) -> bool:
    """Whether a rollout with its oldest token of v_version may be trained on by a learner that is at v_t."""
    return t - version <= staleness_budget


class ReplayBuffer:
    """Thread-safe. `t` is always the learner's current version: its number of completed steps."""

    def __init__(self) -> None:
        self._groups: list[tuple[int, int, Group]] = []
        self._arrived = 0
        self._dropped: list[DroppedGroup] = []
        self._known: dict[str, str] = {}
        """Work item → the node that brought it; empty if it is not known."""
        self._order: deque[str] = deque()
        self._plan: dict[int, tuple[str, ...]] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        with self._changed:
            return len(self._groups)

    def add(self, group: Group) -> bool:
        """Take a group in; False if this work item has been here before."""
        with self._changed:
            if not self._remember(group.work_item, group.node):
                return False
            self._groups.append((group.oldest_version, self._arrived, group))
            self._groups.sort(key=lambda entry: entry[:2])
            self._arrived += 1
            self._changed.notify_all()
            return True

    def plan(self, steps: Mapping[int, Sequence[str]]) -> None:
        """Step → the groups that it was made from before, in their order. It is given up when one can't come."""
        with self._changed:
            self._plan = {step: tuple(items) for step, items in steps.items()}

    def replays(self, t: int) -> bool:
        """Whether step t + 1 is to be made again from the groups that it was made from before."""
        with self._changed:
            return t + 1 in self._plan

    def reject(self, work_item: str, reason: DropReason, node: str = "") -> None:
        """Note that a group of this node will never be trained on; `take` and `evict` hand the note out."""
        with self._changed:
            if self._remember(work_item, node):
                self._dropped.append(DroppedGroup(work_item=work_item, reason=reason))
                self._changed.notify_all()

    def discard(self, work_item: str) -> None:
        """A fault was found in this group: if nothing has been made of it yet, it is dropped as invalid."""
        with self._changed:
            if self._remove(lambda group: group.work_item == work_item) or self._remember(work_item):
                self._dropped.append(DroppedGroup(work_item=work_item, reason="invalid"))
                self._changed.notify_all()

    def withdraw(self, work_items: Collection[str], nodes: Collection[str]) -> None:
        """Forget all that is here of these nodes, and these work items unless another node has answered them by now:
        they are answered anew."""
        with self._changed:
            items = {item for item in work_items if self._known.get(item, "") in {"", *nodes}}
            self._remove(lambda group: group.work_item in items or group.node in nodes)
            items.update(item for item, node in self._known.items() if node in nodes)
            self._forget(items)
            # Told now, it would drop the answer that another node may have given by then.
            self._dropped = [note for note in self._dropped if note.work_item not in items]
            if items & {item for planned in self._plan.values() for item in planned}:
                log.warning("steps can't be made again from the same groups: some were withdrawn")
                self._plan = {}
            self._changed.notify_all()

    def set_aside(self, nodes: Collection[str]) -> list[tuple[int, int, Group]]:
        """Take out all groups of these nodes, until `put_back` or `withdraw`."""
        with self._changed:
            gone = self._remove(lambda group: group.node in nodes)
            self._forget(group.work_item for _, _, group in gone)
            return gone

    def put_back(self, aside: Iterable[tuple[int, int, Group]]) -> None:
        """What was set aside, where it was."""
        with self._changed:
            back = [entry for entry in aside if self._remember(entry[2].work_item, entry[2].node)]
            self._groups = sorted([*self._groups, *back], key=lambda entry: entry[:2])
            self._changed.notify_all()

    def _remove(self, which: Callable[[Group], bool]) -> list[tuple[int, int, Group]]:
        gone = [entry for entry in self._groups if which(entry[2])]
        self._groups = [entry for entry in self._groups if not which(entry[2])]
        return gone

    @property
    def unreported(self) -> int:
        """Groups that were dropped or rejected and not handed out to be reported yet."""
        with self._changed:
            return len(self._dropped)

    def note(self, work_items: Iterable[str]) -> None:
        """These were trained on or dropped already: refuse them when they come again."""
        with self._changed:
            for item in work_items:
                self._remember(item)

    def ready(self, t: int, staleness_budget: int, prompts: int) -> bool:
        """Whether at least `prompts` groups are admissible at v_t, or all that step t + 1 was made from before."""
        with self._changed:
            return self._enough(t, staleness_budget, prompts)

    def wait(self, t: int, staleness_budget: int, prompts: int, timeout_s: float) -> bool:
        """Like `ready`, but waits for arrivals up to `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._enough(t, staleness_budget, prompts), timeout_s)

    def take(
        self, t: int, staleness_budget: int, prompts: int, *, least: int | None = None, most: int = 0
    ) -> tuple[list[Group], list[DroppedGroup]]:
        """Remove the `prompts` oldest admissible groups (equal versions in order of arrival), and what is dropped.

        With fewer than `least` (default `prompts`) admissible groups it returns no group; what is over budget is
        dropped all the same. A step that was made before gets its groups of then, or none until they are all here.
        Up to `most` groups are handed out to make up for those without a signal, if there are any to spare.
        """
        with self._changed:
            planned = self._planned(t, staleness_budget)
            self._drop_stale(t, staleness_budget)
            if planned is not None:
                return self._take_planned(t, planned), self._hand_out()
            taken: list[Group] = []
            if len(self._groups) >= (prompts if least is None else least):
                taken = [group for _, _, group in self._groups[:prompts]]
                del self._groups[:prompts]
                taken += self._refill(t, staleness_budget, taken, prompts, most)
            return taken, self._hand_out()

    def evict(self, t: int, staleness_budget: int) -> list[DroppedGroup]:
        """Drop what is over budget at v_t and return it together with what was rejected since the last call."""
        with self._changed:
            self._drop_stale(t, staleness_budget)
            return self._hand_out()

    def _enough(self, t: int, staleness_budget: int, prompts: int) -> bool:
        planned = self._planned(t, staleness_budget)
        if planned is not None:
            return set(planned) <= {group.work_item for _, _, group in self._groups}
        return self._admissible(t, staleness_budget) >= prompts

    def _planned(self, t: int, staleness_budget: int) -> tuple[str, ...] | None:
        """What step t + 1 was made from, unless some of it was refused or is over a budget that was lowered since."""
        planned = self._plan.get(t + 1)
        if planned is None:
            return None
        here = {group.work_item: version for version, _, group in self._groups}
        lost = [
            item
            for item in planned
            if (item in self._known if item not in here else not admissible(here[item], t, staleness_budget))
        ]
        if lost:
            log.warning("step %d can't be made again from the same groups: %d of them are gone", t + 1, len(lost))
            self._plan = {}
            return None
        return planned

    def _take_planned(self, t: int, planned: Sequence[str]) -> list[Group]:
        here = {group.work_item: group for _, _, group in self._groups}
        if not set(planned) <= here.keys():
            return []
        del self._plan[t + 1]
        wanted = set(planned)
        self._groups = [entry for entry in self._groups if entry[2].work_item not in wanted]
        return [here[item] for item in planned]

    def _refill(self, t: int, staleness_budget: int, taken: Sequence[Group], prompts: int, most: int) -> list[Group]:
        rest = [Spare(g.signal, admissible(v, t + 1, staleness_budget)) for v, _, g in self._groups]
        count = extra([g.signal for g in taken], rest, prompts=prompts, most=most)
        more = [group for _, _, group in self._groups[:count]]
        del self._groups[:count]
        return more

    def _admissible(self, t: int, staleness_budget: int) -> int:
        return sum(admissible(version, t, staleness_budget) for version, _, _ in self._groups)

    def _drop_stale(self, t: int, staleness_budget: int) -> None:
        # What a step was made from before came when S was right for it; whether it still is shows when that step comes.
        spared = {item for planned in self._plan.values() for item in planned}
        stale = [
            g
            for version, _, g in self._groups
            if not admissible(version, t, staleness_budget) and g.work_item not in spared
        ]
        self._dropped += [DroppedGroup(work_item=g.work_item, reason="stale", lag=t - g.oldest_version) for g in stale]
        gone = {g.work_item for g in stale}
        self._groups = [entry for entry in self._groups if entry[2].work_item not in gone]

    def _hand_out(self) -> list[DroppedGroup]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def _forget(self, work_items: Iterable[str]) -> None:
        for item in work_items:
            self._known.pop(item, None)

    def _remember(self, work_item: str, node: str = "") -> bool:
        if work_item in self._known:
            return False
        self._known[work_item] = node
        self._order.append(work_item)
        if len(self._order) > REMEMBERED:
            self._known.pop(self._order.popleft(), None)
        return True


def lag_histogram(groups: Sequence[Group], t: int) -> dict[int, int]:
    """Version lag t − x → number of rollouts, x the oldest version of each rollout."""
    lags: dict[int, int] = {}
    for group in groups:
        for rollout in group.rollouts:
            lag = t - rollout.oldest_version
            lags[lag] = lags.get(lag, 0) + 1
    return dict(sorted(lags.items()))
