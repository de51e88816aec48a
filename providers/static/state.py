"""Which machines we have taken, in a small file.

Invariant: the file is replaced as a whole and on disk before `put` and `drop` return; one that can't be read raises and
is never taken for an empty one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from providers.base import MalformedAnswer


@dataclass(frozen=True, slots=True)
class Taken:
    """A machine that we asked to run something. Its address is kept: the list of machines may change."""

    instance_id: str
    label: str
    machine: str
    address: str
    user: str
    port: int
    identity_file: str
    gpu_name: str
    ports: tuple[int, ...]


class State:
    """The entries by instance, read once and written at every change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = self._read()

    def _read(self) -> dict[str, Taken]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return {}
        try:
            rows = json.loads(text)["taken"]
            entries = [Taken(**{**row, "ports": tuple(row["ports"])}) for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedAnswer(f"{self._path} can't be read ({error}): mend it, or move it away") from error
        return {entry.instance_id: entry for entry in entries}

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"taken": [asdict(entry) for entry in self._entries.values()]}, indent=1)
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

    @property
    def entries(self) -> Mapping[str, Taken]:
        """Entries by instance id."""
        return dict(self._entries)

    def of_machine(self, name: str) -> Taken | None:
        """What we have on a machine."""
        return next((entry for entry in self._entries.values() if entry.machine == name), None)

    def put(self, entry: Taken) -> None:
        """Add or replace."""
        self._entries[entry.instance_id] = entry
        self._write()

    def drop(self, instance_id: str) -> None:
        """Remove, if it is there."""
        if self._entries.pop(instance_id, None) is not None:
            self._write()
