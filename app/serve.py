"""Runs the control service, with the embedded marketplace beside it where the settings want one.

Invariant: the marketplace is a process of its own: a control service that is killed does not take the machines with it,
and one that is started again uses the marketplace that it finds, and ends it in its turn.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import uvicorn
from fastapi import FastAPI
from sqlalchemy import make_url, text
from sqlalchemy.exc import SQLAlchemyError

from app.main import create_app, marketplace_key, state_folder
from app.open_files import allow_open_files
from app.protocol.errors import BadInput, Unavailable
from app.settings import Settings
from app.settings_values import own_url
from app.storage.database import Database
from app.storage.stores import open_store

if TYPE_CHECKING:
    import psutil

log = logging.getLogger("echo2")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
START_TIMEOUT_S = 30.0
PID_FILE = "marketplace.pid"


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v0/gpu_names/unique/", timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def embedded_marketplace(settings: Settings) -> Iterator[None]:
    """The local marketplace for as long as the block runs, unless somebody else's answers or it is somewhere else."""
    parts = urlsplit(settings.marketplace_url)
    if "marketplace" not in settings.providers or parts.hostname not in LOOPBACK:
        yield
        return
    folder, port = state_folder(settings), parts.port or 80
    found = _answers(settings.marketplace_url)
    process = _left_behind(folder, port) if found else _start(settings, folder, port)
    try:
        if process is not None and not found:
            _wait(settings, process)
        yield
    finally:
        if process is not None:
            _end(process)


def _start(settings: Settings, folder: Path, port: int) -> psutil.Process:
    import psutil

    command = [sys.executable, "-m", "app.cli", "marketplace", "--port", str(port)]
    if settings.marketplace_control:
        command.append("--control")
    command += ["--speed", str(settings.marketplace_speed)]
    with (folder / "marketplace.log").open("ab") as output:
        process = psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(settings),
            start_new_session=True,
        )
    (folder / PID_FILE).write_text(f"{process.pid}\n")
    return process


def _left_behind(folder: Path, port: int) -> psutil.Process | None:
    """The marketplace that an earlier process of this service started and, killed, could not end."""
    import psutil

    try:
        process = psutil.Process(int((folder / PID_FILE).read_text()))
        arguments = process.cmdline()
    except (OSError, ValueError, psutil.Error):
        return None
    return process if arguments[1:6] == ["-m", "app.cli", "marketplace", "--port", str(port)] else None


def _end(process: psutil.Process) -> None:
    import psutil

    try:
        process.terminate()
        process.wait(15.0)
    except psutil.NoSuchProcess:
        log.warning("the local marketplace has ended before; see marketplace.log")
    except psutil.TimeoutExpired:
        process.kill()


def _environment(settings: Settings) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_") or k == "ECHO2_VLLM_PYTHON"}
    return {
        **own,
        "ECHO2_STATE_DIR": str(settings.state_dir),
        # Not on the command line: other users of this computer can read that.
        "ECHO2_MARKETPLACE_API_KEY": marketplace_key(settings),
    }


def _wait(settings: Settings, process: psutil.Process) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(settings.marketplace_url):
        if not process.is_running() or process.status() == "zombie":
            raise Unavailable(
                f"the local marketplace ended as soon as it began; {settings.state_dir}/marketplace.log says why. If "
                "something else uses its port, set ECHO2_MARKETPLACE_URL to another one"
            )
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the local marketplace did not answer at {settings.marketplace_url} within {START_TIMEOUT_S:.0f} s"
            )
        time.sleep(0.1)


async def _alone(settings: Settings) -> None:
    """Raises Unavailable while another service uses the database: before its marketplace is taken for a leftover.

    Raises it, too, for a state folder that can't be made and a database that does not let us in.
    """
    try:
        state_folder(settings)
    except OSError as error:
        raise Unavailable(f"ECHO2_STATE_DIR: {settings.state_dir} can't be made: {error.strerror}") from error
    try:
        _open_sqlite(settings.database_url)
    except sqlite3.Error as error:
        raise Unavailable(f"ECHO2_DATABASE_URL: the database can't be used: {error}") from error
    database = Database(settings.database_url)
    try:
        await database.claim()
        async with database.connection() as connection:
            await connection.execute(text("SELECT 1"))
    except (OSError, SQLAlchemyError) as error:
        # What SQLAlchemy says itself has lines of advice for programmers.
        why = str(getattr(error, "orig", None) or error).partition("\n")[0]
        raise Unavailable(f"ECHO2_DATABASE_URL: the database can't be used: {why}") from error
    finally:
        await database.close()


def _check_store(settings: Settings) -> None:
    """Raises Unavailable for a folder that can't be the object store; whether S3 answers is found out later."""
    try:
        open_store(settings.object_store_url, endpoint_url=settings.s3_endpoint_url)
    except BadInput as error:
        raise Unavailable(f"ECHO2_OBJECT_STORE_URL: {error.detail}") from error


def _open_sqlite(url: str) -> None:
    """See whether a file is a database, where it is one. Not by the asynchronous driver, whose thread may outlive the
    loop that it has to tell of a failure. Raises sqlite3.Error."""
    parts = make_url(url)
    if parts.get_backend_name() == "sqlite" and parts.database:
        with closing(sqlite3.connect(parts.database)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master")


@contextmanager
def _addresses(settings: Settings) -> Iterator[list[socket.socket]]:
    """What is served, taken before anything starts: a service that nobody can reach must rent nothing.

    Raises Unavailable.
    """
    with ExitStack() as stack:
        listeners = []
        try:
            found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in found:
                listener = stack.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listeners.append(listener)
        except OSError as error:
            why = f"can't listen on {settings.host} port {settings.port}: {error.strerror}"
            raise Unavailable(f"ECHO2_HOST, ECHO2_PORT: {why}") from error
        yield listeners


class _Server(uvicorn.Server):
    """Tells when it answers (uvicorn says nothing of sockets that it was handed), and the application when it stops."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._application = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets=sockets)
        for listener in sockets or () if self.started else ():
            host, port = listener.getsockname()[:2]
            log.info("listening on %s port %s: %s", host, port, own_url(host, port))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is under way."""
        self._application.state.stopping = True
        await super().shutdown(sockets=sockets)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def serve(settings: Settings, announce: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT, then stop in order: the service first, the marketplace after it."""
    allow_open_files()
    asyncio.run(_alone(settings))
    _check_store(settings)
    # uvicorn raises the signal again when it has shut down; without a handler that would end us at once.
    signal.signal(signal.SIGTERM, _exit)
    with _addresses(settings) as listeners, embedded_marketplace(settings):
        app = create_app(settings, announce=announce)
        config = uvicorn.Config(app, log_level=settings.log_level, access_log=False, timeout_graceful_shutdown=5)
        server = _Server(config, app)
        try:
            server.run(sockets=listeners)
        except KeyboardInterrupt:
            # uvicorn has shut down in order and tells why.
            return
        except SystemExit:
            # Its own way to say that the start failed, with a status of its own.
            if server.started:
                raise
        if not server.started:
            raise Unavailable("the service did not start; the lines above say why")
