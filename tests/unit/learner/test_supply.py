"""Groups that can't be trained on: told once, and a reason to give up when hardly anything else comes."""

from __future__ import annotations

import pytest

from app.fleet.admission import grantable
from app.learner.buffer import ReplayBuffer
from app.learner.outbox import Directives
from app.learner.supply import Supply
from app.protocol.errors import LearnerError
from app.protocol.learner import Drops, LearnerDirectives
from tests.unit.learner.samples import group


class Bench:
    """What a learner has of S, and what it reports without a step."""

    def __init__(self, staleness: int = 3, at_last_step: int | None = None) -> None:
        self.buffer, self.out = ReplayBuffer(), []
        self.directives = Directives(LearnerDirectives(command="run", staleness_budget=staleness, publish_period=1))
        self.supply = Supply(
            self.buffer, self, self.directives, budget=staleness if at_last_step is None else at_last_step
        )

    def put(self, message: object) -> None:
        self.out.append(message)

    def refuse(self, count: int, name: str = "bad") -> None:
        for number in range(count):
            self.buffer.reject(f"{name}{number}", "invalid")

    def have(self, count: int, version: int = 0) -> None:
        for _ in range(count):
            self.buffer.add(group(f"w{self.buffer._arrived}", version=version))

    def gives_up(self, t: int = 0, published: int = 0, prompts: int = 2, **metrics: float) -> str:
        """Why, or nothing."""
        try:
            self.supply.check(t, published, prompts, lambda: metrics)
        except LearnerError as error:
            return error.detail
        return ""


@pytest.mark.parametrize(
    ("staleness", "t", "published", "prompts", "refused", "gives_up"),
    [
        (3, 0, 0, 2, 8, False),
        (3, 0, 0, 2, 9, True),
        (1, 0, 0, 1, 2, False),
        (1, 0, 0, 1, 3, True),
        (3, 2, 1, 2, 6, False),  # a version behind the step: one batch less may be ahead
        (3, 2, 1, 2, 7, True),
        (5, 0, 0, 3, 18, False),
        (5, 0, 0, 3, 19, True),
        (1, 2, 1, 2, 2, False),  # the batch of this step alone
        (1, 2, 1, 2, 3, True),
        (1, 3, 1, 2, 99, False),  # nothing may be ahead before the next version is out
    ],
)
def test_it_gives_up_when_more_were_refused_than_admission_lets_be_ahead(
    staleness: int, t: int, published: int, prompts: int, refused: int, gives_up: bool
):
    bench = Bench(staleness)
    bench.refuse(refused)
    assert bool(bench.gives_up(t, published, prompts)) is gives_up
    ahead = grantable(step=t, version=published, staleness=staleness, prompts=prompts, ahead=0)
    assert gives_up is (0 < ahead < refused)


@pytest.mark.parametrize(("refused", "usable", "gives_up"), [(10, 1, False), (11, 1, True), (20, 2, False)])
def test_as_long_as_one_in_ten_can_be_trained_on_it_goes_on(refused: int, usable: int, gives_up: bool):
    bench = Bench()
    bench.refuse(refused)
    bench.have(usable)
    assert bool(bench.gives_up()) is gives_up


def test_refused_groups_count_whether_they_were_told_or_not_until_a_step_has_reported_them():
    bench = Bench()
    bench.refuse(3, "told")
    bench.supply.tell(0)
    bench.refuse(4, "evicted")
    bench.supply.evict(0)
    bench.refuse(1, "waiting")
    assert bench.gives_up() == ""
    bench.refuse(1, "last")
    assert bench.gives_up().startswith("9 groups since step 0")
    bench.supply.reported(3)
    bench.buffer.evict(0, 3)
    bench.refuse(8, "later")
    assert bench.gives_up() == ""
    assert (bench.supply.dropped, bench.supply.told) == ([], [])


def test_the_reason_names_what_was_refused_and_nothing_else():
    bench = Bench()
    bench.refuse(9)
    said = bench.gives_up(invalid_prompt=5.0, audits_failed=2.0, audits_suspect=1.0, audits_passed=9.0, loss=0.5)
    assert "(5 × invalid_prompt, 2 × audits_failed, 1 × audits_suspect)" in said
    assert "(stale)" in bench.gives_up(audits_passed=9.0)


@pytest.mark.parametrize(("before", "gives_up"), [(3, True), (6, False)])
def test_what_a_lower_s_makes_stale_is_no_fault(before: int, gives_up: bool):
    bench = Bench(3, at_last_step=before)
    bench.have(13)
    bench.supply.tell(4)
    assert len(bench.supply.told) == 13
    assert bool(bench.gives_up(4, published=4)) is gives_up
    bench.supply.reported(3)
    bench.have(13)
    bench.supply.tell(4)
    assert bench.gives_up(4, published=4), "S has not moved since the last step"


def test_without_a_step_each_is_told_once_with_where_the_learner_is():
    bench = Bench()
    bench.have(2)
    bench.supply.tell(3)
    assert bench.out == [], "there is nothing to tell"
    bench.supply.tell(4)
    bench.supply.tell(4)
    (report,) = bench.out
    assert isinstance(report, Drops)
    assert report.step == 4
    assert [(d.work_item, d.reason, d.lag) for d in report.dropped] == [("w0", "stale", 4), ("w1", "stale", 4)]
    assert (bench.supply.dropped, bench.supply.told) == ([], report.dropped)


def test_what_is_dropped_for_a_step_waits_for_its_report():
    bench = Bench()
    bench.have(1)
    bench.supply.evict(4)
    assert [d.work_item for d in bench.supply.dropped] == ["w0"]
    assert (bench.supply.told, bench.out) == ([], [])
