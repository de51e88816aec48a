"""Groups that one job lends and another, of another model but with the same task and vocabulary, borrows. Experimental.

`jobs/{job}/lent/{step:09d}.parquet`: the groups of its own that a job's step was made from, as they were trained on;
`about.json` comes last, when the job has ended well: what a borrower is held against.

Invariant: what a step borrows is decided by its number and by what the lender had left when it ended, so that a step
that is made again borrows the same; a group is borrowed at most once, and only if prompt and tokens are those of the
task and the model here. Its work items begin with BORROWED, and are reported to nobody.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from app.learner.buffer import BORROWED, Group
from app.learner.inbox import whole_group
from app.learner.position import Trainer
from app.learner.prepare import Parts
from app.learner.refill import has_signal
from app.learner.trainer import StepMetrics, TrainerState
from app.protocol.base import Strict
from app.protocol.errors import BadInput, EchoError, NotFound, Refused, TooLarge, Unavailable
from app.protocol.job import JobSpec
from app.protocol.learner_spec import BorrowSpec
from app.protocol.trajectory import Expected, Rollout, encode, quantisation, read_table, rollouts, validate
from app.storage.objects import ObjectStore
from app.tasks.base import Task
from app.tasks.prompts import encode_prompt

log = logging.getLogger(__name__)
MAX_BYTES = 1 << 30
"""Of one step's groups."""
_ABOUT = "about.json"
_PATIENCE = 60
_ANY_VERSION = 2**31 - 1


class About(Strict):
    """What prompts and token ids of lent groups mean."""

    task: str
    """The task with its parameters and files, and the seed of its prompts, hashed."""
    vocabulary: str
    """Tokens and their ids, hashed."""


def about(spec: JobSpec, tokenizer: Any) -> About:
    """Of a job."""
    task = [spec.task.name, spec.task.params, sorted(f.blake3 for f in spec.task.files), spec.seed]
    return About(task=_hashed(task), vocabulary=_hashed(tokenizer.get_vocab()))


def _hashed(thing: object) -> str:
    return blake3(json.dumps(thing, sort_keys=True).encode()).hexdigest()


def _key(job_id: str, name: str) -> str:
    return f"jobs/{job_id}/lent/{name}"


class Lender:
    """Puts each step's own groups into the store, in a thread: a step waits for it only if the one before is not
    there yet."""

    def __init__(self, objects: ObjectStore, job_id: str, about: About) -> None:
        self._objects = objects
        self._job_id = job_id
        self._about = about
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lender")
        self._last: Future[None] | None = None

    def put(self, step: int, groups: Sequence[Group]) -> None:
        """These made the step. Where the store refuses, the step is not lent."""
        if self._last is not None:
            self._last.result()
        self._last = self._pool.submit(self._put, step, groups)

    def end(self) -> None:
        """The job has ended well: from now on it can be borrowed from. Raises Unavailable."""
        self._pool.shutdown()
        self._objects.put(_key(self._job_id, _ABOUT), self._about.model_dump_json().encode())

    def _put(self, step: int, groups: Sequence[Group]) -> None:
        # The file's mark is of all its rows; who borrows weighs them one-sidedly whatever it says.
        rows = [replace(r, proofs=None) for g in groups if not g.borrowed for r in g.rollouts]
        try:
            self._objects.put(_key(self._job_id, f"{step:09d}.parquet"), encode(rows))
        except EchoError as error:
            log.warning("the groups of step %d are not lent: %s", step, error.detail)


class Borrower:
    """Groups of a job that has ended, step by step."""

    def __init__(
        self,
        loan: BorrowSpec,
        spec: JobSpec,
        objects: ObjectStore,
        own: About,
        prompt_ids: Callable[[int], list[int]],
        vocabulary: int,
        *,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """Raises BadInput if that job can't be borrowed from, Unavailable."""
        self._spec = spec
        self._job_id = loan.job
        self._most = max(1, int(loan.share * spec.batch.prompts))
        self._objects = objects
        self._prompt_ids = prompt_ids
        self._vocabulary = vocabulary
        self._pause = pause or threading.Event().wait
        self.refused = 0
        """Steps whose groups could not be used."""
        self._check(own)

    def groups(self, t: int) -> list[Group]:
        """For the step that makes v_{t+1} out of v_t: the first with a signal that the lender's step t + 1 was made
        from. Nothing if there is no such step or its groups don't fit. Raises Unavailable."""
        key = _key(self._job_id, f"{t + 1:09d}.parquet")
        try:
            data = self._patiently(key)
            return [] if data is None else self._read(data)
        except (TooLarge, Refused) as error:
            self.refused += 1
            log.warning("nothing is borrowed for step %d: %s: %s", t + 1, key, error.detail)
            return []

    def _check(self, own: About) -> None:
        try:
            theirs = About.model_validate_json(self._objects.get(_key(self._job_id, _ABOUT)))
        except NotFound as error:
            raise BadInput(
                f"learner.borrow: job {self._job_id} has left nothing to borrow here: it must have had "
                "learner.lend, and have ended well"
            ) from error
        except ValueError as error:
            raise BadInput(f"learner.borrow: {_key(self._job_id, _ABOUT)} is not what a learner writes") from error
        if theirs.task != own.task:
            raise BadInput(f"learner.borrow: job {self._job_id} had another task, other parameters or another seed")
        if theirs.vocabulary != own.vocabulary:
            raise BadInput(f"learner.borrow: the model of job {self._job_id} has another vocabulary")

    def _patiently(self, key: str) -> bytes | None:
        for attempt in range(_PATIENCE):
            try:
                return self._objects.get(key, MAX_BYTES)
            except NotFound:
                return None
            except Unavailable as error:
                log.warning("object store: %s (try %d)", error.detail, attempt + 1)
                self._pause(min(10.0, 0.5 * 2**attempt))
        raise Unavailable(f"the object store has not handed out {key} in {_PATIENCE} tries")

    def _read(self, data: bytes) -> list[Group]:
        # No stranger's file: a learner's step, which may be larger than what a node hands in.
        table = read_table(data, max_rows=sys.maxsize, max_values=sys.maxsize)
        rewards: dict[str, list[float]] = {}
        for item, reward in zip(*(table.column(n).to_pylist() for n in ("work_item", "reward")), strict=True):
            rewards.setdefault(item, []).append(reward)
        chosen = [item for item, found in rewards.items() if has_signal(found)][: self._most]
        table = table.filter(pc.is_in(pc.field("work_item"), pa.array(chosen, pa.string())))
        by_item: dict[str, list[Rollout]] = {item: [] for item in chosen}
        for row in rollouts(table):
            by_item[row.work_item].append(row)
        # The lender held them against what it had asked for; pruned groups have any of the sample indices.
        sizes = {item: max(r.sample_index for r in rows) + 1 for item, rows in by_item.items()}
        expected = {i: Expected(rows[0].prompt_index, sizes[i], len(rows)) for i, rows in by_item.items()}
        validate(
            table, expected,
            newest_version=_ANY_VERSION, max_tokens=self._spec.sampling.max_tokens, quantised=quantisation(table),
        )  # fmt: skip
        return [self._group(item, rows) for item, rows in by_item.items()]

    def _group(self, item: str, rows: Sequence[Rollout]) -> Group:
        name = f"{BORROWED}{self._job_id}:{item}"
        mark = self._spec.snapshot.quantise  # one for all that goes to other ranks
        theirs = [replace(r, work_item=name, quantisation=mark) for r in rows]
        return whole_group(name, theirs, "", self._prompt_ids, self._vocabulary)


class Loans:
    """A trainer whose steps borrow groups, and lend theirs."""

    def __init__(self, trainer: Trainer, lender: Lender | None, borrower: Borrower | None) -> None:
        self._trainer = trainer
        self._lender = lender
        self._borrower = borrower

    @property
    def steps(self) -> int:
        """Steps made."""
        return self._trainer.steps

    def step(self, groups: Sequence[Group]) -> StepMetrics:
        """One update from these groups and what is borrowed for it."""
        borrowed = [] if self._borrower is None else self._borrower.groups(self.steps)
        done = self._trainer.step([*groups, *borrowed])
        if self._lender is not None:
            self._lender.put(self.steps, groups)
        if self._borrower is None:
            return done
        told = {"borrowed_groups": float(len(borrowed)), "borrowed_refused": float(self._borrower.refused)}
        return replace(done, values=done.values | told)

    def snapshot(self, *, optimizer: bool = True) -> TrainerState:
        """As the trainer's."""
        return self._trainer.snapshot(optimizer=optimizer)

    def end(self) -> None:
        """The job has ended well. Raises Unavailable."""
        if self._lender is not None:
            self._lender.end()


def open_loans(spec: JobSpec, job_id: str, parts: Parts, objects: ObjectStore) -> Loans:
    """The trainer of `parts` with what the job lends and borrows. Raises BadInput, Unavailable."""
    tokenizer, loan = parts.loaded.tokenizer, spec.learner.borrow
    if loan is None and not spec.learner.lend:
        return Loans(parts.trainer, None, None)
    own = about(spec, tokenizer)
    borrower = None
    if loan is not None:
        vocabulary = parts.loaded.model.get_input_embeddings().num_embeddings
        prompts = partial(_prompt, parts.task, copy.deepcopy(tokenizer))
        borrower = Borrower(loan, spec, objects, own, prompts, vocabulary)
    return Loans(parts.trainer, Lender(objects, job_id, own) if spec.learner.lend else None, borrower)


def _prompt(task: Task, tokenizer: Any, index: int) -> list[int]:
    return encode_prompt(tokenizer, task.train(index))
