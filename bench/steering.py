"""What steering saves: the loop in simulated time, held at Eq. 2's target and held at what is measured.

Learner, nodes and market are played; what is decided is decided by the service's own functions: `capacity.plan`,
`steering.steer`, `activation.decide`, `admission.grantable` and `share`. A node works off one lease after the other,
under the version that it has; a version reaches all of them T_bcast after its publish. Machines start two minutes after
they are rented and live until they are given back. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.fleet import activation, admission, capacity, steering

START_UP_S = 120.0
TICK_S = 15.0
HORIZON = 150
"""Steps of a run."""
WARM = 50
"""Steps that are left out of the figures."""


@dataclass(frozen=True, slots=True)
class Case:
    """One job: seconds, rollouts, versions."""

    name: str
    t_train: float
    t_bcast: float
    prompts: int
    group_size: int
    staleness: int
    gamma: float = 1.1

    @property
    def kappa(self) -> int:
        """The publish period at first."""
        return max(1, self.staleness - 1)

    @property
    def rollouts(self) -> int:
        """R."""
        return self.prompts * self.group_size


CASES = (
    Case("the paper's, S=3", 1631.2, 1437.0, 128, 16, 3),
    Case("the paper's, S=6", 1649.3, 1437.0, 128, 16, 6),
    Case("deltas, S=3", 300.0, 20.0, 128, 16, 3),
    Case("slow links, S=4", 100.0, 270.0, 64, 8, 4),
    Case("near the limit, S=3", 100.0, 195.0, 64, 8, 3),
    Case("a tight period, S=3", 130.0, 52.0, 32, 8, 3),
)


@dataclass(slots=True)
class Node:
    """A machine: rollouts per second, dollars per hour (micro-dollars), when it works."""

    key: str
    mu: float
    price: int
    ready_at: float
    version: int = 0
    busy: bool = False
    leaving: bool = False


@dataclass(slots=True)
class Run:
    """State of one simulated job."""

    case: Case
    steer: bool
    rng: random.Random
    now: float = 0.0
    step: int = 0
    published: int = 0
    version: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    stock: list[int] = field(default_factory=list)
    """Versions of the groups that are there."""
    leased: int = 0
    queue: list[tuple[float, int, str, tuple[float, ...]]] = field(default_factory=list)
    training: bool = False
    waiting_since: float = 0.0
    history: list[steering.Seen] = field(default_factory=list)
    aim: tuple[float | None, int, bool] = (None, 0, False)
    kappa: int = 1
    dropped: int = 0
    spent: float = 0.0
    order: itertools.count[int] = field(default_factory=itertools.count)
    offers: int = 0

    def at(self, delay: float, kind: str, *data: float) -> None:
        """Something happens later."""
        heapq.heappush(self.queue, (self.now + delay, next(self.order), kind, data))

    def pool(self) -> float:
        """Rollouts per second of the machines that work."""
        return sum(n.mu for n in self.nodes.values() if n.ready_at <= self.now and not n.leaving)


def control(run: Run) -> None:
    """One tick: how much, and which machines."""
    case = run.case
    need = capacity.plan(
        rollouts=case.rollouts, kappa=run.kappa, staleness=case.staleness, gamma=case.gamma, t_train=case.t_train,
        t_bcast=case.t_bcast,
    )  # fmt: skip
    aim = steering.steer(
        run.aim, eq2=need.mu_target, rollouts=case.rollouts, gamma=case.gamma, t_train=case.t_train, kappa=run.kappa,
        allowed=steering.periods(case.kappa, fixed=not run.steer, t_train=case.t_train, t_bcast=case.t_bcast),
        steps=run.history[-steering.LONGEST_WINDOW :], bound=0.05 if run.steer else 0.0,
    )  # fmt: skip
    run.aim, run.kappa = (aim.factor, aim.since_step, aim.near), aim.kappa
    unit = case.rollouts / case.t_train / 12
    running = [
        activation.Running(
            activation.Candidate(n.key, n.key, n.price, n.mu), n.ready_at <= run.now, run.now - n.ready_at + START_UP_S
        )
        for n in run.nodes.values()
        if not n.leaving
    ]
    run.offers += 40
    offers = [
        activation.Candidate(f"o{run.offers + i}", f"o{run.offers + i}", run.rng.randint(250_000, 500_000),
                             unit * run.rng.uniform(0.7, 1.6))
        for i in range(40)
    ]  # fmt: skip
    policy = activation.Policy(rent_below=1 / case.gamma, min_life_s=1800.0)
    decision = activation.decide(running, offers, aim.target, 200, policy)
    for offer in decision.rent:
        run.nodes[offer.key] = Node(offer.key, offer.mu, offer.price, run.now + START_UP_S, run.version)
        run.at(START_UP_S, "work")
    for key, _ in [*decision.release, *decision.retire]:
        run.nodes[key].leaving = True


def lease(run: Run) -> None:
    """Idle nodes take what admission lets out."""
    case = run.case
    for node in list(run.nodes.values()):
        if node.leaving and not node.busy:
            del run.nodes[node.key]
        if node.busy or node.leaving or node.ready_at > run.now:
            continue
        free = admission.grantable(
            step=run.step, version=node.version, staleness=case.staleness, prompts=case.prompts,
            # What is being trained on counts until its step is reported.
            ahead=len(run.stock) + run.leased + (case.prompts if run.training else 0),
        )  # fmt: skip
        most = admission.share(
            t_train=case.t_train, group_size=case.group_size, prompts=case.prompts, node_rate=node.mu
        )
        count = min(free, most)
        if count:
            node.busy, run.leased = True, run.leased + count
            run.at(count * case.group_size / node.mu, f"made {node.key}", float(count), float(node.version))


def train(run: Run) -> None:
    """Begin a step if there is a batch."""
    case = run.case
    fresh = [v for v in run.stock if run.step - v <= case.staleness]
    run.dropped += len(run.stock) - len(fresh)
    run.stock = sorted(fresh)
    if run.training or len(run.stock) < case.prompts:
        return
    del run.stock[: case.prompts]
    run.training = True
    idle = run.now - run.waiting_since
    run.history.append(
        steering.Seen(run.step + 1, case.t_train, idle, case.rollouts, run.dropped * case.group_size, run.pool())
    )
    run.dropped = 0
    run.at(case.t_train, "trained")


def simulate(case: Case, *, steer: bool, seed: int) -> dict[str, float]:
    """One run; what it came to after the warm-up."""
    run = Run(case, steer, random.Random(seed), kappa=case.kappa)
    run.at(0.0, "tick")
    began = spent = 0.0
    while run.step < HORIZON:
        time, _, kind, data = heapq.heappop(run.queue)
        run.spent += sum(n.price for n in run.nodes.values()) / 1e6 * (time - run.now) / 3600
        run.now = time
        if kind == "tick":
            control(run)
            run.at(max(TICK_S, case.t_train / 20), "tick")
        elif kind.startswith("made "):
            node = run.nodes[kind.removeprefix("made ")]
            node.busy, run.leased = False, run.leased - int(data[0])
            run.stock += [int(data[1])] * int(data[0])
        elif kind == "trained":
            run.training, run.step, run.waiting_since = False, run.step + 1, run.now
            if run.step - run.published >= run.kappa:
                run.published = run.step
                run.at(case.t_bcast, "arrived", float(run.step))
            if run.step == WARM:
                began, spent = run.now, run.spent
        elif kind == "arrived":
            for node in run.nodes.values():
                node.version = max(node.version, int(data[0]))
            run.version = int(data[0])
        train(run)
        lease(run)
    window = run.history[WARM:]
    bubble, dropped, pool = steering.measured(window)
    return {
        "bubble": bubble, "dropped": dropped, "pool_over_consumption": pool / (case.rollouts / case.t_train),
        "kappa": float(run.kappa), "usd_per_step": (run.spent - spent) / (HORIZON - WARM),
        "hours": (run.now - began) / 3600,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m bench.steering`."""
    parser = argparse.ArgumentParser(prog="bench.steering", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(argv)
    rows = []
    print(f"{'job':<22}{'held at':<12}{'bubble':>8}{'dropped':>9}{'Σμ/(R/T)':>10}{'$/step':>9}{'κ':>5}")
    for case in CASES:
        for steer in (False, True):
            runs = [simulate(case, steer=steer, seed=seed) for seed in range(options.seeds)]
            mean = {key: sum(r[key] for r in runs) / len(runs) for key in runs[0]}
            name = "measurement" if steer else "Eq. 2"
            rows.append({"case": case.name, "held_at": name, **{k: round(v, 4) for k, v in mean.items()}})
            print(
                f"{case.name:<22}{name:<12}{mean['bubble']:>8.2%}{mean['dropped']:>9.2%}"
                f"{mean['pool_over_consumption']:>10.2f}{mean['usd_per_step']:>9.4f}{mean['kappa']:>5.1f}",
                flush=True,
            )
    print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
