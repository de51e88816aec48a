"""The lags of a staleness study: which version a step's batch is sampled from.

Invariant: a lag never exceeds the S that holds at that step.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.learner.adaptive import Adaptive
from app.protocol.job import JobSpec, period
from app.protocol.learner import LearnerDirectives


def behaviour_version(schedule: str, staleness: int, t: int) -> int:
    """The version that the batch of step t is sampled from."""
    if schedule == "const":
        return max(0, t - staleness)
    period = max(1, staleness - 1)
    return max(0, (t - 2) // period * period, t - staleness)


class Timetable:
    """From which version each step's batch is sampled, and how S moves meanwhile."""

    def __init__(self, schedule: str, spec: JobSpec, start: int | None = None) -> None:
        """`start`: the S that an adaptive one begins with; default: the job's."""
        self._schedule = schedule
        self._bound = spec.staleness_budget
        self._controller = Adaptive(spec)
        self._published = [0]
        self.staleness = [spec.first_staleness if start is None else min(start, self._bound)]
        """S of each step."""
        self._period = period(self.staleness[0], spec.publish_period)

    def version(self, t: int) -> int:
        """The version that the batch of step t is sampled from. To be asked for every step, in order."""
        if self._schedule != "adaptive":
            return behaviour_version(self._schedule, self._bound, t)
        if t - self._published[-1] >= self._period:
            self._published.append(t)
        in_use = max(v for v in self._published if v <= max(0, t - 2))
        return max(in_use, t - self.staleness[-1], 0)

    def after(self, values: Mapping[str, float], lag: int) -> None:
        """A step was made, from rollouts of this lag."""
        now = LearnerDirectives(command="run", staleness_budget=self.staleness[-1], publish_period=self._period)
        move = self._controller.after(values, {lag: 1}, now)
        self.staleness.append(move.staleness_budget if move else self.staleness[-1])
        self._period = move.publish_period if move else self._period
