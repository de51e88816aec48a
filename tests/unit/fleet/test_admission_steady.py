"""In a steady state next to nothing is dropped: admission tells how much room is left, and no more is handed out."""

from __future__ import annotations

import heapq
import random

import pytest

from app.fleet.admission import grantable


def simulate(*, staleness: int, surplus: float, seed: int, steps: int = 300, prompts: int = 16) -> float:
    """Share of the groups dropped. Nodes of speeds that differ by eight, at `surplus` times what the learner needs.

    A step takes 1; every kappa steps a version is published, that reaches a node some time later. A node takes one
    group at a time, under the version that it has, if admission grants it.
    """
    rng, kappa = random.Random(seed), max(1, staleness - 1)
    speeds = [rng.uniform(0.5, 4.0) for _ in range(12)]
    scale = prompts * surplus / sum(speeds)
    versions, held = [0] * len(speeds), 0
    events: list[tuple[float, int, int, int]] = [(0.0, 0, node, 0) for node in range(len(speeds))]
    buffer: list[int] = []
    t, published, dropped, ready_at = 0, 0, 0, 0.0
    while t < steps:
        now, kind, node, value = heapq.heappop(events)
        if kind == 2:
            versions[node] = max(versions[node], value)
            continue
        if kind == 1:
            held -= 1
            buffer.append(value)
        while len(buffer) >= prompts and ready_at <= now:
            stale = [v for v in buffer if t - v > staleness]
            dropped += len(stale)
            buffer = sorted(v for v in buffer if t - v <= staleness)
            if len(buffer) < prompts:
                break
            del buffer[:prompts]
            t, ready_at = t + 1, now + 1.0
            if t - published >= kappa:
                published = t
                for other in range(len(speeds)):
                    heapq.heappush(events, (now + rng.uniform(0.1, 0.5), 2, other, t))
        ahead = held + len(buffer)
        room = grantable(step=t, version=versions[node], staleness=staleness, prompts=prompts, ahead=ahead)
        if room > 0:
            held += 1
            heapq.heappush(events, (now + 1 / (speeds[node] * scale), 1, node, versions[node]))
        else:
            heapq.heappush(events, (now + 0.05, 0, node, 0))
    return dropped / (dropped + t * prompts)


@pytest.mark.parametrize("staleness", [2, 3, 6, 11])
@pytest.mark.parametrize("surplus", [1.0, 1.5, 3.0])
def test_fewer_than_three_in_a_hundred_are_dropped(staleness: int, surplus: float) -> None:
    assert max(simulate(staleness=staleness, surplus=surplus, seed=s) for s in range(3)) < 0.03


def test_with_one_step_of_room_slow_nodes_lose_up_to_eleven_in_a_hundred() -> None:
    worst = max(simulate(staleness=1, surplus=surplus, seed=s) for surplus in (1.0, 1.5, 3.0) for s in range(3))
    assert round(worst, 2) == 0.11


def test_the_simulation_can_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without admission the same fleet makes rollouts that are too old when their turn comes."""
    monkeypatch.setattr("tests.unit.fleet.test_admission_steady.grantable", lambda **_: 1)
    assert simulate(staleness=3, surplus=3.0, seed=0) > 0.1
