"""Generation that hangs."""

from __future__ import annotations

import pytest

from app.rollout_agent.stalls import Hung, StallWatch, hangs, judge


@pytest.mark.parametrize(
    ("stalled", "usual", "hung"),
    [(0, None, False), (60, None, False), (61, None, True), (61, 2.0, True), (61, 30.0, False), (301, 30.0, True)],
)
def test_the_bound_follows_what_is_usual(stalled: float, usual: float | None, hung: bool) -> None:
    assert hangs(stalled, usual) is hung


def test_what_to_do() -> None:
    assert judge(1000.0, [], healthy=True) == "wait"
    assert judge(1000.0, [], healthy=False) == "restart"
    assert judge(1000.0, [900.0], healthy=False) == "leave"
    assert judge(9000.0, [900.0], healthy=False) == "restart", "longer than an hour ago"
    assert judge(1000.0, [], healthy=None) == "leave", "what can't be restarted can't go on"


class Machine:
    """An engine that can hang."""

    def __init__(self, *, can_restart: bool = True, alive: bool = False) -> None:
        self.now = 0.0
        self.hung_since: float | None = None
        self.alive = alive
        self.restarts = 0
        self.reports: list[str] = []
        self.watch = StallWatch(
            stalled_s=lambda: self.now - self.hung_since if self.hung_since is not None else 0.0,
            usual_s=lambda: 1.0,
            healthy=self.healthy if can_restart else None,
            restart=self.restart if can_restart else None,
            report=self.report,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    async def healthy(self, timeout_s: float) -> bool:
        return self.alive

    async def restart(self) -> None:
        self.restarts += 1
        self.hung_since = None

    async def report(self, words: str) -> None:
        self.reports.append(words)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now == 500.0 or self.now == 1000.0:
            self.hung_since = self.now


async def test_an_engine_that_hangs_is_restarted_once_and_then_the_node_leaves() -> None:
    machine = Machine()
    with pytest.raises(Hung, match="nothing was generated for 65 s"):
        await machine.watch.run()
    assert machine.restarts == 1
    assert len(machine.reports) == 2
    assert machine.now == 1065.0


async def test_an_engine_that_can_t_be_restarted_ends_the_node_at_once() -> None:
    machine = Machine(can_restart=False)
    with pytest.raises(Hung):
        await machine.watch.run()
    assert (machine.now, machine.restarts, len(machine.reports)) == (565.0, 0, 1)


async def test_an_engine_that_answers_is_left_alone() -> None:
    machine = Machine(alive=True)
    machine.hung_since = 0.0
    machine.now = 400.0
    await machine.watch.look()
    assert (machine.restarts, machine.reports) == (0, [])
