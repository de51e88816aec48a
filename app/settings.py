"""Every setting, in one place: environment `ECHO2_*`, or a TOML file named by `ECHO2_CONFIG` (the environment wins).

Invariant: a Settings that exists is usable as it stands (folders absolute, defaults filled in, URLs checked), and no
secret shows in its repr or in an error about it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from app.settings_file import CONFIG_VARIABLE, SettingsError, read_config
from app.settings_values import (
    BOOL,
    KEY,
    SECONDS,
    URL,
    DatabaseUrl,
    Environment,
    Folder,
    Host,
    HttpUrl,
    Number,
    ObjectStoreUrl,
    ProviderNames,
    Seconds,
    Token,
    TopicArns,
    Usd,
    WebhookSecret,
    Whole,
    own_url,
)

__all__ = ["PROVIDER_NEEDS", "Settings", "SettingsError", "load_settings", "require_providers"]

PREFIX = "ECHO2_"


class Settings(BaseSettings):
    """The settings. `description` is what an error says that the setting expects."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    host: Host = Field("127.0.0.1", description="an address or host name to listen on")
    port: Whole = Field(8080, ge=1, le=65_535, description="a port, 1…65535")
    state_dir: Folder = Field(
        default_factory=lambda: Path(os.path.abspath(".echo2")),
        description="a folder for the database, the objects and caches of the embedded default",
    )
    cache_dir: Folder = Field(
        default_factory=lambda data: data["state_dir"] / "cache", description="a folder for what can be fetched again"
    )
    database_url: DatabaseUrl = Field(
        default_factory=lambda data: f"sqlite+aiosqlite:///{data['state_dir']}/echo2.db",
        repr=False,
        description="postgresql://user:password@host/name or sqlite:////absolute/path.db",
    )
    object_store_url: ObjectStoreUrl = Field(
        default_factory=lambda data: (data["state_dir"] / "objects").as_uri(),
        description="file:///absolute/path or s3://bucket/prefix",
    )
    s3_endpoint_url: HttpUrl | None = Field(None, description=f"{URL}, for an S3 service other than AWS")
    public_url: HttpUrl = Field(
        default_factory=lambda data: own_url(data["host"], data["port"]),
        description=f"{URL}, under which nodes reach this service",
    )
    docs_enabled: bool = Field(True, description=f"{BOOL}: whether /docs and /openapi.json are served")
    metrics_enabled: bool = Field(True, description=f"{BOOL}: whether /metrics is served")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="one of debug, info, warning, error"
    )

    secret_key: Token | None = Field(
        None, description=f"what tokens are derived from, the same for all replicas; made once if not given, {KEY}"
    )
    admin_key: Token | None = Field(None, description=f"the first key of the REST API, {KEY}")
    webhook_secret: WebhookSecret | None = Field(
        None, description="a Standard Webhooks secret: whsec_ and 24…64 random bytes in base64"
    )
    notify_secret: WebhookSecret | None = Field(
        None,
        description="a Standard Webhooks secret that notifications are signed with: whsec_ and 24…64 random bytes in "
        "base64; without it webhook_secret is taken",
    )
    notify_allow_private: bool = Field(
        False, description=f"{BOOL}: whether notifications may go to private and loopback addresses"
    )
    aws_topic_arns: TopicArns = Field(
        default_factory=list,
        description="ARNs of SNS topics that may send notices, with commas between: arn:aws:sns:REGION:ACCOUNT:NAME",
    )

    fleet_id: str = Field(
        "default",
        pattern=r"^[a-z0-9][a-z0-9-]{0,31}$",
        description="1…32 small letters, digits or dashes; it marks our instances in the provider's account",
    )
    providers: ProviderNames = Field(
        ["marketplace"], min_length=1, description="names of providers with commas between, such as marketplace,vastai"
    )
    vastai_url: HttpUrl = Field("https://console.vast.ai", description=URL)
    vastai_api_key: Token | None = Field(None, description=f"a vast.ai API key, {KEY}")
    runpod_api_key: Token | None = Field(None, description=f"a RunPod API key, {KEY}")
    ec2_config: Folder | None = Field(None, description="a TOML file with region, image_id and more for EC2 spot")
    gcp_config: Folder | None = Field(None, description="a TOML file with project, boot_image and more for GCP spot")
    static_machines: Folder | None = Field(None, description="a TOML file that lists machines of your own")
    marketplace_url: HttpUrl = Field("http://127.0.0.1:8090", description=URL)
    marketplace_api_key: Token | None = Field(None, description=f"the local marketplace's key, {KEY}")
    marketplace_control: bool = Field(
        False, description=f"{BOOL}: whether the local marketplace takes orders to interrupt machines and move prices"
    )
    marketplace_speed: Number = Field(
        1, gt=0, le=1000, allow_inf_nan=False,
        description="the local marketplace's machines are so many times as fast as it says, above 0, at most 1000",
    )  # fmt: skip

    tick_seconds: Seconds = Field(10, description=f"time between two rounds of the loop, {SECONDS}")
    offer_refresh_seconds: Seconds = Field(30, description=f"age at which offers are read anew, {SECONDS}")
    reconcile_seconds: Seconds = Field(60, description=f"time between two looks at a provider's list, {SECONDS}")
    heartbeat_seconds: Seconds = Field(10, description=f"time between a node's heartbeats, {SECONDS}")
    heartbeat_timeout_seconds: Seconds = Field(
        30, validate_default=True, description=f"silence after which a node is lost, {SECONDS}"
    )
    join_timeout_seconds: Seconds = Field(600, description=f"time from renting until a node must join, {SECONDS}")
    settle_seconds: Seconds = Field(
        90, description=f"time after which a create call whose outcome is unknown has left nothing behind, {SECONDS}"
    )
    first_nodes: Whole = Field(
        3, ge=1, le=1000, description="machines that share a job's target until one of them was measured, 1…1000"
    )
    bubble_bound: Number = Field(
        0.05, ge=0, le=0.5, allow_inf_nan=False,
        description="share of its time that a learner may wait before capacity is added, 0…0.5; 0: Eq. 2 alone decides",
    )  # fmt: skip
    min_lease_seconds: Seconds = Field(
        120, description=f"time before which no lease is given back for its price or for surplus, {SECONDS}"
    )
    wind_down_seconds: Seconds = Field(
        120, description=f"time that it takes to end a job in order; its cost is always kept back, {SECONDS}"
    )
    max_usd_per_hour: Usd | None = Field(
        None, description="dollars an hour, above 0, that all jobs together may cost at most; without it no limit"
    )
    max_usd_total: Usd | None = Field(
        None, description="dollars, above 0, that all jobs together may ever cost; without it no limit"
    )
    min_credit_hours: Number = Field(
        1, ge=0, le=720, allow_inf_nan=False,
        description="hours, 0…720, that a provider's credit must last at what runs there: else nothing more is rented",
    )  # fmt: skip
    charges_seconds: Seconds = Field(3600, description=f"time between two looks at a provider's bill, {SECONDS}")
    lease_hours: Number = Field(
        6, gt=0, le=720, allow_inf_nan=False, description="hours, above 0 and at most 720, after which a lease ends"
    )

    task_dir: Folder | None = Field(
        None, description="a folder with the sources and the prompt files that jobs may name as their task"
    )

    agent_image: str = Field(
        "pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime",
        max_length=1024,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$",
        description="the container image that a rented machine boots, such as python:3.11-slim",
    )
    agent_image_gb: Number = Field(
        10, ge=0, le=1000, allow_inf_nan=False,
        description="GB, 0…1000, that a machine downloads to have its image, where it pulls one",
    )  # fmt: skip
    agent_package: str = Field(
        "echo2[agent]",
        max_length=1000,
        pattern=r"^[!-~][ -~]*$",
        description="a pip requirement, or an address pip can install from, for a bare machine",
    )
    agent_constraints: Folder | None = Field(
        None, description="a pip constraints file for bare machines; without it what this service itself runs with"
    )
    agent_engine: Literal["transformers", "vllm", "auto"] = Field(
        "transformers", description="transformers, vllm or auto: the engine that nodes generate with"
    )
    agent_env: Environment | None = Field(None, description="NAME=VALUE words for the environment of nodes, no secrets")
    agent_hf_endpoint: HttpUrl | None = Field(
        None, description=f"{URL}, of a mirror of the Hugging Face Hub that nodes fetch public weights from"
    )
    priors_file: Folder | None = Field(
        None, description="a file of JSON lines from `echo2 bench-node --json`: measured speed instead of a guess"
    )
    learner_relay_host: Host = Field("127.0.0.1", description="the address that the learner's relay listens on")
    learner_relay_announce: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="the host name or IPv4 address that nodes reach the learner's relay at; else where it listens",
    )
    learner_processes: Whole = Field(1, ge=1, le=64, description="processes of a learner started here, one a GPU, 1…64")
    learner_uplink_mbps: Number = Field(
        1000, gt=0, le=1_000_000, allow_inf_nan=False, description="Mbit/s that the learner can send"
    )
    broadcast_transport: Literal["chain", "star", "store", "auto"] = Field(
        "chain", description="chain, star, store or auto: how snapshots travel; auto takes the cheapest way"
    )
    store_egress_micros_gb: Whole = Field(
        0, ge=0, le=1_000_000_000, description="micro-dollars per GB read from the object store, for auto"
    )
    keep_trajectory_steps: Whole | None = Field(
        None, ge=0, le=1_000_000_000,
        description="learner steps, 0…1000000000, after which the files of rollouts are removed from the object store; "
        "without it all that were accepted stay",
    )  # fmt: skip
    max_upload_bytes: Whole = Field(64 << 20, ge=1024, le=1 << 32, description="bytes of one upload, 1024…4294967296")

    @field_validator("heartbeat_timeout_seconds")
    @classmethod
    def _after_a_heartbeat(cls, value: float, info: ValidationInfo) -> float:
        beat = info.data.get("heartbeat_seconds")
        if beat is not None and value <= beat:
            raise ValueError(f"must exceed ECHO2_HEARTBEAT_SECONDS, which is {beat:g}")
        return value

    @field_validator("task_dir", "agent_constraints")
    @classmethod
    def _is_there(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and not (value.is_dir() if info.field_name == "task_dir" else value.is_file()):
            raise ValueError(f"{value} is not there")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments win over the environment, and that over the file."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, read_config(settings_cls.model_fields))


PROVIDER_NEEDS: Mapping[str, str] = {
    "vastai": "vastai_api_key",
    "runpod": "runpod_api_key",
    "ec2": "ec2_config",
    "gcp": "gcp_config",
    "static": "static_machines",
}
"""Provider → the setting without which it can't be used."""


def load_settings(**overrides: object) -> Settings:
    """The settings of this process. `overrides` (from command-line options) win over everything.

    Raises SettingsError, one line, for a value that can't be used, an unknown key of the file, or an unreadable file.
    """
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        from_file = (
            set(read_config(Settings.model_fields))
            - set(overrides)
            - {n for n in Settings.model_fields if os.environ.get(_name(n))}
        )
        # A default that rests on a wrong value can't be made; that says nothing new.
        lines = [_explain(e, from_file) for e in error.errors() if e["type"] != "default_factory_not_called"]
        raise SettingsError("; ".join(dict.fromkeys(lines))) from None


def require_providers(settings: Settings, known: Collection[str]) -> None:
    """Hold the named providers against those that exist. Raises SettingsError for an unknown one, or a missing key."""
    for name in settings.providers:
        if name not in known:
            raise SettingsError(f"ECHO2_PROVIDERS: there is no provider {name!r}; expected some of {sorted(known)}")
        needed = PROVIDER_NEEDS.get(name)
        if needed is not None and getattr(settings, needed) is None:
            expected = Settings.model_fields[needed].description
            raise SettingsError(f"{_name(needed)}: is not set, but ECHO2_PROVIDERS names {name}; expected {expected}")


def _name(field: str) -> str:
    return PREFIX + field.upper()


def _explain(error: Mapping[str, Any], from_file: Collection[str]) -> str:
    """One error of pydantic as `ECHO2_X: problem; expected …`, without the value."""
    field = str(error["loc"][0]) if error["loc"] else ""
    problem = str(error["msg"]).removeprefix("Value error, ")
    if field not in Settings.model_fields:
        return f"{_name(field)}: there is no such setting"
    where = f" (in {os.environ.get(CONFIG_VARIABLE, '')!r})" if field in from_file else ""
    expected = Settings.model_fields[field].description
    return " ".join(f"{_name(field)}{where}: {problem[:1].lower()}{problem[1:]}; expected {expected}".split())
