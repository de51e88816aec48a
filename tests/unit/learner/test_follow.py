"""What a rank other than 0 does, to the end of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.learner.config import LearnerSettings
from app.learner.parallel.follow import follow
from app.learner.parallel.messages import Loading
from app.learner.parallel.ranks import Alone, Command
from app.protocol.errors import Unavailable
from app.protocol.job import JobSpec
from tests.unit.learner.samples import job
from tests.unit.learner.test_evaluate import CACHE


class Second(Alone):
    """Rank 1, and what rank 0 announces to it; it is gone after that."""

    rank = 1

    def __init__(self, *said: Command) -> None:
        self.said = list(said)
        self.failures = 0.0

    def listen(self) -> Command:
        if not self.said:
            raise Unavailable("rank 0 is gone")
        return self.said.pop(0)

    def total(self, values: list[float]) -> list[float]:  # type: ignore[override]
        self.failures += values[0]
        return values


def settings(tmp_path: Path) -> LearnerSettings:
    return LearnerSettings(
        control_url="http://127.0.0.1:1",
        learner_token="t",  # type: ignore[arg-type]
        job_id="j",
        state_dir=tmp_path,
        cache_dir=CACHE,
    )


def load(spec: JobSpec) -> Command:
    return Command("load", Loading(spec=spec, revision=None).model_dump_json().encode())


END = Command("end")


def test_it_needs_nothing_of_the_task(tmp_path: Path):
    file = {"role": "source", "size": 1, "blake3": "0" * 64}
    ranks = Second(load(job(task={"name": "elsewhere.py:Secret", "files": [file]})), END)
    assert follow(ranks, settings(tmp_path)) == 0  # type: ignore[arg-type]
    assert (ranks.said, ranks.failures) == ([], 0.0)
    assert list(tmp_path.iterdir()) == []


def test_who_can_not_load_says_so_and_lets_rank_0_say_why(tmp_path: Path):
    """torchrun ends all processes with the first one: rank 0 would have no time for its report."""
    ranks = Second(load(job(model="/no/such/model")), END)
    assert follow(ranks, settings(tmp_path)) == 1  # type: ignore[arg-type]
    assert (ranks.said, ranks.failures) == ([], 1.0)


@pytest.mark.parametrize("said", [[], [load(job(model="/no/such/model"))]])
def test_without_rank_0_it_ends(tmp_path: Path, said: list[Command]):
    assert follow(Second(*said), settings(tmp_path)) == 1  # type: ignore[arg-type]
