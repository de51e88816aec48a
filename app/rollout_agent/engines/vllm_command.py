"""The command line and environment of the engine's server. Pure.

Invariant: the server is bound to loopback, answers nobody without the key, samples what it is asked for and nothing
that the model's own generation_config would add, and reports the log-probs of the distribution that it sampled from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from app.rollout_agent.engines.blueprint import Blueprint
from app.rollout_agent.engines.inherited import inherited

HOST = "127.0.0.1"
INSIDE = Path(__file__).parent / "vllm_inside"
"""The only folder of ours that the server's interpreter is shown."""
HOST_SCRIPT = INSIDE / "echo2_engine_host.py"
MODULE = "vllm.entrypoints.openai.api_server"
BASE_NAME = "echo2-base"
CPU_CACHE_BYTES = 256 * 1024 * 1024
CPU_ALONE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""On a CPU vLLM puts even a single worker into a process of its own, and the two then spin while they wait for each
other: two cores have nothing left for the server and us. What it fears for, the workers' threads, are set below."""
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


def tensor_parallel(options: VllmOptions, heads: int) -> int:
    """The size asked for; else the largest number of this machine's GPUs that divides the model's attention heads."""
    if options.tensor_parallel is not None:
        return options.tensor_parallel
    return max(n for n in range(1, max(1, options.gpus) + 1) if heads % n == 0)


def command(options: VllmOptions, model: Path, port: int, blueprint: Blueprint) -> list[str]:
    """The whole command line. Arguments of the user come last, so that they win."""
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
    workers = tensor_parallel(options, blueprint.heads)
    arguments += ["--tensor-parallel-size", str(workers)]
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
        "VLLM_LOGGING_LEVEL": base.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "HF_HUB_OFFLINE": "1",
    }
    if options.device == "cpu":
        # By itself it would bind its threads to cores, and every engine of a computer to the same ones.
        kept.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        kept["OMP_NUM_THREADS"] = str(options.threads or 1)
    return kept


def lora_rank(rank: int) -> int:
    """The smallest of vLLM's maximum ranks that holds an adapter's; the adapter's own if it is beyond them all."""
    return next((allowed for allowed in (1, 8, 16, 32, 64, 128, 256, 320, 512) if rank <= allowed), rank)


def adapter_config(text: bytes) -> bytes:
    """PEFT's `adapter_config.json` out of the learner's description of its adapter."""
    found = json.loads(text)
    return json.dumps({"peft_type": "LORA", "bias": "none", **found}).encode()
