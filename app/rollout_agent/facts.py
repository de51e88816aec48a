"""What this machine has: GPUs by their driver (NVML), processors, memory, disk.

Invariant: a machine without a driver, or whose driver lacks an answer, has no GPU, or no such fact, and the agent
starts all the same. What the driver says is told as it is; whether it suffices is decided elsewhere.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from app.protocol.startup import MAX_GPUS, GpuFacts, MachineFacts

log = logging.getLogger(__name__)

Got = TypeVar("Got")
NO_CGROUP_LIMIT = 2**62
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class Nvml(Protocol):
    """The part of `pynvml` (package nvidia-ml-py) that is used here."""

    @property
    def NVMLError(self) -> type[Exception]: ...
    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str | bytes: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any, /) -> str | bytes: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, /) -> tuple[int, int]: ...
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, /) -> int: ...
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, /) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, /) -> int: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error: int, counter: int, /) -> int: ...


NVML_TEMPERATURE_GPU = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0


def open_nvml() -> Nvml | None:
    """The driver's library; None where the package is not installed."""
    try:
        found: Any = importlib.import_module("pynvml")
    except ImportError:
        log.info("nvidia-ml-py is not installed: no facts of GPUs")
        return None
    library: Nvml = found
    return library


def gpu_facts(nvml: Nvml | None) -> tuple[list[GpuFacts], str]:
    """All GPUs of this machine and the driver's version; nothing without a driver."""
    if nvml is None:
        return [], ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.info("no GPU driver: %s", error)
        return [], ""
    try:
        driver = _text(_maybe(nvml, nvml.nvmlSystemGetDriverVersion) or "")
        count = min(MAX_GPUS, _maybe(nvml, nvml.nvmlDeviceGetCount) or 0)
        found = [_maybe(nvml, partial(_gpu, nvml, index)) for index in range(count)]
        return [gpu for gpu in found if gpu is not None], driver[:100]
    finally:
        _maybe(nvml, nvml.nvmlShutdown)


def _gpu(nvml: Nvml, index: int) -> GpuFacts:
    """One GPU; raises NVMLError when it does not even tell its name and memory: then it is of no use."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = _maybe(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return GpuFacts(
        name=_text(nvml.nvmlDeviceGetName(handle))[:200],
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability="{}.{}".format(*capability) if capability else "",
        pcie_generation=_maybe(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        pcie_width=_maybe(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        temperature_c=_maybe(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, NVML_TEMPERATURE_GPU)),
        ecc_errors=_maybe(
            nvml,
            lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC),
        ),
    )


def _maybe(nvml: Nvml, ask: Callable[[], Got]) -> Got | None:
    """An answer, or None where this card or driver has none."""
    try:
        return ask()
    except nvml.NVMLError as error:
        log.debug("the driver does not tell: %s", error)
        return None


def _text(value: str | bytes) -> str:
    """Older versions of the library answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def machine_facts(folder: Path, nvml: Nvml | None) -> MachineFacts:
    """Everything that is told at the join. `folder`: where the agent keeps its files; it need not exist yet."""
    gpus, driver = gpu_facts(nvml)
    return MachineFacts(
        gpus=gpus,
        driver=driver,
        cpus=_cpus(),
        memory_bytes=host_memory_bytes(),
        disk_free_bytes=free_bytes(folder),
    )


def free_bytes(folder: Path) -> int:
    """Free disk where `folder` is, or will be."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def host_memory_bytes(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int:
    """Memory of this machine, or what its container may use of it, if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for path in limits if (limit := _limit(path)) is not None)])


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and 0 < int(text) < NO_CGROUP_LIMIT else None


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
