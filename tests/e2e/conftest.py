"""One control service with its marketplace for the whole folder: starting it costs seconds, jobs do not mind others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.stage import Stage, running
from tests.e2e.story import Story, tell


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The service; who breaks it puts it together again."""
    with running(tmp_path_factory.mktemp("stage")) as stage:
        yield stage


@pytest.fixture(scope="session")
def story(stage: Stage) -> Story:
    """A job that is over, and that learner, node and control service died under."""
    return tell(stage)
