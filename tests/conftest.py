"""For all tests: a slow machine fails no property test; what shares a story or a fixture stays on one worker."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("echo2", deadline=None)
settings.load_profile("echo2")

STORY = {"test_crashes.py", "test_user.py"}
"""They read one job, which takes a minute."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`: a file each, and one for the story; before xdist looks for them."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("story" if item.path.name in STORY else str(item.path)))
