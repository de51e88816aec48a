"""A control service with its marketplace, both as processes, and what a user can do with them from outside.

Invariant: everything goes through REST, the command line, the marketplace's control side, signals to processes and,
for the books, a look into the database file; nothing of the service's inside is imported.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from standardwebhooks import Webhook

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / ".echo2" / "test-cache"
FINAL = ("succeeded", "failed", "cancelled", "budget_exhausted")
PATIENCE_S = 240.0
"""For a machine that is busy with other things; nothing waits so long in vain but a failure."""
T = TypeVar("T")


def free_port() -> int:
    """A port on loopback that nobody has now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait(condition: Callable[[], T | bool | None], what: str, seconds: float = PATIENCE_S) -> T:
    """The first true value of `condition`. An AssertionError that says what did not come true in time."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value  # type: ignore[return-value]
        assert time.monotonic() < deadline, f"within {seconds:.0f} s did not come true: {what}"
        time.sleep(0.25)


def small_job(**changes: Any) -> dict[str, Any]:
    """A job of a few seconds' work; `changes` replace whole parts or, given as objects, parts of parts."""
    spec: dict[str, Any] = {
        "name": "e2e",
        "model": "tiny",
        "task": {
            "name": "reasoning_gym",
            "params": {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5},
        },
        "budget_usd": "1.00",
        "stop": {"steps": 30},
        "staleness_budget": 3,
        "batch": {"prompts": 8, "group_size": 4},
        "sampling": {"max_tokens": 8},
        "learner": {"learning_rate": 1e-4, "eval_every": 1000, "eval_prompts": 16},
        "fleet": {"providers": ["marketplace"], "max_nodes": 2},
    }
    for key, value in changes.items():
        spec[key] = {**spec[key], **value} if isinstance(value, dict) and key in spec else value
    return spec


class Stage:
    """One control service on SQLite and a folder, its embedded marketplace with the control side open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.control_url = f"http://127.0.0.1:{free_port()}"
        self.market_url = f"http://127.0.0.1:{free_port()}"
        self.admin_key = "ek_" + secrets.token_urlsafe(32)
        self.market_key = secrets.token_urlsafe(32)
        self.webhook_secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(
            base_url=self.control_url,
            headers={"Authorization": f"Bearer {self.admin_key}"},
            timeout=httpx.Timeout(30.0, connect=5.0),
            trust_env=False,
        )
        self.market = httpx.Client(
            base_url=self.market_url,
            headers={"Authorization": f"Bearer {self.market_key}"},
            timeout=10.0,
            trust_env=False,
        )

    def environment(self, **changes: str) -> dict[str, str]:
        """What `echo2` runs with: a clock for minutes in place of days, no way to the Hugging Face hub."""
        own = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")}
        return {
            **own,
            "HF_HUB_OFFLINE": "1",
            "ECHO2_PORT": self.control_url.rpartition(":")[2],
            "ECHO2_STATE_DIR": str(self.state_dir),
            "ECHO2_CACHE_DIR": str(CACHE),
            "ECHO2_MARKETPLACE_URL": self.market_url,
            "ECHO2_MARKETPLACE_API_KEY": self.market_key,
            "ECHO2_MARKETPLACE_CONTROL": "true",
            "ECHO2_ADMIN_KEY": self.admin_key,
            "ECHO2_WEBHOOK_SECRET": self.webhook_secret,
            "ECHO2_TICK_SECONDS": "1",
            "ECHO2_RECONCILE_SECONDS": "1",
            "ECHO2_OFFER_REFRESH_SECONDS": "2",
            "ECHO2_HEARTBEAT_SECONDS": "0.5",
            "ECHO2_HEARTBEAT_TIMEOUT_SECONDS": "8",
            "ECHO2_JOIN_TIMEOUT_SECONDS": "120",
            "ECHO2_MIN_LEASE_SECONDS": "15",
            "ECHO2_WIND_DOWN_SECONDS": "20",
            "ECHO2_SETTLE_SECONDS": "8",
            # One chain: as much uplink as one machine can take.
            "ECHO2_LEARNER_UPLINK_MBPS": "500",
            **changes,
        }

    # processes

    def start(self) -> None:
        """`echo2 serve`, until it is ready."""
        with (self.folder / "serve.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.cli", "serve"],
                cwd=REPOSITORY,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        wait(self._ready, "the control service is ready")

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "serve.log").read_text(errors="replace")[-3000:]
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """SIGKILL the control service, and only it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        """End the control service in order."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(40)

    def close(self) -> None:
        """End everything that was started here, orphans too."""
        self.http.close()
        self.market.close()
        self.stop()
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(left, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self, *words: str) -> list[psutil.Process]:
        """Live processes of this stage (its state folder is in their environment) with these words as arguments."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                arguments = process.cmdline()
                ours = arguments and process.environ().get("ECHO2_STATE_DIR") == str(self.state_dir)
                if ours and all(word in arguments for word in words):
                    found.append(process)
        return found

    def learner(self, job_id: str) -> psutil.Process | None:
        """The learner process of a job."""
        return next(iter(self.processes("app.learner", job_id)), None)

    def cli(self, *arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """`echo2 ARGUMENTS` as a user with the key."""
        own = {k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")}
        user = {"ECHO2_URL": self.control_url, "ECHO2_API_KEY": self.admin_key}
        return subprocess.run(
            [sys.executable, "-m", "app.cli", *arguments],
            cwd=REPOSITORY,
            env={**own, **user, **env},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    # the control service

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of a good answer."""
        response = self.http.get(path, params=params)
        assert response.is_success, response.text
        return response.json()

    def submit(self, **changes: Any) -> str:
        """Post a small job; its id."""
        response = self.http.post("/v1/jobs", json=small_job(**changes))
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as read."""
        return dict(self.get(f"/v1/jobs/{job_id}"))

    def all(self, path: str) -> list[dict[str, Any]]:
        """All pages of a list."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = self.get(path, limit=1000, **({"cursor": cursor} if cursor else {}))
            rows += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return rows

    def events(self, job_id: str, *kinds: str) -> list[dict[str, Any]]:
        """The job's events, of some kinds if they are named."""
        return [e for e in self.all(f"/v1/jobs/{job_id}/events") if not kinds or e["kind"] in kinds]

    def nodes(self, job_id: str, state: str = "active") -> list[dict[str, Any]]:
        """The job's nodes in a state."""
        return [n for n in self.get(f"/v1/jobs/{job_id}/fleet")["nodes"] if n["state"] == state]

    def at_work(self, job_id: str, nodes: int, seconds: float = PATIENCE_S) -> list[dict[str, Any]]:
        """Wait until so many nodes are active and a step was trained since; the nodes."""
        wait(lambda: self._going(job_id) and len(self.nodes(job_id)) >= nodes, f"{nodes} nodes work", seconds)
        self.goes_on(job_id)
        return self.nodes(job_id)

    def goes_on(self, job_id: str, steps: int = 2, seconds: float = PATIENCE_S) -> None:
        """Wait until so many more steps were trained."""
        target = self._going(job_id)["step"] + steps
        wait(lambda: self._going(job_id)["step"] >= target, f"step {target}", seconds)

    def _going(self, job_id: str) -> dict[str, Any]:
        job = self.job(job_id)
        assert job["status"] not in FINAL, f"the job is over too early: {job['status']}, {job['status_reason']}"
        return job

    def ended(self, job_id: str, seconds: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for the job's end; the job."""
        wait(lambda: self.job(job_id)["status"] in FINAL, f"{job_id} ends", seconds)
        return self.job(job_id)

    def hook(self, message: dict[str, Any], **changes: str) -> httpx.Response:
        """Post a signed spot price; `changes` replace headers (`webhook_id` for `webhook-id`) after the signing."""
        body = json.dumps(message)
        message_id, now = changes.pop("webhook_id", f"msg_{secrets.token_hex(8)}"), datetime.now(UTC)
        stamp = datetime.fromtimestamp(int(changes.pop("at", now.timestamp())), UTC)
        headers = {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(stamp.timestamp())),
            "webhook-signature": Webhook(self.webhook_secret).sign(message_id, stamp, body),
            "content-type": "application/json",
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        return httpx.post(
            f"{self.control_url}/v1/hooks/spot-price", content=body, headers=headers, timeout=10.0, trust_env=False
        )

    # the marketplace

    def books(self) -> dict[str, Any]:
        """The marketplace's own books."""
        return dict(self.market.get("/_market/state").raise_for_status().json())

    def asked(self) -> dict[str, Any]:
        """What was asked of the marketplace."""
        return dict(self.market.get("/_market/requests").raise_for_status().json())

    def instances(self, job_id: str) -> dict[str, dict[str, Any]]:
        """Every instance that was ever made for a job, by its label."""
        labels = {row["label"] for row in self.rows("SELECT label FROM leases WHERE job_id = ?", job_id)}
        return {i["label"]: i for i in self.books()["instances"] if i["label"] in labels}

    def pid(self, job_id: str, node: dict[str, Any]) -> int:
        """The process id of a node's machine."""
        label = self.rows("SELECT label FROM leases WHERE id = ?", node["lease_id"])[0]["label"]
        return int(self.instances(job_id)[label]["pid"])

    def fault(self, kind: str, call: str = "create", count: int = 1) -> None:
        """Order a fault of the marketplace."""
        self.market.post("/_market/faults", json={"call": call, "kind": kind, "count": count}).raise_for_status()

    # the books

    def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        """A look into the database file."""
        with contextlib.closing(sqlite3.connect(f"file:{self.state_dir}/echo2.db?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute(query, parameters)]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Stage]:
    """A stage for as long as the block runs; an end in order leaves no marketplace behind, restarted or not."""
    stage = Stage(folder)
    try:
        stage.start()
        yield stage
        stage.stop()
        assert stage.processes("marketplace") == []
    finally:
        stage.close()
