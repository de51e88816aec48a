"""A control service and a snapshot sink in memory."""

from __future__ import annotations

import threading

from app.learner.client import Fenced
from app.learner.publisher import Announcement, Uploaded
from app.protocol.errors import EchoError
from app.protocol.learner import Drops, EvalReport, LearnerDirectives, Published, StepReport


class FakeControl:
    """Records reports; `gate` closed holds every answer back, `error` is raised instead of an answer."""

    def __init__(self) -> None:
        self.word = LearnerDirectives(command="run", staleness_budget=3, publish_period=2)
        self.log: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.dropped = threading.Event()
        """Set once drops were told."""
        self.error: EchoError | None = None
        self.beats = 0

    def _take(self, message: object) -> LearnerDirectives:
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.log.append(message)
        return self.word

    def step(self, body: StepReport) -> LearnerDirectives:
        return self._take(body)

    def evaluation(self, body: EvalReport) -> LearnerDirectives:
        return self._take(body)

    def published(self, body: Published) -> LearnerDirectives:
        return self._take(body)

    def drops(self, body: Drops) -> LearnerDirectives:
        answer = self._take(body)
        self.dropped.set()
        return answer

    def heartbeat(self, body: object) -> LearnerDirectives:
        self.beats += 1
        if self.error is not None:
            raise self.error
        return self.word

    @property
    def steps(self) -> list[StepReport]:
        return [m for m in self.log if isinstance(m, StepReport)]

    @property
    def evals(self) -> list[EvalReport]:
        return [m for m in self.log if isinstance(m, EvalReport)]

    @property
    def drop_reports(self) -> list[Drops]:
        return [m for m in self.log if isinstance(m, Drops)]

    @property
    def versions(self) -> list[tuple[int, bool]]:
        return [(m.version, m.stored) for m in self.log if isinstance(m, Published)]


class FakeSink:
    """Remembers what it was given; `gate` closed makes publishing slow."""

    uploaded = 0

    def __init__(self) -> None:
        self.published: list[int] = []
        self.weights: dict[int, dict] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.upload_error: EchoError | None = None

    def publish(self, version, weights) -> Announcement:
        self.entered.set()
        assert self.gate.wait(30)
        self.published.append(version)
        self.weights[version] = dict(weights)
        return Announcement(version=version, bytes=10, chunks=1, relay_url="http://127.0.0.1:1")

    def upload(self, version: int) -> Uploaded:
        if self.upload_error is not None:
            raise self.upload_error
        return "full"


FENCED = Fenced("another learner has taken over")
