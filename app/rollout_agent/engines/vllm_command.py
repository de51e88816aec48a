"""The command line and environment of the engine's server, over how many GPUs it spreads a model, and how many
copies of it there are. Pure, but for a warning of GPUs that idle.

Invariant: the server is bound to loopback, answers nobody without the key, samples what it is asked for and nothing
that the model's own generation_config would add, and reports the log-probs of the distribution that it sampled from. A
size that the model can't be split into is never asked of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.protocol.errors import BadInput
from app.rollout_agent.engines.inherited import inherited

if TYPE_CHECKING:  # what only counts GPUs has no need of PyTorch
    from app.rollout_agent.engines.blueprint import Blueprint

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
INSIDE = Path(__file__).parent / "vllm_inside"
"""The only folder of ours that the server's interpreter is shown."""
HOST_SCRIPT = INSIDE / "echo2_engine_host.py"
MODULE = "vllm.entrypoints.openai.api_server"
BASE_NAME = "echo2-base"
CPU_CACHE_BYTES = 256 * 1024 * 1024
IDLE_S = 60
"""For so long the server keeps a connection on which nothing happens."""
CPU_ALONE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""On a CPU vLLM puts even a single worker into a process of its own, and the two then spin while they wait for each
other: two cores have nothing left for the server and us. What it fears for, the workers' threads, are set below."""
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""What a config calls the widths of layers that are divided among GPUs."""
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts", "block_configs")
"""What a config calls the number of experts, or where it may be."""
MAX_LORAS = 4
"""Adapters in use at once: that of the newest version, and those under which long completions began."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How the engine is run. `python` has vLLM installed; it may be another than the agent's own."""

    python: str
    device: Literal["cpu", "cuda"]
    work_dir: Path
    on_swap: Literal["continue", "resubmit"] = "continue"
    gpus: int = 1
    tensor_parallel: int | None = None
    memory_share: float = 0.9
    max_model_len: int | None = None
    max_sequences: int = 256
    threads: int | None = None
    start_timeout_s: float = 900.0
    extra_args: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True)
class Split:
    """What of a model GPUs divide among themselves; what is not known is left out. The vocabulary is padded to fit."""

    heads: int | None = None
    kv_heads: int | None = None
    widths: Sequence[int] = ()
    experts: bool = False
    """Copies of such a model would not be copies: vLLM shares the experts out among them."""


def split_of(value: Callable[[str], Any]) -> Split:
    """From a config; `value` gives None for what it does not have."""
    heads, kv_heads = _sizes(value("num_attention_heads")), _sizes(value("num_key_value_heads"))
    widths = tuple(size for name in WIDTHS for size in _sizes(value(name)))
    experts = any(value(name) for name in EXPERTS)
    return Split(heads[0] if len(heads) == 1 else None, kv_heads[0] if len(kv_heads) == 1 else None, widths, experts)


def _sizes(value: Any) -> list[int]:
    """A config has a number, or one for each layer."""
    return [size for size in (value if isinstance(value, list | tuple) else [value]) if isinstance(size, int) and size]


def misfit(split: Split, gpus: int) -> str:
    """Why vLLM can't spread a model over so many GPUs; empty if it can."""
    if split.heads is not None and split.heads % gpus:
        return f"{split.heads} attention heads can't be divided among {gpus} GPUs"
    if split.kv_heads is not None and split.kv_heads % gpus and gpus % split.kv_heads:
        return f"{split.kv_heads} key/value heads can't be divided among {gpus} GPUs, nor evenly copied to them"
    wrong = next((width for width in split.widths if width % gpus), None)
    return "" if wrong is None else f"a layer of width {wrong} can't be divided among {gpus} GPUs"


def most_gpus(split: Split, gpus: int) -> int:
    """The largest number of `gpus` that a model can be spread over; at least 1."""
    return max(n for n in range(1, max(1, gpus) + 1) if not misfit(split, n))


def parallel_by_hand(arguments: Sequence[str]) -> bool:
    """Whether arguments of the user say how many GPUs are used; they win over what is reckoned here."""
    names = [argument.split("=")[0].replace("_", "-") for argument in arguments]
    return any(name.endswith("-parallel-size") or name in ("-tp", "-pp", "-dp") for name in names)


def tensor_parallel(options: VllmOptions, split: Split) -> int:
    """The size asked for; else the largest number of this machine's GPUs that the model can be spread over.

    Raises BadInput for a size that can't work.
    """
    asked = options.tensor_parallel
    if asked is None:
        return most_gpus(split, options.gpus)
    wrong = misfit(split, asked)
    if options.device == "cuda" and asked > options.gpus:
        wrong = f"this machine has {options.gpus} GPUs"
    if wrong:
        best = most_gpus(split, options.gpus)
        raise BadInput(f"ECHO2_VLLM_TENSOR_PARALLEL is {asked}, but {wrong}; leave it unset, which gives {best} here")
    return asked


def copies(options: VllmOptions, split: Split) -> int:
    """How many copies of the model share the requests: as many as the GPUs have room for, but one of a model of
    experts. Raises as `tensor_parallel`."""
    if parallel_by_hand(options.extra_args):
        return _copies_by_hand(options.extra_args)
    return 1 if split.experts else max(1, options.gpus // tensor_parallel(options, split))


def _copies_by_hand(arguments: Sequence[str]) -> int:
    """vLLM itself refuses what is no number."""
    found = 1
    for argument, following in pairwise([*arguments, ""]):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") in ("--data-parallel-size", "-dp"):
            with contextlib.suppress(ValueError):
                found = max(1, int(value or following))
    return found


def _warn_of_idle(options: VllmOptions, split: Split, used: int) -> None:
    if options.device != "cuda" or used >= options.gpus or parallel_by_hand(options.extra_args):
        return
    asked = options.tensor_parallel is not None
    why = "ECHO2_VLLM_TENSOR_PARALLEL says so" if asked else misfit(split, options.gpus)
    if split.experts:
        why += ", and there are no two copies of a model of experts"
    log.warning("%d of this machine's %d GPUs are used, the others idle: %s", used, options.gpus, why)


def command(options: VllmOptions, model: Path, port: int, blueprint: Blueprint) -> list[str]:
    """The whole command line. Arguments of the user come last, so that they win. Raises as `tensor_parallel`."""
    arguments = [options.python, str(HOST_SCRIPT), MODULE, "--model", str(model), "--served-model-name", BASE_NAME]
    arguments += ["--host", HOST, "--port", str(port), "--middleware", "echo2_engine_guard.Guard"]
    arguments += [
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
        "--generation-config",
        "vllm",
        "--runner",
        "generate",
    ]
    arguments += ["--logprobs-mode", "processed_logprobs"]
    arguments += ["--scheduling-policy", "priority", "--max-num-seqs", str(options.max_sequences)]
    workers, replicas = tensor_parallel(options, blueprint.split), copies(options, blueprint.split)
    _warn_of_idle(options, blueprint.split, workers * replicas)
    arguments += ["--tensor-parallel-size", str(workers)]
    if replicas > 1 and not parallel_by_hand(options.extra_args):
        arguments += ["--data-parallel-size", str(replicas)]
    arguments += ["--worker-extension-cls", "echo2_engine_worker.Extension"]
    arguments += ["--max-model-len", "auto" if options.max_model_len is None else str(options.max_model_len)]
    if options.device == "cpu":
        # A seeded request whose prompt comes in two steps ends the engine there: its random numbers can't be set back.
        arguments += ["--no-enable-chunked-prefill"]
        arguments += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)]
        if workers == 1:
            arguments += ["--distributed-executor-backend", CPU_ALONE]
    else:
        arguments += ["--dtype", "bfloat16", "--gpu-memory-utilization", str(options.memory_share)]
    if blueprint.nameless is not None:
        arguments += ["--hf-overrides", json.dumps({"architectures": [blueprint.nameless]})]
    if blueprint.adapter is None:
        arguments += ["--load-format", "dummy"]
    else:
        arguments += ["--load-format", "safetensors", "--enable-lora", "--max-loras", str(MAX_LORAS)]
        arguments += ["--max-cpu-loras", str(2 * MAX_LORAS), "--max-lora-rank", str(lora_rank(blueprint.adapter.rank))]
    return [*arguments, *options.extra_args]


def environment(options: VllmOptions, base: Mapping[str, str], key: str) -> dict[str, str]:
    """The server's environment: what it may have of the agent's (see `inherited`), and what vLLM needs."""
    kept = inherited(base)
    kept |= {
        "ECHO2_ENGINE_KEY": key,
        "PYTHONPATH": str(INSIDE),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_HOST_IP": HOST,
        "VLLM_LOOPBACK_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        # The client ends idle connections first: one that the server ends may have a request on its way.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(IDLE_S),
        "VLLM_LOGGING_LEVEL": base.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "HF_HUB_OFFLINE": "1",
    }
    if options.device == "cpu":
        # By itself it would bind its threads to cores, and every engine of a computer to the same ones.
        kept.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        kept["OMP_NUM_THREADS"] = str(options.threads or 1)
    return kept


def kind_of(version: str, dtype: str, machine: str, arguments: Sequence[str]) -> str:
    """What decides in which form an engine keeps its parameters. `machine`: the GPU's name, or cpu; `arguments`: the
    user's, of which a hash has to do."""
    extra = hashlib.sha256(json.dumps(list(arguments)).encode()).hexdigest()[:8] if arguments else "none"
    return f"vllm {version}, {dtype}, {machine}, arguments {extra}"


ROUNDING = ("--dtype", "--quantization", "-q", "--hf-overrides", "--config", "--additional-config")
"""Arguments that may make the engine keep weights in another form than the agent reckons with."""


def keeps_values(arguments: Sequence[str], config: Mapping[str, Any]) -> bool:
    """Whether other weights always are other parameters in the engine, going by the user's arguments and config.json:
    one that rounds or quantises what it gets may make the same of them."""
    names = {argument.split("=")[0].replace("_", "-") for argument in arguments}
    names |= {name.split(".")[0] for name in names}
    return names.isdisjoint(ROUNDING) and not config.get("quantization_config")


def lora_rank(rank: int) -> int:
    """The smallest of vLLM's maximum ranks that holds an adapter's; the adapter's own if it is beyond them all."""
    return next((allowed for allowed in (1, 8, 16, 32, 64, 128, 256, 320, 512) if rank <= allowed), rank)


def adapter_config(text: bytes) -> bytes:
    """PEFT's `adapter_config.json` out of the learner's description of its adapter."""
    found = json.loads(text)
    return json.dumps({"peft_type": "LORA", "bias": "none", **found}).encode()
