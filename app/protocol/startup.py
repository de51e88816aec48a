"""What a machine tells of itself before it works: how far its start has come, and what hardware it finds.

Invariant: everything here is said by a stranger's machine: bounded in size, and only ever held against what was
promised or measured elsewhere.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from app.protocol.base import Strict

MAX_GPUS = 64


class StartPhase(StrEnum):
    """booting → installing → joining → fetching → loading → warming → testing → active, in this order."""

    BOOTING = "booting"
    """The machine runs our script."""
    INSTALLING = "installing"
    """Packages come and are unpacked."""
    JOINING = "joining"
    """The agent's process runs and trades its join token."""
    FETCHING = "fetching"
    """The model's files: config, tokenizer, under an adapter the base weights."""
    LOADING = "loading"
    """The engine starts."""
    WARMING = "warming"
    """The first policy version arrives."""
    TESTING = "testing"
    """The engine has it, and has to show that it generates."""
    ACTIVE = "active"

    @property
    def rank(self) -> int:
        """Its place in the order, from 0."""
        return _ORDER[self]


_ORDER = {phase: place for place, phase in enumerate(StartPhase)}


class StartProgress(Strict):
    """How far a start has come. Bytes that grow are progress; a detail that changes is not."""

    phase: StartPhase
    detail: str = Field(default="", max_length=200)
    """For people: a package, a file."""
    have: int | None = Field(default=None, ge=0, le=2**62)
    """Bytes of this phase that are there."""
    total: int | None = Field(default=None, ge=0, le=2**62)
    """Bytes that there will be; None while that is not known."""
    since_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds since this phase began, by the machine's own clock."""


class GpuFacts(Strict):
    """One GPU, as its driver describes it. Sizes in bytes."""

    name: str = Field(max_length=200)
    memory_bytes: int = Field(ge=0, le=2**62)
    compute_capability: str = Field(default="", max_length=20)
    pcie_generation: int | None = Field(default=None, ge=0, le=100)
    """As the link can do in this machine."""
    pcie_width: int | None = Field(default=None, ge=0, le=1000)
    temperature_c: int | None = Field(default=None, ge=-300, le=1000)
    ecc_errors: int | None = Field(default=None, ge=0, le=2**62)
    """Uncorrected since the driver was loaded; None where the card has no ECC."""


class MachineFacts(Strict):
    """What a machine finds in itself. Sizes in bytes."""

    gpus: list[GpuFacts] = Field(default_factory=list, max_length=MAX_GPUS)
    driver: str = Field(default="", max_length=100)
    cpus: int = Field(default=0, ge=0, le=100_000)
    memory_bytes: int = Field(default=0, ge=0, le=2**62)
    """Host memory that this process may use: the container's limit where there is one."""
    disk_free_bytes: int = Field(default=0, ge=0, le=2**62)
    """Where the agent keeps its files."""
