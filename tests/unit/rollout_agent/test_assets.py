"""What lies in a model's folder beside what was announced."""

from __future__ import annotations

from pathlib import Path

from app.protocol.node import AssetRef
from app.rollout_agent.assets import remove_others


def announced(*names: str) -> list[AssetRef]:
    return [AssetRef(path=name, size=1, blake3="0" * 64, url="http://store/x") for name in names]


def test_files_that_were_not_announced_go_and_what_has_come_of_others_stays(tmp_path: Path) -> None:
    kept = ["config.json", "model.safetensors", ".model.safetensors.part"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "folder")
    for name in (*kept, "adapter.json", ".adapter.json", "tokenizer.json", ".other.safetensors.part"):
        (tmp_path / name).touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    remove_others(tmp_path, announced("config.json", "model.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "folder", "linked"])
    assert (tmp_path / "folder" / "notes").exists()


def test_a_folder_that_is_not_there_yet_holds_nothing(tmp_path: Path) -> None:
    remove_others(tmp_path / "model", announced("config.json"))
    assert not (tmp_path / "model").exists()
