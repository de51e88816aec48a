"""What survives the marketplace: contracts with their bills, machine prices, counters.

Invariant: a write is one SQLite transaction; a folder belongs to one running marketplace at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .config import ConfigError


class Store:
    """Documents by (kind, id) in `state_dir/market.db`. Raises ConfigError if another process has the folder."""

    def __init__(self, state_dir: Path) -> None:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = (state_dir / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(
                f"state_dir {state_dir} is in use by another marketplace: stop it or choose another"
            ) from None
        os.set_inheritable(self._lock.fileno(), False)
        path = state_dir / "market.db"
        path.touch(mode=0o600)
        # The application serves every request and tick on one thread at a time, yet a test client may switch threads.
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS doc(kind TEXT, id INTEGER, body TEXT, PRIMARY KEY(kind, id))")

    def load(self, kind: str) -> dict[int, Any]:
        """All documents of a kind by id."""
        rows = self._db.execute("SELECT id, body FROM doc WHERE kind = ? ORDER BY id", (kind,))
        return {number: json.loads(body) for number, body in rows}

    def save(self, documents: Iterable[tuple[str, int, Any]]) -> None:
        """Write (kind, id, body) documents in one transaction."""
        rows = [(kind, number, json.dumps(body)) for kind, number, body in documents]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("INSERT OR REPLACE INTO doc VALUES (?, ?, ?)", rows)
        except sqlite3.Error:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Let the folder go."""
        self._db.close()
        self._lock.close()
