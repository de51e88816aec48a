"""Settings of a learner process, from the environment.

Invariant: a process that starts has every setting in range; the token never shows in a repr or a log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.protocol.errors import BadInput


class LearnerSettings(BaseSettings):
    """`ECHO2_` + the upper-case name of the field."""

    model_config = SettingsConfigDict(env_prefix="ECHO2_", extra="ignore", frozen=True)

    control_url: str = Field(pattern=r"^https?://")
    learner_token: SecretStr = Field(min_length=1)
    job_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
    state_dir: Path = Field(default_factory=lambda: Path(".echo2").absolute())
    cache_dir: Path | None = None
    """Models that are made or downloaded; default `state_dir`/cache."""
    object_store_url: str = ""
    """Default: the one that the control service names, else `file://` and `state_dir`/objects."""
    s3_endpoint_url: str | None = None
    learner_relay_host: str = "127.0.0.1"
    """Address that the relay listens on."""
    learner_relay_port: int = Field(default=0, ge=0, le=65_535)
    """Port that the relay listens on; 0: a free one."""
    learner_relay_announce: str = Field(default="", pattern=r"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])?(:[0-9]{1,5})?$")
    """Where nodes reach the relay, `host` or `host:port`; default: where it listens."""
    learner_uplink_bytes_per_s: float | None = Field(default=None, gt=0)
    learner_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of a training step."""
    learner_collective_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """How long a rank waits for the others in a step."""
    learner_cache_bytes: int = Field(default=1 << 30, ge=0)
    """Trajectory files that are kept on disk for a learner that starts again; 0: none."""

    learner_audit_device: str = Field(default="", pattern=r"^(cpu|cuda(:[0-9]+)?)?$")
    """Where audits compute (docs/trust.md): `cpu`, `cuda`, `cuda:1`; default: the first GPU, the CPU if the trained
    model is spread over several or there is none."""

    @model_validator(mode="after")
    def _absolute(self) -> Self:
        if not self.state_dir.is_absolute():
            raise ValueError("ECHO2_STATE_DIR must be an absolute path")
        return self

    @property
    def cache(self) -> Path:
        """Folder of models."""
        return self.cache_dir or self.state_dir / "cache"

    @property
    def objects_url(self) -> str:
        """URL of the object store."""
        return self.object_store_url or (self.state_dir / "objects").as_uri()

    @property
    def work_dir(self) -> Path:
        """Checkpoints, signing key and snapshots of the job."""
        return self.state_dir / "learners" / self.job_id


def load_settings(job_id: str | None = None, **given: str | None) -> LearnerSettings:
    """Settings from the environment; what is given and not None overrides it. Raises BadInput naming the setting."""
    wanted = {name: value for name, value in {"job_id": job_id, **given}.items() if value is not None}
    try:
        return LearnerSettings(**wanted)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = "ECHO2_" + "_".join(str(part) for part in first["loc"]).upper() if first["loc"] else "settings"
        raise BadInput(f"{name}: {first['msg']}") from error
