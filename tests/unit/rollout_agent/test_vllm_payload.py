"""What the engine may read: a payload that was held against manifest and model, restored where it was quantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.protocol.errors import IntegrityError
from app.rollout_agent.engines.vllm_payload import check_payload, readable, write_adapter
from app.snapshots import quantise
from app.snapshots.codec import decode
from app.snapshots.manifest import ADAPTER_ASSET, new_key
from app.snapshots.store import Snapshot
from tests.unit.rollout_agent.tiny import new_store

STATE = {
    "a.weight": torch.arange(256 * 64, dtype=torch.float32).reshape(256, 64).sin(),
    "b.weight": torch.ones(64),
}
LAYOUT = {name: tuple(tensor.shape) for name, tensor in STATE.items()}


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    key = new_key()
    return new_store(tmp_path / "snapshots", key).publish_full(STATE, version=1, key=key)


def test_the_very_bytes_that_were_signed_pass(snapshot: Snapshot) -> None:
    check_payload(snapshot.payload_path, snapshot.manifest, LAYOUT)


@pytest.mark.parametrize("at", [3, 12, 200, -1])
def test_one_changed_bit_anywhere_does_not(snapshot: Snapshot, tmp_path: Path, at: int) -> None:
    data = bytearray(snapshot.payload_path.read_bytes())
    data[at] ^= 1
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(IntegrityError):
        check_payload(tmp_path / "p", snapshot.manifest, LAYOUT)


def test_nor_does_a_file_that_is_cut_or_not_there(snapshot: Snapshot, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(snapshot.payload_path.read_bytes()[:-2])
    for path in (tmp_path / "p", tmp_path / "none"):
        with pytest.raises(IntegrityError):
            check_payload(path, snapshot.manifest, LAYOUT)


def test_nor_does_another_model(snapshot: Snapshot) -> None:
    for layout in ({"a.weight": (256, 64)}, {**LAYOUT, "c": (1,)}, {**LAYOUT, "b.weight": (63,)}):
        with pytest.raises(IntegrityError):
            check_payload(snapshot.payload_path, snapshot.manifest, layout)


async def test_only_a_quantised_payload_is_written_anew(
    snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = tmp_path / "aside"
    async with readable(snapshot.payload_path, snapshot.manifest, aside, torch.float32) as path:
        assert path == snapshot.payload_path
    monkeypatch.setattr(quantise, "LEAST_ELEMENTS", 64)
    key = new_key()
    eight = new_store(tmp_path / "eight", key).publish(STATE, version=1, key=key, quantise="int8").snapshot
    check_payload(eight.payload_path, eight.manifest, LAYOUT)
    async with readable(eight.payload_path, eight.manifest, aside, torch.float32) as path:
        restored, wanted = load_file(path), decode(eight.payload_path)
        assert restored.keys() == STATE.keys()
        assert all(torch.equal(restored[name], wanted[name]) for name in STATE)
    assert not aside.exists()


def test_an_adapter_is_a_folder_that_peft_knows(snapshot: Snapshot, tmp_path: Path) -> None:
    (tmp_path / ADAPTER_ASSET).write_text('{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}')
    for _ in range(2):
        write_adapter(tmp_path / "adapter", tmp_path, snapshot.payload_path)
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert b'"peft_type": "LORA"' in (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == snapshot.payload_path.read_bytes()
