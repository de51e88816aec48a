"""Groups of another model: the same ones for the same step, held against task and model, one-sided, counted apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.learner.buffer import Group
from app.learner.loans import Borrower, Lender, Loans, about
from app.learner.microbatch import NO_LAG, row_of
from app.learner.parallel.messages import packed, unpacked
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import BadInput, Unavailable
from app.protocol.job import JobSpec
from app.protocol.trajectory import read_table
from app.storage.stores import FolderStore
from tests.unit.learner.samples import VOCABULARY, batch, group, job, random_model

torch.set_num_threads(1)
LOAN = {"job": "other", "share": 0.5}
TOKENIZER = SimpleNamespace(get_vocab=lambda: {"a": 0})
PROMPT = list(group("same").rollouts[0].prompt_ids)


def borrowing(**learner) -> JobSpec:
    return job(learner={"loss": "tis", "grad_clip": 1e6, **learner, "borrow": LOAN}, batch={"prompts": 4})


def theirs(number: int) -> list[Group]:
    """Five groups of one prompt; of the first all rewards are equal."""
    made = [group(f"{number}-{i}", rewards=(0.0, 1.0 if i else 0.0)) for i in range(5)]
    return [
        Group(g.work_item, tuple(dataclasses.replace(r, prompt_ids=PROMPT) for r in g.rollouts), "their node")
        for g in made
    ]


def lent(store: FolderStore, *steps: list[Group], spec: JobSpec | None = None, tokenizer=TOKENIZER) -> None:
    lender = Lender(store, "other", about(spec or job(), tokenizer))
    for number, groups in enumerate(steps, 1):
        lender.put(number, groups)
    lender.end()


def borrower(store: FolderStore, spec: JobSpec | None = None, **more) -> Borrower:
    spec = spec or borrowing()
    assert spec.learner.borrow is not None
    return Borrower(
        spec.learner.borrow, spec, store, about(spec, TOKENIZER), lambda index: PROMPT, VOCABULARY, **more
    )  # fmt: skip


def test_a_step_borrows_what_the_same_step_of_the_lender_was_made_from(tmp_path: Path):
    store = FolderStore(tmp_path)
    lent(store, theirs(1), theirs(2))
    found = borrower(store)
    assert [[g.work_item for g in found.groups(t)] for t in (0, 1, 2)] == [
        ["borrowed:other:1-1", "borrowed:other:1-2"],
        ["borrowed:other:2-1", "borrowed:other:2-2"],
        [],
    ]
    assert found.refused == 0
    again = borrower(store).groups(1)
    assert packed(again) == packed(found.groups(1))
    assert all(g.borrowed and g.node == "" for g in again)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": [1, 2, 3]},
        {"completion_ids": [VOCABULARY], "logprobs": [-1.0]},
        {"completion_ids": [1] * 2000, "logprobs": [-1.0] * 2000},
        {"logprobs": [0.5], "completion_ids": [1]},
    ],
)
def test_what_does_not_fit_task_or_model_is_not_borrowed(tmp_path: Path, fields):
    store, groups = FolderStore(tmp_path), theirs(1)
    first, *rest = groups[1].rollouts
    groups[1] = Group(groups[1].work_item, (dataclasses.replace(first, **fields), *rest))
    lent(store, groups)
    found = borrower(store)
    assert (found.groups(0), found.refused) == ([], 1)


def test_a_step_may_be_larger_than_a_file_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = FolderStore(tmp_path)
    lent(store, theirs(1))
    for limit in ("max_values", "max_rows"):
        monkeypatch.setitem(read_table.__kwdefaults__, limit, 5)
    assert len(borrower(store).groups(0)) == 2


def test_nothing_is_borrowed_where_no_group_has_a_signal(tmp_path: Path):
    store = FolderStore(tmp_path)
    lent(store, theirs(1)[:1])
    found = borrower(store)
    assert (found.groups(0), found.refused) == ([], 0)


def test_a_file_that_is_none_is_not_borrowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = FolderStore(tmp_path)
    lent(store)
    store.put("jobs/other/lent/000000001.parquet", b"what")
    monkeypatch.setattr("app.learner.loans.MAX_BYTES", 10)
    store.put("jobs/other/lent/000000002.parquet", bytes(11))
    found = borrower(store)
    assert [found.groups(t) for t in (0, 1)] == [[], []]
    assert found.refused == 2


def test_a_job_that_has_not_ended_or_had_another_task_or_vocabulary_is_refused(tmp_path: Path):
    store = FolderStore(tmp_path)
    Lender(store, "other", about(job(), TOKENIZER)).put(1, theirs(1))
    with pytest.raises(BadInput, match=r"learner\.lend"):
        borrower(store)
    lent(store, spec=job(seed=7))
    with pytest.raises(BadInput, match="another task"):
        borrower(store)
    lent(store, tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 1}))
    with pytest.raises(BadInput, match="vocabulary"):
        borrower(store)


def test_an_outage_is_waited_out_and_then_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, waits = FolderStore(tmp_path), list[float]()
    lent(store, theirs(1))

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            monkeypatch.undo()

    def away(key: str, most: int | None = None):
        raise Unavailable("away")

    found = borrower(store, pause=pause)
    monkeypatch.setattr(store, "get", away)
    assert len(found.groups(0)) == 2
    assert waits == [0.5, 1.0, 2.0]
    monkeypatch.setattr(store, "get", away)
    with pytest.raises(Unavailable, match="000000001"):
        found.groups(0)


def test_borrowed_tokens_have_no_weight_above_one_and_no_age():
    (made,) = batch(0, 1)
    unlikely = [dataclasses.replace(r, logprobs=[-20.0] * len(r.logprobs)) for r in made.rollouts]
    as_borrowed = [dataclasses.replace(r, work_item="borrowed:o:1") for r in unlikely]
    assert not row_of(unlikely[0], 1.0, 3).held
    row = row_of(as_borrowed[0], 1.0, 3)
    assert row.held
    assert set(row.lags) == {NO_LAG}
    own, theirs = [Group("1", tuple(unlikely))], [Group("borrowed:o:1", tuple(as_borrowed))]
    spec = borrowing(tis_cap=1e6)
    trainer = GRPOTrainer(random_model(), spec)
    held = trainer.step([*own, *theirs]).values["grad_norm"]
    free = GRPOTrainer(random_model(), spec).step([*own, *own]).values["grad_norm"]
    assert 0.45 < held / free < 0.55, "next to its own, with weights of e^16, what is borrowed counts for nothing"


def test_what_is_borrowed_is_counted_apart(tmp_path: Path):
    store = FolderStore(tmp_path)
    lent(store, theirs(1))
    spec, own = borrowing(), batch(0, 4)
    plain = GRPOTrainer(random_model(), spec).step(own).values
    trainer = GRPOTrainer(random_model(), spec)
    mixed = Loans(trainer, None, borrower(store, spec)).step(own).values
    changed = {"loss", "grad_norm"}
    assert {k: v for k, v in mixed.items() if not k.startswith("borrowed_") and k not in changed} == {
        k: v for k, v in plain.items() if k not in changed
    }
    assert mixed["loss"] != plain["loss"]
    assert (mixed["borrowed_groups"], mixed["borrowed_refused"], mixed["borrowed_reward"]) == (2.0, 0.0, 0.5)
    assert mixed["borrowed_mismatch_kl"] > 0


def test_steps_that_are_made_again_borrow_the_same(tmp_path: Path):
    store, spec = FolderStore(tmp_path), borrowing()
    lent(store, *map(theirs, (1, 2, 3)))
    trainer = GRPOTrainer(random_model(), spec)
    loans = Loans(trainer, None, borrower(store, spec))
    loans.step(batch(0, 4))
    kept = trainer.state()
    losses = [loans.step(batch(i, 4)).values["loss"] for i in (1, 2)]
    resumed = GRPOTrainer(random_model(), spec)
    resumed.restore(kept)
    loans = Loans(resumed, None, borrower(store, spec))
    assert [loans.step(batch(i, 4)).values["loss"] for i in (1, 2)] == losses
    assert all(torch.equal(t, trainer.state().weights[n]) for n, t in resumed.state().weights.items())


def test_a_borrower_lends_only_what_is_its_own_and_no_refusal_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, spec = FolderStore(tmp_path), borrowing()
    lent(store, theirs(1))
    own = theirs(9)[1:2]
    lender = Lender(store, "me", about(spec, TOKENIZER))
    loans = Loans(GRPOTrainer(random_model(), spec), lender, borrower(store, spec))
    assert loans.step(own).values["borrowed_groups"] == 2.0
    loans.end()
    again = Borrower(spec.learner.borrow.model_copy(update={"job": "me"}), spec, store, about(spec, TOKENIZER),
                     lambda index: PROMPT, VOCABULARY)  # fmt: skip
    assert [g.work_item for g in again.groups(0)] == ["borrowed:me:9-1"]

    def full(key: str, data: bytes) -> None:
        raise Unavailable("full")

    monkeypatch.setattr(store, "put", full)
    lender = Lender(store, "me", about(spec, TOKENIZER))
    lender.put(1, own)
    lender.put(2, own)
    with pytest.raises(Unavailable):
        lender.end()


def test_other_ranks_get_proven_and_borrowed_groups_together(tmp_path: Path):
    store = FolderStore(tmp_path)
    lent(store, theirs(1))
    proven = [
        Group(g.work_item, tuple(dataclasses.replace(r, proofs=b"\0\0") for r in g.rollouts)) for g in batch(0, 1)
    ]
    got = unpacked(packed([*proven, *borrower(store).groups(0)]))
    assert [g.borrowed for g in got] == [False, True, True]


@pytest.mark.parametrize("loss", ["obrs", "decoupled"])
def test_losses_that_need_an_age_or_reject_are_refused(loss: str):
    with pytest.raises(ValueError, match=loss):
        borrowing(loss=loss)
