"""Whether a machine has the disk and the memory for a job, asked before anything is fetched but config.json.

Invariant: what can't fit is refused with both numbers in the reason, instead of failing in the middle of a download or
of a load; what is not known is not refused. Memory counts on the GPUs that the engine will use, not on those that idle.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.protocol.errors import Conflict, EchoError
from app.protocol.node import AssetRef, JoinAnswer
from app.protocol.startup import MachineFacts
from app.rollout_agent.assets import fetch_assets
from app.rollout_agent.client import NodeClient
from app.rollout_agent.config import AgentSettings
from app.rollout_agent.engines.vllm_command import Split, most_gpus, parallel_by_hand, split_of
from app.rollout_agent.facts import free_bytes

log = logging.getLogger(__name__)

CONFIG = "config.json"
CONFIG_TIMEOUT_S = 30.0
"""What does not come in that time is asked for again with the other files, and is not waited for here."""

SNAPSHOTS_KEPT = 2
"""`SnapshotStore` keeps the two newest; a third, or the delta that leads to it, arrives beside them."""
SPARE_BYTES = 256 * 1024 * 1024
"""Trajectories, logs, the engine's own files."""
HOST_SPARE = 1.1
GPU_SHARE = 0.92
"""Of a GPU's memory: the rest is the driver's."""
LEAST_CACHE = 0.05
"""Of a GPU's memory, for keys and values: with less nothing can be generated."""
PARAMETER_BYTES = {"gpu": 2, "cpu": 4}
"""bfloat16 on a GPU, float32 on a CPU."""


class Unfit(Conflict):
    """This machine can't do this job: not now, and not when it is rented again."""

    code = "unfit"
    title = "Unfit"


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of what is to be loaded; None where they are not known."""

    assets: Sequence[AssetRef]
    parameters: int | None
    snapshot_bytes: int | None

    @property
    def version_bytes(self) -> int:
        """Of one version on disk."""
        return self.snapshot_bytes or 2 * (self.parameters or 0)


def disk_needed(model: Model) -> int:
    """Bytes that the job takes on disk at its most, when nothing is there yet."""
    files = sum(asset.size for asset in model.assets)
    return files + (SNAPSHOTS_KEPT + 1) * model.version_bytes + SPARE_BYTES


def disk_short(model: Model, free: int, there: int, folder: Path) -> str:
    """What is lacking of the disk; empty if nothing is. `there`: bytes of this job that lie in `folder` already."""
    needed = disk_needed(model) - there
    if needed <= free:
        return ""
    return f"disk: needs {_gb(needed)}, has {_gb(free)} free at {folder}"


def memory_short(model: Model, facts: MachineFacts, *, on_gpu: bool, gpus_used: int) -> str:
    """What is lacking of the memory that weights need; empty if nothing is. `gpus_used`: over which they are spread."""
    if not model.parameters:
        return ""
    if not on_gpu:
        needed = round(HOST_SPARE * (PARAMETER_BYTES["cpu"] * model.parameters))
        if needed <= facts.memory_bytes:
            return ""
        return f"memory: the model needs {_gb(needed)}, this machine has {_gb(facts.memory_bytes)}"
    used = facts.gpus[:gpus_used]
    if not used:
        return ""
    needed = PARAMETER_BYTES["gpu"] * model.parameters
    usable = round((GPU_SHARE - LEAST_CACHE) * sum(gpu.memory_bytes for gpu in used))
    if needed <= usable:
        return ""
    return f"memory: the model needs {_gb(needed)} on GPUs, {len(used)} × {used[0].name} can take {_gb(usable)}"


def gpus_used(gpus: int, split: Split, settings: AgentSettings | None = None) -> int:
    """Over how many of `gpus` vLLM will spread a model; all of them where the user's own arguments see to that."""
    if settings is not None and parallel_by_hand(shlex.split(settings.vllm_args)):
        return gpus
    asked = settings.vllm_tensor_parallel if settings is not None else None
    return min(gpus, most_gpus(split, gpus) if asked is None else asked)


def split_in(folder: Path) -> Split:
    """What a model's config.json says of it; nothing where that can't be read."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        return split_of({**config, **(config.get("text_config") or {})}.get)
    except (OSError, ValueError, TypeError, AttributeError):
        return Split()


def fetched_split(
    client: NodeClient, assets: Sequence[AssetRef], folder: Path, loop: asyncio.AbstractEventLoop
) -> Split:
    """`split_in`, of a config.json that is fetched ahead of all others. For a thread other than that of `loop`."""
    config = [asset for asset in assets if asset.path == CONFIG]
    coming = asyncio.run_coroutine_threadsafe(fetch_assets(client, config, folder), loop)
    try:
        coming.result(CONFIG_TIMEOUT_S)
    except (EchoError, OSError, TimeoutError) as error:
        coming.cancel()
        log.info("%s did not come yet: %s", CONFIG, getattr(error, "detail", error))
        return Split()
    return split_in(folder) if config else Split()


def folder_bytes(folder: Path) -> int:
    """Bytes of the files under `folder`; 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def check(model: Model, facts: MachineFacts, folder: Path, free: int, *, on_gpu: bool, gpus_used: int) -> None:
    """Raises Unfit that says what is lacking."""
    short = disk_short(model, free, folder_bytes(folder), folder)
    short = short or memory_short(model, facts, on_gpu=on_gpu, gpus_used=gpus_used)
    if short:
        raise Unfit(short)


def check_job(
    joined: JoinAnswer, settings: AgentSettings, facts: MachineFacts, *, on_gpu: bool, split: Callable[[], Split]
) -> None:
    """As `check`, for a job that was joined. `split` is asked only where it may matter, and the rest has room."""
    folder, gpus = settings.agent_dir, len(facts.gpus)
    model = Model(joined.assets, joined.parameters, joined.snapshot_bytes)
    several = settings.engine == "vllm"
    used = gpus_used(gpus, Split(), settings) if several else 1
    check(model, facts, folder, free_bytes(folder), on_gpu=on_gpu, gpus_used=used)
    if several and on_gpu and used > 1:
        used = gpus_used(gpus, split(), settings)
        check(model, facts, folder, free_bytes(folder), on_gpu=on_gpu, gpus_used=used)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
