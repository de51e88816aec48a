"""Settings of an agent, all from its environment.

Invariant: the join token is the only secret among them, and no repr or log shows it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field, HttpUrl, SecretStr, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.protocol.errors import BadInput
from app.rollout_agent.preemption.watch import Cloud

_URL = TypeAdapter(HttpUrl)
_KEPT = (
    *("--config", "--host", "--port", "--uds", "--api-key", "--middleware", "--root-path"),
    *("--model", "--served-model-name", "--load-format", "--worker-extension-cls", "--enable-lora"),
    *("--logprobs-mode", "--generation-config", "--override-generation-config", "--logits-processors"),
    *("--runner", "--scheduling-policy", "--enable-scale-out"),
)
"""Arguments of vLLM's server that what a node promises rests on: who may reach it, whose weights it has, and that what
it samples is of the whole distribution."""


_NEEDED = {
    "control_url": "the address of the control service, such as https://echo2.example.org",
    "join_token": "the one-time token that it gave to the machine",
}


def _kept(argument: str) -> str | None:
    """The one of ours that an argument would change; it may be shortened, as argparse allows."""
    name = argument.partition("=")[0].replace("_", "-")
    return next((kept for kept in _KEPT if len(name) > 3 and kept.startswith(name)), None)


class AgentSettings(BaseSettings):
    """`ECHO2_*` variables that an agent reads."""

    model_config = SettingsConfigDict(env_prefix="ECHO2_", extra="ignore", frozen=True)

    control_url: str
    """Base URL of the control service, without `/v1`."""
    join_token: SecretStr
    """One-time token; of no use after the join."""
    engine: str = "transformers"
    relay_port: int = Field(default=7070, ge=1, le=65_535)
    """Port of the relay inside the machine or container."""
    agent_dir: Path = Path("echo2-agent")
    """Work folder: model files and the newest snapshots."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    sim_tokens_per_s: float | None = Field(default=None, gt=0)
    """Slow the engine down to this many completion tokens a second: a simulated machine."""
    orphan_timeout_s: float = Field(default=900.0, gt=0)
    """End when the control service has been unreachable for so long."""
    gpu_name: str = Field(default="", max_length=200)
    """Name to give as the GPU's; default: what PyTorch finds."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine; default 1 on a CPU, PyTorch's own choice on a GPU."""
    vllm_python: Path = Path(sys.executable)
    """Interpreter that has vLLM; default: the agent's own."""
    vllm_tensor_parallel: int | None = Field(default=None, ge=1, le=64)
    """GPUs that share the model; default: as many of the machine's as can share it evenly."""
    vllm_memory_share: float = Field(default=0.9, gt=0, lt=1)
    """Share of each GPU's memory that vLLM takes; not used on a CPU."""
    vllm_max_model_len: int | None = Field(default=None, ge=1)
    """Prompt and completion, in tokens; default: what the model allows and the memory holds."""
    vllm_max_sequences: int = Field(default=256, ge=1, le=4096)
    """Completions side by side."""
    vllm_on_swap: Literal["continue", "resubmit"] = "continue"
    """What a new version does to running completions: they go on under it, or are cut and asked for again."""
    vllm_start_timeout_s: float = Field(default=900.0, gt=0)
    """So long vLLM may take to come up."""
    vllm_args: str = ""
    """Further arguments of vLLM's server, as a shell would read them; they win over ours but for those that may not be
    changed."""
    hf_endpoint: str = "https://huggingface.co"
    """The Hugging Face Hub, or a mirror of it, for public weights. It is never sent a token."""
    notices: Cloud = ""
    """Whose metadata service tells when the machine will be interrupted; empty: none does."""
    tune_network: bool = False
    """The machine's kernel is ours: turn slow start after idle off. Set on rented machines, never on your own."""

    @field_validator("vllm_args")
    @classmethod
    def _words(cls, value: str) -> str:
        for word in shlex.split(value):
            if kept := _kept(word):
                raise ValueError(f"{kept} is the agent's own: it may not be changed")
        return value

    @field_validator("control_url", "hf_endpoint")
    @classmethod
    def _http_url(cls, value: str, info: ValidationInfo) -> str:
        try:
            found = _URL.validate_python(value)
        except ValidationError:
            raise ValueError("must be an http(s) URL such as https://echo2.example.org") from None
        if info.field_name == "hf_endpoint" and (found.username or found.password or found.query):
            raise ValueError("must be an address alone: what needs a key is not public, and goes through the store")
        return value.rstrip("/")


def load_settings(**given: object) -> AgentSettings:
    """Settings from the environment; what is `given` wins. Raises BadInput with one line that names every wrong
    variable."""
    try:
        return AgentSettings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise BadInput("; ".join(_wrong(e["loc"], e["type"], e["msg"]) for e in error.errors())) from None


def _wrong(loc: tuple[int | str, ...], kind: str, message: str) -> str:
    name = "_".join(map(str, loc))
    said = f"is not set; expected {_NEEDED.get(name, 'a value')}" if kind == "missing" else message
    return f"ECHO2_{name.upper()}: {said}"


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """Where the relay binds and how peers reach it; `public_url` None: nobody can, so the node is a leaf."""

    host: str
    port: int
    public_url: str | None


def relay_address(port: int, env: Mapping[str, str]) -> RelayAddress:
    """The relay's addresses by the conventions of the marketplaces.

    `ECHO2_BIND_{port}` names the port to bind instead (machines that are processes on one computer, so only on
    loopback); `PUBLIC_IPADDR` and `VAST_TCP_PORT_{port}` are vast.ai's names of the machine's public side. Raises
    BadInput if one of them is not what it should be.
    """
    mapped = env.get(f"ECHO2_BIND_{port}")
    public_ip, public_port = env.get("PUBLIC_IPADDR"), env.get(f"VAST_TCP_PORT_{port}")
    public_url = None
    if public_ip and public_port:
        host = f"[{public_ip}]" if ":" in public_ip else public_ip
        public_url = f"http://{host}:{_port(f'VAST_TCP_PORT_{port}', public_port)}"
    if mapped:
        return RelayAddress("127.0.0.1", _port(f"ECHO2_BIND_{port}", mapped), public_url)
    return RelayAddress("0.0.0.0", port, public_url)


def _port(name: str, value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= 65_535:
        raise BadInput(f"{name} is {value[:20]!r}, expected a port number from 1 to 65535")
    return int(value)


@dataclass(frozen=True, slots=True)
class SelfDestruct:
    """How a vast.ai machine ends its own rental: `DELETE {url}/api/v0/instances/{instance}/`."""

    url: str
    instance: str
    key: str = field(repr=False)


def self_destruct(env: Mapping[str, str]) -> SelfDestruct | None:
    """The machine's own means to end itself (`ECHO2_VAST_URL`, else `VAST_URL`); None where it has none."""
    url = env.get("ECHO2_VAST_URL") or env.get("VAST_URL")
    instance, key = env.get("CONTAINER_ID"), env.get("CONTAINER_API_KEY")
    if not (url and instance and key):
        return None
    return SelfDestruct(url.rstrip("/"), instance, key)
