"""Trajectory files from the object store into the replay buffer.

Invariant: a group reaches the buffer only if its file has the promised size and hash, its rows are whole and finite,
its prompt is the task's own, and its tokens are the model's; every other group is rejected with a reason, never lost
and never trained on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from app.learner.audit.auditor import Auditor
from app.learner.buffer import Group, ReplayBuffer
from app.learner.cache import FileCache
from app.learner.client import Control
from app.learner.outbox import Directives
from app.learner.rewards import Onward, Refuse, Rewarder, Why
from app.learner.threads import watched
from app.protocol.errors import (
    BadInput,
    EchoError,
    IntegrityError,
    NotFound,
    Refused,
    TaskFailed,
    TooLarge,
    Unavailable,
)
from app.protocol.learner import TrajectoryRef
from app.protocol.proofs import Proofs
from app.protocol.pruning import Prune, kept
from app.protocol.trajectory import Expected, Rollout, read_table, rollouts, validate
from app.storage.objects import ObjectStore

log = logging.getLogger(__name__)
WAIT_S = 10.0
_STORE_PATIENCE = 60
_ANY_VERSION = 2**31 - 1


class GroupReader:
    """Turns one referenced file into groups."""

    def __init__(
        self,
        objects: ObjectStore,
        prompt_ids: Callable[[int], list[int]],
        *,
        group_size: int,
        max_tokens: int,
        vocabulary: int,
        quantised: str | None = None,
        proofs: Proofs = "none",
        prune: Prune | None = None,
        cache: FileCache | None = None,
        heldout_ids: Callable[[int], list[int]] | None = None,
    ) -> None:
        """`group_size`: of groups whose size a reference doesn't name; `prune`: files have a part of each group;
        `heldout_ids`: the tokens of held-out prompts, where their answers are to be read."""
        self._objects = objects
        self._prompt_ids = lru_cache(maxsize=4096)(prompt_ids)
        self._heldout_ids = None if heldout_ids is None else lru_cache(maxsize=4096)(heldout_ids)
        self._group_size = group_size
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self._quantised = quantised
        self._proofs = proofs
        self._prune = prune
        self._cache = cache

    def read(self, ref: TrajectoryRef) -> list[Group]:
        """The groups of `ref.work_items`. Raises NotFound, IntegrityError, Refused, Unavailable."""
        data = None if self._cache is None else self._cache.get(ref.blake3, ref.size)
        if data is None:
            try:
                # Whoever put it may put another one there for as long as the place is theirs, of any size on S3.
                data = self._objects.get(ref.key, ref.size)
            except TooLarge as error:
                raise IntegrityError(f"{ref.key} is not the file that was accepted: {error.detail}") from error
            if len(data) != ref.size or blake3(data).hexdigest() != ref.blake3:
                raise IntegrityError(f"{ref.key} is not the file that was accepted ({len(data)} bytes)")
            if self._cache is not None:
                self._cache.put(ref.blake3, data)
        # Of other groups in the file not even the size is known here.
        table = read_table(data).filter(pc.is_in(pc.field("work_item"), pa.array(ref.work_items, pa.string())))
        if table.num_rows == 0:
            return []
        by_item: dict[str, list[Rollout]] = {}
        for rollout in rollouts(table):
            by_item.setdefault(rollout.work_item, []).append(rollout)
        prompts, prune = self._prompt_ids, self._prune
        if ref.heldout:
            if self._heldout_ids is None:
                raise Refused("wrong_prompt", "answers to held-out prompts are not read here")
            prompts, prune = self._heldout_ids, None
        expected = {item: self._expected(rows, ref.group_sizes.get(item), prune) for item, rows in by_item.items()}
        validate(
            table, expected,
            newest_version=_ANY_VERSION, max_tokens=self._max_tokens, quantised=self._quantised,
            proofs=self._proofs,
        )  # fmt: skip
        return [
            whole_group(item, by_item[item], ref.node_id, prompts, self._vocabulary)
            for item in ref.work_items
            if item in by_item
        ]

    def _expected(self, rows: list[Rollout], size: int | None, prune: Prune | None) -> Expected:
        size = self._group_size if size is None else size
        return Expected(rows[0].prompt_index, size, kept(size, prune))


def whole_group(
    item: str, rows: Sequence[Rollout], node: str, prompts: Callable[[int], list[int]], vocabulary: int
) -> Group:
    """Rows of one work item, whole by themselves. Raises Refused unless prompt and tokens are the task's and the
    model's."""
    try:
        own = prompts(rows[0].prompt_index)
    except BadInput as error:
        raise Refused("wrong_prompt", f"work item {item}: {error.detail}") from error
    for rollout in rows:
        if list(rollout.prompt_ids) != own:
            raise Refused("wrong_prompt", f"work item {item} was not sampled from prompt {rollout.prompt_index}")
        if max(rollout.completion_ids) >= vocabulary:
            raise Refused("lengths", f"work item {item} has a token outside the vocabulary of {vocabulary}")
    return Group(item, tuple(sorted(rows, key=lambda r: r.sample_index)), node)


class Inbox:
    """A thread that follows the index of accepted files."""

    def __init__(
        self,
        control: Control,
        reader: GroupReader,
        buffer: ReplayBuffer,
        directives: Directives,
        auditor: Auditor | None = None,
        rewarder: Callable[[Onward, Refuse], Rewarder] | None = None,
    ) -> None:
        """`rewarder`, `auditor`: what comes in goes through their hands, in this order."""
        self._control = control
        self._auditor = auditor
        self._rewarder = None if rewarder is None else rewarder(self._onward, self._refuse)
        self._reader = reader
        self._buffer = buffer
        self._directives = directives
        self._stopped = threading.Event()
        self._thread = watched("inbox", self._run, directives.fail)
        self._counting = threading.Lock()
        self.invalid: dict[str, int] = {}
        """Files refused, by error code or reason, and groups because of their rewards."""

    def start(self) -> None:
        """Begin to fetch."""
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Fetch nothing more; waits up to `timeout_s` for a fetch in progress."""
        self._stopped.set()
        if self._rewarder is not None:
            self._rewarder.stop()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        cursor = 0
        while not self._stopped.is_set():
            try:
                page = self._control.trajectories(cursor, WAIT_S)
                if self._auditor is not None:
                    self._auditor.banish(page.quarantined)
                for ref in page.items:
                    self.take(ref)
                if self._rewarder is not None:
                    self._rewarder.sweep()
            except EchoError as error:
                if not self._stopped.is_set():
                    self._directives.fail(error)
                return
            cursor = page.cursor

    def take(self, ref: TrajectoryRef) -> None:
        """Read one file into the buffer. Raises Unavailable if the object store stays away. Groups whose prompts the
        task fails to tell are dropped, and are no fault of the node."""
        if ref.heldout:
            self._examine(ref)
            return
        try:
            groups = self._patiently(ref)
        except (NotFound, IntegrityError, Refused) as error:
            reason = error.reason if isinstance(error, Refused) else error.code
            self._count(reason)
            log.warning("file %s of node %s is refused: %s", ref.key, ref.node_id, error.detail)
            self._reject(ref.work_items, ref.node_id)
            return
        except TaskFailed as error:
            self._count(error.code)
            log.warning("file %s of node %s can't be used: %s", ref.key, ref.node_id, error.detail)
            for item in ref.work_items:
                self._buffer.reject(item, "unscored", ref.node_id)
            return
        for group in groups:
            if self._rewarder is None:
                self._onward(group, ref)
            else:
                self._rewarder.take(group, ref)
        self._reject(set(ref.work_items) - {g.work_item for g in groups}, ref.node_id)

    def _examine(self, ref: TrajectoryRef) -> None:
        """Answers to held-out prompts go to the auditor, and nowhere else."""
        if self._auditor is None:
            return
        try:
            groups = self._patiently(ref)
        except (NotFound, TaskFailed) as error:
            # The evaluation may be over.
            self._auditor.unreadable(ref, ref.work_items, "unclear", error.detail)
            return
        except (IntegrityError, Refused) as error:
            self._auditor.unreadable(ref, ref.work_items, "suspect", error.detail)
            return
        for group in groups:
            self._auditor.examine(group, ref)
        missing = sorted(set(ref.work_items) - {g.work_item for g in groups})
        self._auditor.unreadable(ref, missing, "suspect", "the file has no such answer")

    def _onward(self, group: Group, ref: TrajectoryRef) -> None:
        if self._auditor is None:
            self._buffer.add(group)
        else:
            self._auditor.receive(group, ref)

    def _refuse(self, group: Group, ref: TrajectoryRef, why: Why) -> None:
        """Of groups, one by one: their rewards are no good."""
        if self._auditor is not None and self._auditor.banished(group.node):
            # Its work items are pending again: a note of this answer would refuse the next one.
            return
        self._count(why)
        self._buffer.reject(group.work_item, why, group.node)
        if why == "wrong_reward" and self._auditor is not None:
            self._auditor.doubt(group, ref)

    def _count(self, reason: str) -> None:
        with self._counting:
            self.invalid = {**self.invalid, reason: self.invalid.get(reason, 0) + 1}

    def _patiently(self, ref: TrajectoryRef) -> list[Group]:
        for attempt in range(_STORE_PATIENCE):
            try:
                return self._reader.read(ref)
            except TaskFailed as error:
                # A process of the task that was killed is replaced at the next call.
                log.warning("%s (try %d)", error.detail, attempt + 1)
                if attempt:
                    raise
            except Unavailable as error:
                log.warning("object store: %s (try %d)", error.detail, attempt + 1)
                if self._stopped.wait(min(10.0, 0.5 * 2**attempt)):
                    break
        raise Unavailable(f"the object store has not handed out {ref.key} in {_STORE_PATIENCE} tries")

    def _reject(self, items: Iterable[str], node: str) -> None:
        for item in items:
            self._buffer.reject(item, "invalid", node)


def counted(invalid: Mapping[str, int]) -> dict[str, float]:
    """Refused files and groups as step metrics."""
    return {f"invalid_{reason}": float(n) for reason, n in sorted(invalid.items())}
