"""For all tests: a slow machine fails no property test, and the same tree gives the same result each time.

`--hypothesis-profile=explore` draws new examples, and more: to look for faults, not to judge a change by.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import settings

settings.register_profile("echo2", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None, max_examples=300)
settings.load_profile("echo2")

STORY = ("test_crashes.py", "test_user.py")
"""They read one job, which takes a minute and a half."""
LONGEST = (
    *STORY, "test_chosen_liar.py", "test_heldout_liar.py", "test_liars.py",
    "test_group_sizes.py", "test_attached.py", "test_strangers.py", "test_market_faults.py",
    "test_learner_process.py", "test_process.py", "test_agent.py", "test_ranks_process.py", "test_parallel.py",
    "test_exact_resume.py", "test_hub_process.py", "test_ranks_tasks.py", "test_wan.py", "test_notices.py",
    "test_hang.py", "test_hand_over.py",
)  # fmt: skip
"""Files of processes and whole jobs that take longest, in this order: for one that begins last all others wait."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` the files that share a session's fixture stay together as well."""
    from xdist.scheduler import LoadFileScheduling

    class ByStory(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "story" if file.rpartition("/")[2] in STORY else file

    return ByStory(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; for `--dist` with `--no-loadscope-reorder`, which keeps to that."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every httpx client reads all certificates that there are, which takes 20 ms; no test of this process needs any
    but its own."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    one = tmp_path_factory.mktemp("authority") / "one.pem"
    one.write_text(first + end)
    make = ssl.create_default_context

    def light(purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **_: Any) -> ssl.SSLContext:
        return make(purpose, cafile=str(one))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", light)
        yield
