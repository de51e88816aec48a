"""Learners with `placement: local`: started, watched, started again.

Invariant: at most one learner of a job is listened to (epochs fence the others); a job whose learner dies again and
again without a step in between fails with the reason, it does not burn money for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from app.fleet.core import Core
from app.storage.models import Job

log = logging.getLogger(__name__)

SILENCE_S = 20.0
MAX_STARTS_WITHOUT_STEP = 4
TAIL_BYTES = 64 << 10


class Supervisor:
    """Runs `python -m app.learner --job ID` on this machine."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._marks: dict[str, tuple[int, int]] = {}
        """Job → the highest step seen when a learner was found dead, and how often it had been started by then."""

    def workdir(self, job_id: str) -> Path:
        """Folder of the learner: checkpoints, log."""
        return self.core.settings.state_dir / "learners" / job_id

    def alive(self, job: Job) -> bool:
        """Whether a learner of this job lives: heard from lately, or its process is there."""
        process = self._processes.get(job.id)
        if process is not None:
            return process.returncode is None
        if job.learner_seen_at is None:
            return False
        quiet = self.core.clock() - max(job.learner_seen_at, self.core.started_at)
        return quiet < SILENCE_S or _is_learner(job.learner_pid, job.id)

    def exhausted(self, job: Job) -> bool:
        """Whether it was started too often without getting any further; a new highest step forgives earlier deaths."""
        step, starts = self._marks.get(job.id, (0, 0))
        if job.step > step:
            step, starts = job.step, job.learner_starts
            self._marks[job.id] = (step, starts)
        return job.learner_starts - starts >= MAX_STARTS_WITHOUT_STEP

    async def start(self, job_id: str) -> None:
        """Start a learner process whose output goes to `learner.log`."""
        folder = self.workdir(job_id)
        folder.mkdir(parents=True, exist_ok=True)
        settings = self.core.settings
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("ECHO2_")},
            "ECHO2_CONTROL_URL": settings.public_url,
            "ECHO2_LEARNER_TOKEN": self.core.secrets.learner_token(job_id),
            "ECHO2_JOB_ID": job_id,
            "ECHO2_STATE_DIR": str(settings.state_dir),
            "ECHO2_CACHE_DIR": str(settings.cache_dir),
            "ECHO2_OBJECT_STORE_URL": settings.object_store_url,
            "ECHO2_LEARNER_UPLINK_BYTES_PER_S": str(int(settings.learner_uplink_mbps * 1e6 / 8)),
            "ECHO2_LEARNER_RELAY_HOST": settings.learner_relay_host,
            "ECHO2_LEARNER_RELAY_ANNOUNCE": settings.learner_relay_announce or "",
        }
        if settings.s3_endpoint_url:
            env["ECHO2_S3_ENDPOINT_URL"] = settings.s3_endpoint_url
        with (folder / "learner.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *_ranks(settings.learner_processes), "-m", "app.learner", "--job", job_id,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True,
            )  # fmt: skip
        self._processes[job_id] = process
        log.info("learner of %s started as process %s", job_id, process.pid)

    def stop(self, job: Job) -> None:
        """End the learner of a job that is over."""
        process = self._processes.pop(job.id, None)
        pid = process.pid if process is not None and process.returncode is None else job.learner_pid
        if pid is not None and _is_learner(pid, job.id):
            os.kill(pid, signal.SIGTERM)

    def log_tail(self, job_id: str, lines: int = 5) -> str:
        """The last lines that the learner printed, for a reason that a person can read."""
        path = self.workdir(job_id) / "learner.log"
        try:
            with path.open("rb") as file:
                # It holds all that learners of this job ever said.
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return " | ".join(text.strip().splitlines()[-lines:])[-1000:]


def _ranks(count: int) -> list[str]:
    """What comes before the learner's module for several processes: torchrun, which ends all when one dies."""
    return [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]


def _is_learner(pid: int | None, job_id: str) -> bool:
    """Whether the process is this job's learner: a process id alone may belong to somebody else by now."""
    if pid is None:
        return False
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"app.learner" in words and job_id.encode() in words
