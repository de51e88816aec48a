"""What a machine tells of itself, with a stand-in for the driver."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.protocol.startup import MachineFacts
from app.rollout_agent import facts
from app.rollout_agent.facts import free_bytes, gpu_facts, host_memory_bytes, machine_facts


class DriverError(Exception):
    pass


@dataclass
class FakeNvml:
    """Two cards; what is named in `refused` the driver does not answer."""

    refused: set[str] = field(default_factory=set)
    names: tuple[str | bytes, ...] = ("NVIDIA GeForce RTX 4090", b"NVIDIA GeForce RTX 4090")
    open: int = 0
    NVMLError: type[Exception] = DriverError

    def _check(self, call: str) -> None:
        if call in self.refused:
            raise DriverError(f"{call}: not supported")

    def nvmlInit(self) -> None:
        self._check("init")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        self._check("driver")
        return b"560.35"

    def nvmlDeviceGetCount(self) -> int:
        self._check("count")
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> int:
        self._check(f"handle{index}")
        return index

    def nvmlDeviceGetName(self, handle: int, /) -> str | bytes:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int, /) -> Any:
        self._check("memory")
        return SimpleNamespace(total=24_564 * 1024 * 1024, free=1, used=2)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int, /) -> tuple[int, int]:
        self._check("capability")
        return 8, 9

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int, /) -> int:
        self._check("pcie")
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int, /) -> int:
        self._check("pcie")
        return 16

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int, /) -> int:
        assert sensor == 0
        return 41

    def nvmlDeviceGetTotalEccErrors(self, handle: int, error: int, counter: int, /) -> int:
        assert (error, counter) == (1, 0)
        self._check("ecc")
        return 0


def test_what_the_driver_says_is_told() -> None:
    nvml = FakeNvml()
    gpus, driver = gpu_facts(nvml)
    assert driver == "560.35"
    assert [g.name for g in gpus] == ["NVIDIA GeForce RTX 4090"] * 2
    assert gpus[0].memory_bytes == 25_757_220_864
    assert gpus[0].compute_capability == "8.9"
    assert (gpus[0].pcie_generation, gpus[0].pcie_width) == (4, 16)
    assert (gpus[0].temperature_c, gpus[0].ecc_errors) == (41, 0)
    assert nvml.open == 0, "the library is closed again"


@pytest.mark.parametrize("nvml", [None, FakeNvml({"init"}), FakeNvml({"count"})])
def test_without_a_driver_there_is_no_gpu(nvml: FakeNvml | None) -> None:
    assert gpu_facts(nvml)[0] == []


def test_what_a_card_does_not_tell_is_left_out() -> None:
    gpus, driver = gpu_facts(FakeNvml({"ecc", "capability", "pcie", "driver"}))
    assert driver == ""
    assert len(gpus) == 2
    assert gpus[0].ecc_errors is None
    assert gpus[0].compute_capability == ""
    assert gpus[0].pcie_width is None


def test_a_card_that_fell_off_the_bus_does_not_count() -> None:
    assert len(gpu_facts(FakeNvml({"handle0"}))[0]) == 1
    assert gpu_facts(FakeNvml({"memory"}))[0] == []


def test_processors_memory_and_disk_are_those_of_this_machine(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path / "not" / "there", FakeNvml())
    assert len(facts.gpus) == 2
    assert facts.cpus >= 1
    assert facts.memory_bytes > 2**27
    assert facts.disk_free_bytes > 0
    assert abs(facts.disk_free_bytes - free_bytes(tmp_path)) < 2**30
    assert MachineFacts.model_validate_json(facts.model_dump_json()) == facts


def test_a_container_has_the_memory_that_it_may_use(tmp_path: Path) -> None:
    limit, none = tmp_path / "limit", tmp_path / "none"
    limit.write_text("1073741824\n")
    none.write_text("max\n")
    assert host_memory_bytes((limit, none)) == 2**30
    assert host_memory_bytes((none, tmp_path / "absent")) == host_memory_bytes(())


def test_the_driver_s_library_has_what_is_asked_of_it() -> None:
    pynvml = importlib.import_module("pynvml")
    calls = [name for name in vars(facts.Nvml) if name.startswith("nvml")]
    assert len(calls) > 10
    assert [name for name in calls if not callable(getattr(pynvml, name, None))] == []
    assert issubclass(pynvml.NVMLError, Exception)
    ours = ("NVML_TEMPERATURE_GPU", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC")
    assert [(name, getattr(facts, name)) for name in ours] == [(name, getattr(pynvml, name)) for name in ours]
