"""Two ranks make of their shares what one makes of the whole step, and hear the same of it."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from app.learner.laps import Laps
from app.learner.metrics import Seen
from app.learner.microbatch import Row
from app.learner.parallel.ranks import ALONE, Alone, Ranks
from app.learner.passes import Passes
from app.learner.reference import frozen_copy
from tests.unit.learner.samples import job, random_model
from tests.unit.learner.test_trainer import near_policy

WAIT_S = 20.0


class Pair(Alone):
    """One of two ranks that are threads of this process."""

    size = 2

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[object]) -> None:
        self.rank = rank
        self._meeting = meeting
        self._table = table

    def _together(self, mine: object) -> list:
        self._table[self.rank] = mine
        self._meeting.wait()
        found = list(self._table)
        self._meeting.wait()
        return found

    def total(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._together(values), strict=True)]

    def joined(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._together(tensor))


def rows_of(number: int, prompts: int = 3) -> list[Row]:
    """Rows whose recorded log-probs are near the model's, of two lags, with advantages of both signs."""
    rollouts = [r for g in near_policy(number, prompts) for r in g.rollouts]
    return [
        Row(r.prompt_ids, r.completion_ids, r.logprobs, (-1.0) ** i * (1 + i % 3), [i % 2] * len(r.completion_ids))
        for i, r in enumerate(rollouts)
    ]


@dataclass
class Rank:
    """What a rank hears of a step, its part of the gradient, the order of rows, and how often it passed forward."""

    seen: Seen
    gradient: dict[str, torch.Tensor]
    order: list[int]
    passes: int


class Course:
    """One rank's model, and what it makes of some rows. Made by one thread: a random model takes the global state."""

    def __init__(self, ranks: Ranks, learner: dict) -> None:
        self._model, spec = random_model(), job(learner={"micro_batch_tokens": 40, **learner})
        reference = frozen_copy(random_model(seed=3)) if spec.learner.kl_beta else None
        self._passes: list[object] = []
        self._model.register_forward_pre_hook(lambda *given: self._passes.append(given[0]))
        self._runner = Passes(self._model, reference, spec, ranks, Laps(lambda: 0.0, lambda before, after: 0.0))

    def run(self, rows: Sequence[Row], step: int = 4) -> Rank:
        seen = self._runner.run(self._runner.plan(rows), 100, step)
        gradients = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None}
        return Rank(seen, gradients, self._runner.order(rows), len(self._passes))


def pair(rows: Sequence[Row], learner: dict) -> list[Rank]:
    """The same with two ranks."""
    meeting, table = threading.Barrier(2, timeout=WAIT_S), [None, None]
    courses = [Course(Pair(rank, meeting, table), learner) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return [f.result() for f in [pool.submit(course.run, rows) for course in courses]]


def by_row(values: torch.Tensor, rows: Sequence[Row], order: Sequence[int]) -> dict[int, list[float]]:
    """What belongs to the tokens of each row."""
    parts = torch.split(values.double(), [rows[i].own_tokens for i in order])
    return {i: part.tolist() for i, part in zip(order, parts, strict=True)}


@pytest.mark.parametrize("count", [12, 1, 0], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize(
    "learner",
    [
        {"loss": "ppo_clip"},
        {"loss": "m2po", "m2_budget": 0.02},
        {"loss": "m2po_clip", "m2_budget": 0.001},
        {"loss": "bapo", "packing": True},
        {"loss": "tis", "kl_beta": 0.5},
        {"loss": "obrs"},
    ],
    ids=lambda fields: fields["loss"],
)
def test_two_ranks_make_the_step_that_one_makes(learner: dict, count: int):
    rows = rows_of(1)[:count]
    whole, both = Course(ALONE, learner).run(rows), pair(rows, learner)
    assert sorted(whole.order) == list(range(count))
    for one in both:
        assert one.seen.loss == pytest.approx(whole.seen.loss, abs=1e-6)
        assert (one.seen.reference_kl is None) == (whole.seen.reference_kl is None)
        assert (one.seen.reference_kl or 0.0) == pytest.approx(whole.seen.reference_kl or 0.0, rel=1e-5)
        assert sorted(one.order) == list(range(count))
        for name in ("log_ratio", "lag", "high", "low"):
            found, wanted = (by_row(getattr(r.seen, name), rows, r.order) for r in (one, whole))
            assert found == {i: pytest.approx(v, abs=1e-5) for i, v in wanted.items()}
    assert both[0].passes == both[1].passes, "a pass is something that all ranks do"
    assert both[0].gradient.keys() == both[1].gradient.keys() == whole.gradient.keys()
    # What shards do: the mean over the ranks.
    for name, wanted in whole.gradient.items():
        mean = (both[0].gradient[name] + both[1].gradient[name]) / 2
        torch.testing.assert_close(mean, wanted, atol=1e-5, rtol=1e-4)
    if count == 12 and learner["loss"] in ("m2po", "m2po_clip", "bapo"):
        assert (whole.seen.high | whole.seen.low).any(), "what is known of the whole step holds some tokens back"


def test_the_pull_to_v0_is_told_as_a_sum_and_only_where_there_is_one():
    rows = rows_of(1)
    pulled, free = (Course(ALONE, {"loss": "tis", "kl_beta": beta}).run(rows).seen for beta in (0.5, 0.0))
    assert pulled.reference_kl is not None
    assert pulled.reference_kl > 0.1
    assert free.reference_kl is None
    assert pulled.loss - free.loss == pytest.approx(0.5 * pulled.reference_kl / 100, rel=1e-4)


@pytest.mark.parametrize(("moved", "side"), [(3.0, "high"), (-3.0, "low")])
def test_of_each_token_it_is_told_how_far_and_to_which_side_it_has_moved(moved: float, side: str):
    near = rows_of(1)
    rows = [dataclasses.replace(r, logprobs=[p - moved for p in r.logprobs]) for r in near]
    seen = Course(ALONE, {"loss": "icepop"}).run(rows).seen
    assert (bool(seen.high.all()), bool(seen.high.any())) == (side == "high", side == "high")
    assert (bool(seen.low.all()), bool(seen.low.any())) == (side == "low", side == "low")
    assert torch.sign(seen.log_ratio).tolist() == [math.copysign(1.0, moved)] * len(seen.log_ratio)
    assert sorted(seen.lag.tolist()) == sorted(lag for r in rows for lag in r.lags)


def test_draws_of_another_step_are_others():
    """A loss that rejects at random must not reject the same tokens of a group that comes again."""
    rows = [dataclasses.replace(r, logprobs=[p + 1.0 for p in r.logprobs]) for r in rows_of(2)]
    course = Course(ALONE, {"loss": "obrs"})
    one, two, again = (course.run(rows, step).seen.low.tolist() for step in (4, 5, 4))
    assert one == again
    assert one != two


class Slow(tuple):
    """Tokens that take a hundred seconds to be put into a tensor."""

    clock: list[float]

    def __array__(self, dtype=None, copy=None):
        self.clock[0] += 100.0
        return np.array(tuple(self), dtype=dtype)


@pytest.mark.parametrize(("loss", "forwards"), [("tis", 1), ("m2po", 2)])
def test_seconds_are_told_by_what_they_went_into(loss: str, forwards: int):
    """A pass forward takes a second, one backward ten; what knows the step before passes forward once more."""
    clock, model = [0.0], random_model()

    def spend(seconds: float) -> None:
        clock[0] += seconds

    model.register_forward_pre_hook(lambda *_: spend(1.0))
    model.model.norm.weight.register_hook(lambda _: spend(10.0))
    laps = Laps(lambda: clock[0], lambda before, after: after - before)
    runner = Passes(model, None, job(learner={"micro_batch_tokens": 1, "loss": loss}), ALONE, laps)
    rows = rows_of(1)[:3]
    for row in rows:
        slow = Slow(row.completion_ids)
        slow.clock = clock
        object.__setattr__(row, "completion_ids", slow)
    laps.start()
    runner.run(runner.plan(rows), 100, 4)
    assert laps.metrics() == {"t_data": 300.0 * forwards, "t_forward": 3.0 * forwards, "t_backward": 30.0}
