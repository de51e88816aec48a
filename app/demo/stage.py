"""The stage of a demo: addresses, keys, and the service as a process.

Invariant: what was started is ended when the block ends, the marketplace and its machines included.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from app.protocol.errors import Unavailable

FOLDER = Path(".demo")
STOP_S = 100.0
"""The service waits a minute for calls to the marketplace that are under way, and ends that after itself. Who kills it
before leaves the marketplace and its machines running."""


@dataclass
class Stage:
    """Addresses and keys of one run."""

    control_port: int
    market_port: int
    engine: str = "transformers"
    """Of the machines' agents. `vllm` takes a minute to start on two cores, so that all waits are longer."""
    vllm_python: Path | None = None
    """An interpreter that has vLLM; an image would bring it along."""
    min_lease_s: int = 60
    """Before which no machine is given back for price or surplus."""
    admin_key: str = field(default_factory=lambda: "ek_" + secrets.token_urlsafe(32), repr=False)
    market_key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    webhook_secret: str = field(default_factory=lambda: _webhook_secret(), repr=False)

    @property
    def control_url(self) -> str:
        """The control service."""
        return f"http://127.0.0.1:{self.control_port}"

    @property
    def market_url(self) -> str:
        """The marketplace."""
        return f"http://127.0.0.1:{self.market_port}"

    def environment(self) -> dict[str, str]:
        """Settings of the service: as by default, but for a clock that suits minutes in place of days."""
        own = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")}
        return {
            **own,
            **self._engine(),
            "ECHO2_PORT": str(self.control_port),
            "ECHO2_STATE_DIR": str((FOLDER / "state").absolute()),
            "ECHO2_CACHE_DIR": str((FOLDER / "cache").absolute()),
            "ECHO2_MARKETPLACE_URL": self.market_url,
            "ECHO2_MARKETPLACE_API_KEY": self.market_key,
            "ECHO2_MARKETPLACE_CONTROL": "true",
            # So slow that the job needs several, where this computer can run several.
            "ECHO2_MARKETPLACE_SPEED": "0.4" if self.engine == "transformers" else "1",
            "ECHO2_ADMIN_KEY": self.admin_key,
            "ECHO2_WEBHOOK_SECRET": self.webhook_secret,
            "ECHO2_TICK_SECONDS": "1",
            "ECHO2_RECONCILE_SECONDS": "1",
            "ECHO2_OFFER_REFRESH_SECONDS": "2",
            "ECHO2_HEARTBEAT_SECONDS": "1",
            "ECHO2_HEARTBEAT_TIMEOUT_SECONDS": "20",
            "ECHO2_JOIN_TIMEOUT_SECONDS": "120" if self.engine == "transformers" else "600",
            "ECHO2_MIN_LEASE_SECONDS": str(self.min_lease_s),
            "ECHO2_WIND_DOWN_SECONDS": "20",
            "ECHO2_SETTLE_SECONDS": "10",
            # One chain: as much uplink as one machine can take.
            "ECHO2_LEARNER_UPLINK_MBPS": "100",
        }

    def _engine(self) -> dict[str, str]:
        told = {"ECHO2_AGENT_ENGINE": self.engine}
        return told if self.vllm_python is None else {**told, "ECHO2_VLLM_PYTHON": str(self.vllm_python)}


def _webhook_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def service(stage: Stage) -> Iterator[subprocess.Popen[bytes]]:
    """`echo2 serve` for as long as the block runs."""
    FOLDER.mkdir(exist_ok=True)
    shutil.rmtree(FOLDER / "state", ignore_errors=True)
    with (FOLDER / "serve.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "serve"],
            env=stage.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        _wait_ready(stage, process)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_ready(stage: Stage, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{stage.control_url}/readyz", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    tail = (FOLDER / "serve.log").read_text(errors="replace")[-1500:]
    raise Unavailable(f"the control service did not start; {FOLDER}/serve.log ends with:\n{tail}")
