"""Which way the model's files take to the nodes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from app.learner.hub import MOST_BYTES, hub_ref, outsourced, plan
from app.learner.model import resolve
from app.protocol.errors import LearnerError
from app.protocol.hub import HubRef
from tests.integration.learner.hub_server import REPO, SHA, HubServer
from tests.integration.learner.served import served as serve

REF = HubRef(repo=REPO, revision=SHA)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors", "model.py"):
        (folder / name).write_bytes(name.encode() * 50)
    return folder


def files_of(folder: Path, tmp_path: Path) -> list[Path]:
    """As `asset_files` gives them under an adapter."""
    adapter = tmp_path / "adapter.json"
    adapter.write_text("{}")
    return [*sorted(folder.iterdir()), adapter]


@pytest.mark.parametrize(
    ("name", "folder", "found"),
    [
        ("org/m", f"/c/hub/models--org--m/snapshots/{SHA}", True),
        ("org/m.B-1", f"/c/hub/models--org--m.B-1/snapshots/{SHA}", True),
        ("org/m", "/c/hub/models--org--m/snapshots/main", False),
        ("org/m", f"/c/hub/models--org--other/snapshots/{SHA}", False),
        ("tiny", "/c/tiny-abc", False),
        (f"/c/hub/models--org--m/snapshots/{SHA}", f"/c/hub/models--org--m/snapshots/{SHA}", False),
        ("./m", "m", False),
    ],
)
def test_only_what_the_hub_s_library_has_fetched_at_a_commit_is_from_the_hub(name: str, folder: str, found: bool):
    assert hub_ref(name, Path(folder)) == (HubRef(repo=name, revision=SHA) if found else None)


def test_a_learner_that_starts_again_loads_the_commit_that_the_job_began_with(served: Path, tmp_path: Path):
    hub = HubServer(served)
    with serve(hub.app) as endpoint:
        began = resolve(REPO, tmp_path / "cache", endpoint=endpoint)
        hub.main = "f" * 40
        again = resolve(REPO, tmp_path / "elsewhere", revision=SHA, endpoint=endpoint)
        with pytest.raises(LearnerError):
            resolve(REPO, tmp_path / "newest", endpoint=endpoint)
    assert began.name == again.name == SHA
    assert files_of(again, tmp_path)


def test_a_public_model_s_weights_are_announced_at_their_commit_and_stay_out_of_the_store(served: Path, tmp_path: Path):
    hub = HubServer(served)
    with serve(hub.app) as endpoint:
        folder = resolve(REPO, tmp_path / "cache", endpoint=endpoint)
        files = files_of(folder, tmp_path)
        found = plan(REPO, folder, files, endpoint=endpoint)
    assert "model.py" not in {p.name for p in files}
    assert {a.path: a.hub for a in found.assets} == {
        "adapter.json": None, "config.json": None, "tokenizer.json": None,
        "model-1.safetensors": REF, "model-2.safetensors": REF,
    }  # fmt: skip
    assert [a.size for a in found.assets] == [p.stat().st_size for p in files]
    assert [p.name for p in found.later] == ["model-1.safetensors", "model-2.safetensors"]
    assert {p.name for p in found.now} == {"adapter.json", "config.json", "tokenizer.json"}


def test_what_the_hub_does_not_give_to_anybody_goes_into_the_store(
    served: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    hub = HubServer(served)
    with serve(hub.app) as endpoint:
        folder = resolve(REPO, tmp_path / "cache", endpoint=endpoint)
        files = files_of(folder, tmp_path)
        hub.token = "hf_secret"
        gated = plan(REPO, folder, files, endpoint=endpoint)
        hub.token = ""
        hub.sizes = {"model-1.safetensors": 5}
        other = plan(REPO, folder, files, endpoint=endpoint)
    away = plan(REPO, folder, files, endpoint=endpoint)
    for found in (gated, other, away):
        assert found.later == []
        assert found.now == files
        assert all(a.hub is None for a in found.assets)
    told = [r.getMessage() for r in caplog.records if "object store" in r.getMessage()]
    assert len(told) == 3
    assert "401" in told[0]
    assert "5 bytes there" in told[1]


def test_the_hub_is_not_asked_for_a_model_without_such_files(tmp_path: Path, served: Path):
    hub = HubServer(served)
    with serve(hub.app) as endpoint:
        folder = resolve(REPO, tmp_path / "cache", endpoint=endpoint)
        asked = len(hub.anonymous)
        small = [p for p in folder.iterdir() if p.suffix == ".json"]
        assert plan(REPO, folder, small, endpoint=endpoint).now == small
        assert plan(str(folder), folder, files_of(folder, tmp_path), endpoint=endpoint).later == []
        assert len(hub.anonymous) == asked


def test_files_too_large_for_plain_downloads_go_through_the_store(tmp_path: Path):
    for name, size in (("a.safetensors", MOST_BYTES), ("b.safetensors", MOST_BYTES + 1)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    assert [p.name for p in outsourced(sorted(tmp_path.iterdir()), tmp_path)] == ["a.safetensors"]


def test_a_hub_that_can_not_be_reached_is_a_clear_error(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(LearnerError, match="can't be fetched"):
            resolve(REPO, tmp_path, endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}")
