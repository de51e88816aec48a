"""Refusing what can't fit, before it is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.node import AssetRef
from app.protocol.startup import GpuFacts, MachineFacts
from app.rollout_agent.room import Model, Unfit, check, disk_needed, disk_short, folder_bytes, memory_short

GB = 10**9
HERE = Path("/workspace")


def model(parameters: int | None = 8 * GB, snapshot: int | None = 16 * GB, files: int = 10**7) -> Model:
    return Model([AssetRef(path="config.json", size=files, blake3="", url="")], parameters, snapshot)


def machine(*gpus_gb: float, memory_gb: float = 64.0) -> MachineFacts:
    cards = [GpuFacts(name="RTX 4090", memory_bytes=round(gb * GB)) for gb in gpus_gb]
    return MachineFacts(gpus=cards, memory_bytes=round(memory_gb * GB))


def test_the_disk_has_to_hold_the_files_and_three_versions() -> None:
    assert 48 * GB < disk_needed(model()) < 49 * GB
    assert disk_short(model(), 49 * GB, 0, HERE) == ""
    why = disk_short(model(), round(4.1 * GB), 0, HERE)
    assert why == "disk: needs 48.3 GB, has 4.1 GB free at /workspace"


def test_what_is_there_already_is_not_needed_again() -> None:
    assert disk_short(model(), 17 * GB, 32 * GB, HERE) == ""


def test_a_version_that_nobody_has_measured_is_reckoned_in_bf16() -> None:
    assert disk_needed(model(snapshot=None)) == disk_needed(model(snapshot=16 * GB))


@pytest.mark.parametrize(
    ("gpus", "used", "fits"),
    [((24,), 1, True), ((16,), 1, False), ((12, 12), 2, True), ((12, 12), 1, False), ((80,), 1, True)],
)
def test_the_weights_have_to_fit_the_gpus_that_are_used(gpus: tuple[float, ...], used: int, fits: bool) -> None:
    why = memory_short(model(), machine(*gpus), on_gpu=True, gpus_used=used)
    assert (why == "") is fits
    if not fits:
        assert "needs 16.0 GB on GPUs" in why
        assert "RTX 4090" in why


def test_without_a_gpu_the_memory_has_to_hold_float32() -> None:
    assert memory_short(model(), machine(memory_gb=64), on_gpu=False, gpus_used=1) == ""
    why = memory_short(model(), machine(memory_gb=32), on_gpu=False, gpus_used=1)
    assert why == "memory: the model needs 35.2 GB, this machine has 32.0 GB"


def test_what_is_not_known_is_not_refused() -> None:
    nothing = model(parameters=None, snapshot=None)
    assert memory_short(nothing, machine(1), on_gpu=True, gpus_used=1) == ""
    assert memory_short(model(), machine(), on_gpu=True, gpus_used=1) == "", "a driver that tells nothing"


def test_the_check_counts_what_lies_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "payload").write_bytes(b"x" * 1000)
    small = model(parameters=1000, snapshot=1000)
    free = disk_needed(small) - 1000
    assert folder_bytes(tmp_path) == 1000
    assert folder_bytes(tmp_path / "absent") == 0
    check(small, machine(memory_gb=1), tmp_path, free, on_gpu=False, gpus_used=1)
    with pytest.raises(Unfit, match="disk: needs"):
        check(small, machine(memory_gb=1), tmp_path, free - 1, on_gpu=False, gpus_used=1)
    with pytest.raises(Unfit, match="memory: the model needs"):
        check(small, machine(memory_gb=0), tmp_path, free, on_gpu=False, gpus_used=1)


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_more_disk_is_never_worse(free: int, more: int) -> None:
    if disk_short(model(), free, 0, HERE) == "":
        assert disk_short(model(), free + more, 0, HERE) == ""
