"""What an owner may make of S while a job runs."""

from __future__ import annotations

from typing import Any

import pytest

from app.fleet.staleness import bound, change
from app.protocol.errors import BadInput
from app.storage.models import Job


def job(staleness: int, period: int | None = None, most: int | None = None, *, adaptive: bool = True) -> Job:
    """At this S and κ; `most`: the owner's bound, where S is given as one."""
    spec: dict[str, Any] = {"staleness_budget": staleness, "publish_period": period, "name": "j"}
    if most is not None:
        spec["staleness"] = {"max": most, "adaptive": adaptive}
    return Job(spec=spec, staleness_budget=staleness, publish_period=period or max(1, staleness - 1))


@pytest.mark.parametrize(("staleness", "kappa"), [(1, 1), (2, 1), (5, 4)])
def test_the_publish_period_follows_where_nobody_fixed_it(staleness: int, kappa: int) -> None:
    changed = job(3)
    change(changed, staleness)
    assert (changed.staleness_budget, changed.publish_period, bound(changed)) == (staleness, kappa, None)


@pytest.mark.parametrize(("fixed", "staleness", "fits"), [(3, 3, False), (3, 4, True), (1, 1, True), (2, 1, False)])
def test_a_fixed_publish_period_stays_and_must_fit(fixed: int, staleness: int, fits: bool) -> None:
    changed = job(6, fixed)
    if fits:
        change(changed, staleness)
        assert (changed.staleness_budget, changed.publish_period) == (staleness, fixed)
        return
    with pytest.raises(BadInput, match=f"must be at least {fixed + 1} while publish_period is {fixed}") as caught:
        change(changed, staleness)
    assert [e.pointer for e in caught.value.errors] == ["/staleness_budget"]
    assert changed.staleness_budget == 6, "nothing has changed"


@pytest.mark.parametrize(("most", "now", "kappa"), [(8, 3, 2), (2, 2, 1)])
def test_of_an_adaptive_s_the_owner_moves_the_bound(most: int, now: int, kappa: int) -> None:
    changed = job(3, most=6)
    change(changed, most)
    assert (changed.staleness_budget, changed.publish_period, bound(changed)) == (now, kappa, most)
    assert changed.spec["staleness_budget"] == most
    assert changed.spec["name"] == "j", "all else stays"


def test_an_s_that_is_given_as_a_bound_but_is_not_adaptive_is_changed_at_once() -> None:
    changed = job(3, most=3, adaptive=False)
    assert bound(changed) is None
    change(changed, 5)
    assert (changed.staleness_budget, changed.publish_period) == (5, 4)
    assert changed.spec["staleness"] == {"max": 5, "adaptive": False}
