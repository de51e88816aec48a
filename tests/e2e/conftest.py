"""One control service with its marketplace for the whole folder: starting it costs seconds, jobs do not mind others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.stage import Stage, running
from tests.e2e.story import Story, tell

STORY = {"test_crashes.py", "test_user.py"}
"""They read one job, which takes a minute."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`: a file each, and one for the story; before xdist looks for them."""
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.xdist_group("story" if item.path.name in STORY else str(item.path)))


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The service; who breaks it puts it together again."""
    with running(tmp_path_factory.mktemp("stage")) as stage:
        yield stage


@pytest.fixture(scope="session")
def story(stage: Stage) -> Story:
    """A job that is over, and that learner, node and control service died under."""
    return tell(stage)
