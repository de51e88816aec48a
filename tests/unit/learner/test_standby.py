"""Files of the model that go into the store when they are wanted there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.learner.outbox import Directives
from app.learner.standby import Standby
from app.protocol.errors import LearnerError, Unavailable
from app.protocol.learner import LearnerDirectives
from app.storage.stores import FolderStore

WORD = LearnerDirectives(command="run", staleness_budget=3, publish_period=2)
WANTED = WORD.model_copy(update={"store_model": True})
KEYS = [f"jobs/j/model/model-{n}.safetensors" for n in (1, 2)]


class Store(FolderStore):
    """Fails so often to take each file; remembers the tries."""

    def __init__(self, root: Path, failures: dict[int, int] | None = None) -> None:
        super().__init__(root)
        self._failures = {KEYS[n]: times for n, times in (failures or {}).items()}
        self.tries: list[str] = []

    def put_file(self, key: str, path: Path) -> None:
        self.tries.append(key)
        if self._failures.get(key):
            self._failures[key] -= 1
            raise Unavailable("the store is away")
        super().put_file(key, path)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"model-{n}.safetensors" for n in (1, 2)]
    for n, path in enumerate(made):
        path.write_bytes(b"weights" * (n + 1))
    return made


@contextmanager
def running(store: Store, files: list[Path], directives: Directives) -> Iterator[Standby]:
    standby = Standby(store, "j", files, directives, look_s=0.01, again_s=0.01)
    standby.start()
    try:
        yield standby
    finally:
        standby.stop()


def ended() -> bool:
    return not any(t.name == "standby" for t in threading.enumerate())


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_nothing_is_put_before_it_is_wanted_and_all_once_it_is(tmp_path: Path, files: list[Path]):
    store, looked = Store(tmp_path / "objects"), threading.Event()

    class Watched(Directives):
        def current(self) -> LearnerDirectives:
            looked.set()
            return super().current()

    directives = Watched(WORD)
    with running(store, files, directives) as standby:
        for _ in range(2):
            assert looked.wait(10)
            looked.clear()
        assert store.tries == []
        assert not standby.done
        directives.update(WANTED)
        eventually(ended)
        assert standby.done
    assert store.tries == KEYS
    assert store.get(KEYS[1]) == files[1].read_bytes()


def test_a_store_that_fails_is_tried_again_and_only_with_what_is_left(tmp_path: Path, files: list[Path]):
    store = Store(tmp_path / "objects", failures={0: 2, 1: 1})
    with running(store, files, Directives(WANTED)) as standby:
        eventually(ended)
        assert standby.done
    assert store.tries == [KEYS[0]] * 3 + [KEYS[1]] * 2


def test_what_lies_there_of_another_process_is_replaced(tmp_path: Path, files: list[Path]):
    store = Store(tmp_path / "objects")
    store.put(KEYS[0], b"x" * files[0].stat().st_size)
    with running(store, files, Directives(WANTED)):
        eventually(ended)
    assert store.get(KEYS[0]) == files[0].read_bytes()


def test_it_ends_with_the_session_and_without_files_never_begins(tmp_path: Path, files: list[Path]):
    failed = Directives(WANTED)
    failed.fail(LearnerError("elsewhere"))
    store = Store(tmp_path / "objects")
    with running(store, files, failed):
        eventually(ended)
    with running(store, [], Directives(WANTED)):
        assert ended()
    with running(store, files, Directives(WORD)) as standby:
        assert not ended()
        standby.stop()
        assert ended()
        assert not standby.done
    assert store.tries == []
