"""Runs the control service, with the embedded marketplace beside it where the settings want one.

Invariant: the marketplace is a process of its own: a control service that is killed does not take the machines with it,
and one that is started again uses the marketplace that it finds.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from urllib.parse import urlsplit

import httpx
import uvicorn

from app.main import create_app, marketplace_key, state_folder
from app.protocol.errors import Unavailable
from app.settings import Settings

log = logging.getLogger("echo2")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
START_TIMEOUT_S = 30.0


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v0/gpu_names/unique/", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def embedded_marketplace(settings: Settings) -> Iterator[None]:
    """The local marketplace for as long as the block runs, unless one answers already or it is somewhere else."""
    parts = urlsplit(settings.marketplace_url)
    if "marketplace" not in settings.providers or parts.hostname not in LOOPBACK or _answers(settings.marketplace_url):
        yield
        return
    command = [sys.executable, "-m", "app.cli", "marketplace", "--port", str(parts.port or 80)]
    if settings.marketplace_control:
        command.append("--control")
    folder = state_folder(settings)
    with (folder / "marketplace.log").open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=_environment(settings),
            start_new_session=True,
        )
    if process.stdin is not None:
        process.stdin.close()
    try:
        _wait(settings.marketplace_url, process)
        yield
    finally:
        process.terminate()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()


def _environment(settings: Settings) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")}
    return {
        **own,
        "ECHO2_STATE_DIR": str(settings.state_dir),
        # Not on the command line: other users of this computer can read that.
        "ECHO2_MARKETPLACE_API_KEY": marketplace_key(settings),
    }


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(url):
        if process.poll() is not None:
            raise Unavailable(f"the local marketplace ended with status {process.returncode}; see marketplace.log")
        if time.monotonic() > deadline:
            raise Unavailable(f"the local marketplace did not answer at {url} within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.1)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def serve(settings: Settings, announce: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT, then stop in order: the service first, the marketplace after it."""
    # uvicorn raises the signal again when it has shut down; without a handler that would end us at once.
    signal.signal(signal.SIGTERM, _exit)
    with embedded_marketplace(settings):
        app = create_app(settings, announce=announce)
        uvicorn.run(
            app, host=settings.host, port=settings.port, log_level=settings.log_level, access_log=False,
            timeout_graceful_shutdown=5,
        )  # fmt: skip
