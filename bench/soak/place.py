"""Where the processes of the soak find each other, and what they agree on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KEY = "0f7e6d5c4b3a29181706f5e4d3c2b1a0"
FLEET = "soak"
LABEL = f"echo2:{FLEET}:"
STEP_S = 5.0
"""Time that passes between two rounds of the control side."""
START_S = 1_800_000_000
NODES = 14
"""Machines of each of the two jobs that run at a time."""
MACHINES = 200


@dataclass(frozen=True, slots=True)
class Place:
    """Files in one folder."""

    folder: Path

    @property
    def clock(self) -> Path:
        """The shared clock."""
        return self.folder / "clock"

    @property
    def url(self) -> Path:
        """The market's address, once it answers."""
        return self.folder / "url"

    @property
    def finish(self) -> Path:
        """There when the control side has to give everything back and end."""
        return self.folder / "finish"

    @property
    def prices(self) -> Path:
        """The market's price list."""
        return self.folder / "machines.toml"

    @property
    def control(self) -> Path:
        """State of the control side: its database."""
        return self.folder / "control"

    @property
    def database(self) -> Path:
        """The control side's database."""
        return self.control / "echo2.db"

    def log(self, name: str) -> Path:
        """Output of a process."""
        return self.folder / f"{name}.log"
