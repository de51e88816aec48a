"""Nothing that admission lets out is stale when its turn comes, and nothing is held back in vain."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.fleet.admission import consumed, grantable, item_seed, lease_deadline, prompt_at, share, unmeasured


@pytest.mark.parametrize(
    ("step", "version", "staleness", "ahead", "count"),
    [
        (0, 0, 1, 0, 16),
        (0, 0, 3, 0, 32),
        (0, 0, 3, 31, 1),
        (0, 0, 3, 32, 0),
        (0, 0, 3, 40, 0),
        (3, 0, 3, 0, 8),  # lag 3 = S is the last step that may use it
        (3, 0, 3, 7, 1),
        (3, 0, 3, 8, 0),
        (4, 0, 3, 0, 0),
        (9, 0, 3, 0, 0),
        (4, 4, 3, 0, 32),
    ],
)
def test_grantable(step: int, version: int, staleness: int, ahead: int, count: int) -> None:
    assert grantable(step=step, version=version, staleness=staleness, prompts=8, ahead=ahead) == count


class Pool:
    """Nodes that install versions and answer after random delays, and a learner that consumes in order."""

    def __init__(self, rng: random.Random, staleness: int, kappa: int, prompts: int, nodes: int) -> None:
        self.rng, self.staleness, self.kappa, self.prompts = rng, staleness, kappa, prompts
        self.step = 0
        self.published = 0
        self.versions = [0] * nodes
        self.queue: list[tuple[int, int]] = []
        """Version and moment of arrival, in the order of admission."""
        self.lags: list[int] = []

    def grant(self, node: int, now: int, want: int) -> None:
        count = grantable(
            step=self.step,
            version=self.versions[node],
            staleness=self.staleness,
            prompts=self.prompts,
            ahead=len(self.queue),
        )
        for _ in range(min(want, count)):
            self.queue.append((self.versions[node], now + self.rng.randint(0, 30)))

    def train(self, now: int, oldest_first: bool) -> None:
        first = self.queue[: self.prompts] if not oldest_first else sorted(self.queue)[: self.prompts]
        if len(first) < self.prompts or any(arrival > now for _, arrival in first):
            return
        self.lags += [self.step - version for version, _ in first]
        for group in first:
            self.queue.remove(group)
        self.step += 1
        if self.step % self.kappa == 0:
            self.published = self.step


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(1, 6),
    prompts=st.integers(1, 5),
    nodes=st.integers(1, 5),
    oldest_first=st.booleans(),
    data=st.data(),
)
def test_nothing_admitted_is_ever_stale(
    seed: int, staleness: int, prompts: int, nodes: int, oldest_first: bool, data: st.DataObject
) -> None:
    """Consumed in the order of admission, or, as the replay buffer does, the oldest version first."""
    kappa = data.draw(st.integers(1, max(1, staleness - 1)))
    pool = Pool(random.Random(seed), staleness, kappa, prompts, nodes)
    for now in range(400):
        for node in range(nodes):
            if pool.rng.random() < 0.5:
                pool.grant(node, now, pool.rng.randint(1, 2 * prompts))
            # Nodes install what is published sooner or later, never an older version.
            if pool.rng.random() < 0.2:
                pool.versions[node] = pool.rng.randint(pool.versions[node], pool.published)
        pool.train(now, oldest_first)
    assert pool.lags, "the learner is never starved by admission"
    assert max(pool.lags) <= staleness


@given(
    step=st.integers(0, 50),
    back=st.integers(0, 8),
    staleness=st.integers(1, 8),
    prompts=st.integers(1, 20),
    ahead=st.integers(0, 200),
)
def test_the_bound_is_tight(step: int, back: int, staleness: int, prompts: int, ahead: int) -> None:
    version = max(0, step - back)
    count = grantable(step=step, version=version, staleness=staleness, prompts=prompts, ahead=ahead)

    def lag(position: int) -> int:
        return step + position // prompts - version

    if count:
        assert lag(ahead + count - 1) <= staleness, "the last one let out is in time"
    assert lag(ahead + count) > staleness, "one more would be too late"


@given(seed=st.integers(0, 2**63 - 1), size=st.integers(1, 60), epochs=st.integers(1, 4))
def test_every_prompt_once_an_epoch(seed: int, size: int, epochs: int) -> None:
    for epoch in range(epochs):
        order = [prompt_at(seed, epoch * size + i, size) for i in range(size)]
        assert sorted(order) == list(range(size))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [prompt_at(seed, epoch * 50 + i, 50) for i in range(50)]

    first = order(7, 0)
    for other in range(30):  # pushes the first out of any cache
        order(other, other)
    np.random.seed(1)
    assert order(7, 0) == first
    assert order(7, 0) != order(7, 1)
    assert order(7, 0) != order(8, 0)
    backwards = [prompt_at(7, i, 50) for i in reversed(range(50))]
    assert backwards[::-1] == first


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63 - 1))
def test_item_seeds_are_distinct_and_fit_63_bits(seed: int) -> None:
    seeds = [item_seed(seed, ordinal) for ordinal in range(500)]
    assert len(set(seeds)) == 500
    assert all(0 <= s < 2**63 for s in seeds)
    assert seeds == [item_seed(seed, ordinal) for ordinal in range(500)]
    assert not set(seeds) & {item_seed(seed ^ 1, ordinal) for ordinal in range(500)}


@pytest.mark.parametrize(
    ("t_train", "items", "rate", "seconds"),
    [
        (None, 1, None, 20.0),
        (None, 4, None, 80.0),
        (None, 4, 1.0, 40.0),
        (30.0, 4, 1.0, 120.0),
        (None, 1, 1e9, 20.0),
        (1e9, 1, 1.0, 1800.0),
        (None, 10, 1e-9, 1800.0),
        (None, 4, 0.0, 80.0),
    ],
)
def test_lease_deadline(t_train: float | None, items: int, rate: float | None, seconds: float) -> None:
    assert lease_deadline(t_train=t_train, prompts=8, items=items, node_rate_groups_s=rate) == seconds


@given(
    t_train=st.none() | st.floats(0, 1e5),
    rate=st.none() | st.floats(0, 1e6),
    group=st.integers(2, 64),
    prompts=st.integers(1, 1000),
)
def test_a_nodes_share_is_at_least_one_group_and_at_most_a_batch(
    t_train: float | None, rate: float | None, group: int, prompts: int
) -> None:
    assert 1 <= share(t_train=t_train, group_size=group, prompts=prompts, node_rate=rate) <= prompts


@pytest.mark.parametrize(
    ("t_train", "rate", "groups"),
    [
        (10.0, 32.0, 14),  # what it makes in 0.35 of ten seconds, 112 rollouts in groups of 8
        (10.0, 1.0, 8),  # an eighth of a batch, so that asking is worth it
        (10.0, None, 8),
        (None, 32.0, 8),
        (10.0, 1e6, 64),  # no more than a batch
    ],
)
def test_one_node_leases_what_it_makes_in_a_third_of_a_step(
    t_train: float | None, rate: float | None, groups: int
) -> None:
    assert share(t_train=t_train, group_size=8, prompts=64, node_rate=rate) == groups
    assert share(t_train=None, group_size=8, prompts=4, node_rate=None) == 1


@pytest.mark.parametrize(
    ("recent", "most", "want"),
    [
        ([], 8, 4),
        ([8, 8], 8, 4),  # too little is known
        ([8, 7, 6], 8, 6),  # every one of them consumed at least six
        ([8, 4, 8], 8, 4),  # one did without a refill
        ([8, 2, 8], 8, 4),  # one went on with what came
        ([9, 9, 9], 8, 8),
        ([9, 9, 9], 4, 4),  # no refill wanted
    ],
)
def test_a_step_is_expected_to_consume_what_all_of_the_newest_did(recent: list[int], most: int, want: int) -> None:
    assert consumed(recent, prompts=4, most=most) == want


@pytest.mark.parametrize(
    ("prior", "prompts", "t_train", "staleness", "held", "more"),
    [
        (1000.0, 32, 1.0, 3, 0, 8),  # a quarter of a batch, however fast it should be
        (1000.0, 32, 1.0, 3, 5, 3),
        (1000.0, 32, 1.0, 3, 8, 0),
        (1000.0, 32, 1.0, 3, 99, 0),
        (1000.0, 32, 1.0, 3, 7.5, 0),  # a part of a group has no room
        (1.0, 64, 1.0, 3, 0, 2),  # its prior makes 20 rollouts in the 20 s of a lease: two groups of 8
        (1.0, 64, 20.0, 3, 0, 10),  # of a long step a lease has 80 s
        (1e-6, 64, 1.0, 3, 0, 1),  # one, or it would never be measured
        (0.0, 64, 1.0, 3, 0, 1),
        (1000.0, 2, None, 3, 0, 2),  # two groups even of small batches
        (1000.0, 1, None, 1, 0, 1),  # half of what admission lets be ahead
        (1000.0, 1, None, 2, 0, 1),
        (1000.0, 1, None, 3, 0, 2),
    ],
)
def test_what_a_node_may_hold_whose_speed_nobody_knows(
    prior: float, prompts: int, t_train: float | None, staleness: int, held: float, more: int
) -> None:
    assert more == unmeasured(
        prior=prior, group_size=8, prompts=prompts, t_train=t_train, staleness=staleness, held=held
    )


@given(
    prior=st.floats(0, 1e6),
    group_size=st.integers(1, 64),
    prompts=st.integers(1, 256),
    t_train=st.none() | st.floats(0.01, 1000),
    staleness=st.integers(1, 8),
)
def test_a_node_of_unknown_speed_gets_something_and_leaves_others_most(
    prior: float, group_size: int, prompts: int, t_train: float | None, staleness: int
) -> None:
    first = unmeasured(
        prior=prior, group_size=group_size, prompts=prompts, t_train=t_train, staleness=staleness, held=0
    )
    assert 1 <= first <= max(2, -(-prompts // 4))
    assert first <= max(1, grantable(step=0, version=0, staleness=staleness, prompts=prompts, ahead=0) // 2)
    after = unmeasured(
        prior=prior, group_size=group_size, prompts=prompts, t_train=t_train, staleness=staleness, held=first
    )
    assert after == 0
