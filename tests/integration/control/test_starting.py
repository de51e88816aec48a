"""`echo2 serve` and other commands that can't do their work: one line that says what to change, and the exit status."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.demo.stage import free_port
from app.settings import SettingsError, load_settings


def echo2(tmp_path: Path, *arguments: str, stdin: bytes = b"", **settings: str) -> tuple[int, str]:
    """Exit status and standard error of a command."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")}
    env = {**own, "ECHO2_STATE_DIR": str(tmp_path / "state"), "COLUMNS": "200", **settings}
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments],
        env=env,
        input=stdin,
        capture_output=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr.decode()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield int(other.getsockname()[1])


def test_a_port_that_is_taken_stops_the_start_before_anything_runs(tmp_path: Path, taken: int) -> None:
    status, said = echo2(tmp_path, "serve", ECHO2_PORT=str(taken))
    assert status == 1
    assert "ECHO2_PORT" in said
    assert str(taken) in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "state" / "marketplace.log").exists()


def test_a_database_that_does_not_answer_is_named_by_its_setting(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"postgresql://user:hunter2@127.0.0.1:{nobody.getsockname()[1]}/echo2"
        status, said = echo2(tmp_path, "serve", ECHO2_DATABASE_URL=url)
    assert status == 1
    assert said.startswith("unavailable: ECHO2_DATABASE_URL")
    assert "hunter2" not in said
    assert len(said.strip().splitlines()) == 1


def test_a_database_that_can_not_be_opened_is_named_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file.db").write_text("this is a letter to my mother, and no database at all" * 100)
    for url in (f"sqlite:///{tmp_path}", f"sqlite:///{tmp_path / 'file.db'}"):
        status, said = echo2(tmp_path, "serve", ECHO2_DATABASE_URL=url)
        assert status == 1
        assert said.startswith("unavailable: ECHO2_DATABASE_URL: the database can't be used: ")
        assert len(said.strip().splitlines()) == 1


def test_a_folder_that_can_not_be_the_object_store_is_named_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    status, said = echo2(tmp_path, "serve", ECHO2_OBJECT_STORE_URL=(tmp_path / "file").as_uri())
    assert status == 1
    assert said.startswith("unavailable: ECHO2_OBJECT_STORE_URL: ")
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "state" / "marketplace.log").exists()


def test_a_start_that_fails_late_has_failed(tmp_path: Path) -> None:
    """Such as that of an older version on the database of a newer one."""
    with closing(sqlite3.connect(tmp_path / "newer.db")) as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.execute("INSERT INTO alembic_version VALUES ('feedbeef')")
        database.commit()
    settings = {"ECHO2_DATABASE_URL": f"sqlite:///{tmp_path / 'newer.db'}", "ECHO2_PORT": str(free_port())}
    status, said = echo2(tmp_path, "serve", ECHO2_PROVIDERS="vastai", ECHO2_VASTAI_API_KEY="key", **settings)
    assert status == 1
    assert "feedbeef" in said
    assert said.strip().splitlines()[-1] == "unavailable: the service did not start; the lines above say why"


def test_a_state_folder_that_cannot_be_made_is_named_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, said = echo2(tmp_path, "serve", ECHO2_STATE_DIR=str(tmp_path / "file" / "state"))
    assert status == 1
    assert said.startswith("unavailable: ECHO2_STATE_DIR")


def test_a_marketplace_that_cannot_start_says_why_in_one_line(tmp_path: Path, taken: int) -> None:
    status, said = echo2(tmp_path, "marketplace", "--port", str(taken), ECHO2_MARKETPLACE_API_KEY="key")
    assert status == 1
    assert f"127.0.0.1:{taken}" in said
    assert "Traceback" not in said


def test_a_job_file_that_cannot_be_read_is_bad_usage(tmp_path: Path) -> None:
    for content in (b"\xff\xfe", b"{"):
        status, said = echo2(tmp_path, "job", "submit", "-", stdin=content)
        assert status == 2, said
        assert "is not JSON" in said
    status, said = echo2(tmp_path, "job", "submit", str(tmp_path / "nowhere.json"))
    assert status == 2
    assert "can't be read" in said


def test_an_address_that_is_none_is_named(tmp_path: Path) -> None:
    status, said = echo2(tmp_path, "job", "list", ECHO2_URL="127.0.0.1:8080", ECHO2_API_KEY="key")
    assert status == 1
    assert "ECHO2_URL" in said


def test_a_folder_of_tasks_that_is_not_there_stops_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ECHO2_TASK_DIR", "ECHO2_AGENT_CONSTRAINTS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(tmp_path / "nowhere"))
            with pytest.raises(SettingsError, match=f"{name}: .*nowhere is not there; expected"):
                load_settings()
