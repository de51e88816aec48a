"""What vLLM's answers mean, what its versions can do, and how it is started: pure functions."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.errors import BadInput, Unavailable
from app.rollout_agent.engines.adapter import AdapterConfig
from app.rollout_agent.engines.base import Completion, Load, Span, Tainted
from app.rollout_agent.engines.blueprint import Blueprint, read_blueprint
from app.rollout_agent.engines.vllm_answers import (
    certain,
    check_probe,
    check_prompt,
    check_report,
    completion_of,
    cut,
    load_of,
    prompt_logprobs,
    sampling_params,
    tokens_made,
)
from app.rollout_agent.engines.vllm_command import (
    CPU_ALONE,
    EXPERTS,
    Split,
    VllmOptions,
    command,
    copies,
    environment,
    lora_rank,
    misfit,
    parallel_by_hand,
    split_of,
    tensor_parallel,
)
from app.rollout_agent.engines.vllm_features import LORA_ROUTES, ROUTES, features, missing_routes
from app.rollout_agent.engines.vllm_lanes import KEEPALIVE_S
from tests.unit.rollout_agent.tiny import write_model_files

PLAIN = Blueprint(tokenizer=None, adapter=None, layout={}, eos=(2,), vocabulary=100, split=Split(heads=12))
OPTIONS = VllmOptions(python="/venv/bin/python", device="cuda", work_dir=Path("/w"))


def answer(tokens: list[int], **changes: Any) -> dict[str, Any]:
    content = [{"token_id": t, "logprob": -0.1 * (i + 1)} for i, t in enumerate(tokens)]
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": len(tokens)}]
    choice = {"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": "stop", "weight_versions": spans}
    return {"choices": [{**choice, **changes}]}


def test_a_completion_has_its_tokens_logprobs_and_versions() -> None:
    made = completion_of(answer([7, 8, 9]))
    assert made.token_ids == [7, 8, 9]
    assert made.logprobs == pytest.approx([-0.1, -0.2, -0.3])
    assert made.spans == (Span(3, 0), Span(4, 2))
    assert completion_of(answer([7, 8, 9]), [Span(5, 0)]).spans == (Span(5, 0),)
    empty = completion_of(answer([], logprobs=None, finish_reason="abort", weight_versions=None))
    assert empty == Completion([], [], "abort", ())


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "error"},
        {"finish_reason": None},
        {"logprobs": None},
        {"logprobs": {"content": [{"token_id": 7, "logprob": -0.1}]}},
        {"logprobs": {"content": [{"token_id": t, "logprob": -0.1} for t in (7, 8, 10)]}},
        {"logprobs": {"content": [{"token_id": t, "logprob": float("nan")} for t in (7, 8, 9)]}},
        {"logprobs": {"content": [{"token_id": t, "logprob": 0.3} for t in (7, 8, 9)]}},
        {"weight_versions": None},
        {"weight_versions": [{"version": "default", "start": 0}]},
        {"weight_versions": [{"version": "3", "start": 1}]},
        {"weight_versions": [{"version": "3", "start": 0}, {"version": "4", "start": 3}]},
        {"weight_versions": [{"version": "3", "start": 0}, {"version": "4", "start": 0}]},
        {"token_ids": None},
    ],
)
def test_an_answer_of_another_form_is_no_completion(changes: dict[str, Any]) -> None:
    with pytest.raises(Unavailable):
        completion_of(answer([7, 8, 9], **changes))


def test_what_a_bad_version_sampled_is_cut_off() -> None:
    made = completion_of(answer([7, 8, 9]))
    assert cut(made, 4) == Completion([7, 8], made.logprobs[:2], "abort", (Span(3, 0),))
    assert cut(made, 3) == Completion([], [], "abort", ())
    assert cut(made, 9) == made


def test_only_what_is_sampled_without_bias_is_asked_for() -> None:
    asked = sampling_params(seed=-1, max_tokens=5, temperature=0.7, eos=[2, 9])
    assert (asked["top_p"], asked["top_k"], asked["min_p"]) == (1.0, 0, 0.0)
    assert asked["seed"] == 2**63 - 1
    assert asked["ignore_eos"]
    assert asked["stop_token_ids"] == [2, 9]
    for wrong in ({"temperature": 0.005}, {"temperature": 0.0011}, {"max_tokens": 0}):
        with pytest.raises(BadInput):
            sampling_params(**{"seed": 1, "max_tokens": 5, "temperature": 1.0, "eos": [2], **wrong})
    for ids in ([], [-1], [100]):
        with pytest.raises(BadInput):
            check_prompt(ids, 100)


def test_the_prompts_logprobs() -> None:
    found = {"prompt_logprobs": [None, {"8": {"logprob": -0.5}, "3": {"logprob": -0.1}}, {"9": {"logprob": -0.7}}]}
    assert prompt_logprobs(found, [7, 8, 9]) == [-0.5, -0.7]
    for ids in ([7, 8], [7, 8, 10]):
        with pytest.raises(Unavailable):
            prompt_logprobs(found, ids)
    with pytest.raises(Unavailable):
        prompt_logprobs({"prompt_logprobs": None}, [7, 8])


METRICS = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.125
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.0625
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 1234.0
vllm:generation_tokens_total{engine="1",model_name="m"} 1300.0
"""


def test_figures_come_from_the_engines_own_metrics() -> None:
    assert load_of(METRICS) == Load(running=5, waiting=7, cache_used=0.125, preemptions=4)
    assert load_of(METRICS.replace("0.0625", "0.5")).cache_used == 0.5, "of the fuller cache"
    assert tokens_made(METRICS) == 1234, "by each copy at least"
    assert tokens_made("") == 0
    with pytest.raises(Unavailable, match="kv_cache_usage_perc"):
        load_of(METRICS.replace("kv_cache", "other_cache"))
    with pytest.raises(Unavailable, match="num_requests_waiting"):
        load_of(METRICS.replace("7.0", "many"))


def test_a_load_counts_only_when_every_worker_filled_everything() -> None:
    good = {"read": 24, "missing": [], "short": []}
    check_report([good, good], 24)
    for reports in (
        [],
        [good, {**good, "missing": ["model.norm.weight"]}],
        [{**good, "short": ["model.layers.1.mlp: 5 of 9 elements"]}],
        [{**good, "read": 23}],
        [{}],
    ):
        with pytest.raises(Tainted):
            check_report(reports, 24)


def test_a_probe_holds_within_rounding_and_not_beyond() -> None:
    check_probe([-1.0, -2.0], [-1.04, -1.96])
    for found in ([-1.1, -2.1], [-1.0], [float("nan"), -2.0], [-9999.0, -2.0]):
        with pytest.raises(Tainted):
            check_probe(found, [-1.0, -2.0])


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.32.0", True), ("0.32.1+cpu", True), ("0.32.0rc1", True), ("0.33.0", False), ("1.0", False)],
)
def test_versions_that_have_what_is_needed(version: str, tested: bool) -> None:
    assert features(version).tested is tested


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("0.16.0", "pausing"),
        ("0.21.1", "spans"),
        ("0.31.9", "token endpoint"),
        ("dev", "no version number"),
        ("", "no v"),
    ],
)
def test_versions_that_lack_something_are_refused_by_name(version: str, lacks: str) -> None:
    with pytest.raises(BadInput, match=lacks):
        features(version)


def test_routes_are_looked_for_whatever_the_version_says() -> None:
    assert missing_routes(ROUTES, lora=False) == []
    assert missing_routes(ROUTES, lora=True) == list(LORA_ROUTES)
    assert missing_routes([r for r in ROUTES if r != "/pause"], lora=False) == ["/pause"]


SECRETS = """
HF_TOKEN HF_TOKEN_PATH HUGGING_FACE_HUB_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_PROFILE WANDB_API_KEY
OPENAI_API_KEY NVIDIA_API_KEY VLLM_API_KEY VLLM_S3_SECRET GITHUB_TOKEN PGPASSWORD DATABASE_URL HTTPS_PROXY https_proxy
ALL_PROXY SSH_AUTH_SOCK GOOGLE_APPLICATION_CREDENTIALS CONTAINER_API_KEY JUPYTER_TOKEN KUBECONFIG ECHO2_NODE_TOKEN
"""
NEEDED = """
PATH HOME LANG LC_ALL TMPDIR LD_LIBRARY_PATH LD_PRELOAD CUDA_VISIBLE_DEVICES CUDA_HOME NVIDIA_VISIBLE_DEVICES
NCCL_SOCKET_IFNAME VLLM_CACHE_ROOT VLLM_ATTENTION_BACKEND HF_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR
TOKENIZERS_PARALLELISM XDG_CACHE_HOME PYTHONUNBUFFERED
"""


def test_the_server_is_on_loopback_unbiased_and_its_key_on_no_command_line() -> None:
    line = command(replace(OPTIONS, extra_args=("--max-num-seqs", "3")), Path("/m"), 4711, PLAIN)
    told = {a: b for a, b in itertools.pairwise(line) if a.startswith("--")}
    assert (told["--host"], told["--port"]) == ("127.0.0.1", "4711")
    assert told["--logprobs-mode"] == "processed_logprobs"
    assert told["--generation-config"] == "vllm"
    assert told["--load-format"] == "dummy"
    assert told["--max-model-len"] == "auto"
    assert line[-2:] == ["--max-num-seqs", "3"], "the user's come last and win"
    env = environment(
        OPTIONS, {"ECHO2_JOIN_TOKEN": "t", "CONTAINER_API_KEY": "c", "PATH": "/bin", "ECHO2_ENGINE_KEY": "old"}, "k3y"
    )
    assert not {"ECHO2_JOIN_TOKEN", "CONTAINER_API_KEY"} & env.keys()
    assert env["ECHO2_ENGINE_KEY"] == "k3y"
    assert env["PATH"] == "/bin"
    assert env["VLLM_HOST_IP"] == "127.0.0.1"
    assert float(env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 10 * KEEPALIVE_S, "the client ends idle connections first"
    assert "k3y" not in " ".join(line)


@pytest.mark.parametrize("name", SECRETS.split())
def test_an_engine_is_told_no_secret_of_the_machine(name: str) -> None:
    assert name not in environment(OPTIONS, {name: "secret"}, "k3y")


@pytest.mark.parametrize("name", NEEDED.split())
def test_an_engine_keeps_what_its_libraries_go_by(name: str) -> None:
    assert environment(OPTIONS, {name: "as set"}, "k3y")[name] == "as set"


@pytest.mark.parametrize(("device", "gpus", "alone"), [("cpu", 1, True), ("cpu", 2, False), ("cuda", 1, False)])
def test_a_single_worker_on_a_cpu_has_no_process_that_spins_beside_the_scheduler(
    device: Literal["cpu", "cuda"], gpus: int, alone: bool
) -> None:
    line = command(replace(OPTIONS, device=device, gpus=gpus), Path("/m"), 1, PLAIN)
    told = {a: b for a, b in itertools.pairwise(line) if a.startswith("--")}
    assert told.get("--distributed-executor-backend") == (CPU_ALONE if alone else None)
    user = replace(OPTIONS, device=device, extra_args=("--distributed-executor-backend", "mp"))
    assert command(user, Path("/m"), 1, PLAIN)[-2:] == ["--distributed-executor-backend", "mp"]


def test_a_model_whose_config_names_no_architecture_gets_its_own() -> None:
    line = command(OPTIONS, Path("/m"), 1, replace(PLAIN, nameless="Qwen3ForCausalLM"))
    assert json.loads(line[line.index("--hf-overrides") + 1]) == {"architectures": ["Qwen3ForCausalLM"]}
    assert "--hf-overrides" not in command(OPTIONS, Path("/m"), 1, PLAIN)


def test_an_adapters_engine_has_the_base_weights_and_room_for_some_versions() -> None:
    adapted = replace(PLAIN, adapter=AdapterConfig(rank=24, scale=2.0, targets=frozenset({"q_proj"})))
    line = command(OPTIONS, Path("/m"), 1, adapted)
    assert line[line.index("--load-format") + 1] == "safetensors"
    assert line[line.index("--max-lora-rank") + 1] == "32"
    assert "--enable-lora" in line
    assert [lora_rank(r) for r in (1, 2, 8, 9, 512, 600)] == [1, 8, 8, 16, 512, 600]


QWEN_05B = Split(heads=14, kv_heads=2, widths=(896, 4864))
QWEN_15B = Split(heads=12, kv_heads=2, widths=(1536, 8960))
QWEN_7B = Split(heads=28, kv_heads=4, widths=(3584, 18944))
QWEN_30B_A3B = Split(heads=32, kv_heads=4, widths=(2048, 6144, 768))


@pytest.mark.parametrize(
    ("gpus", "split", "used"),
    [
        (8, QWEN_7B, 4),
        (3, QWEN_7B, 2),
        (8, QWEN_15B, 4),
        (6, QWEN_15B, 4),
        (8, QWEN_05B, 2),
        (8, QWEN_30B_A3B, 8),
        (3, Split(heads=32), 2),
        (8, Split(heads=28, kv_heads=4), 4),
        (8, Split(heads=12), 6),
        (8, Split(heads=7, kv_heads=1), 7),
        (8, Split(heads=8, kv_heads=8, widths=(64, 20)), 4),
        (6, Split(heads=6, kv_heads=6, widths=(60, 32)), 2),
        (5, Split(), 5),
        (1, QWEN_7B, 1),
        (0, QWEN_7B, 1),
    ],
)
def test_as_many_gpus_as_share_heads_and_widths_evenly(gpus: int, split: Split, used: int) -> None:
    assert tensor_parallel(replace(OPTIONS, gpus=gpus), split) == used


@pytest.mark.parametrize(
    ("asked", "device", "wrong"),
    [
        (2, "cuda", None),
        (4, "cuda", None),
        (4, "cpu", None),
        (3, "cuda", "28 attention heads can't be divided among 3 GPUs"),
        (7, "cuda", "4 key/value heads can't be divided among 7 GPUs, nor evenly copied to them"),
        (28, "cpu", "a layer of width 18944 can't be divided among 28 GPUs"),
        (28, "cuda", "this machine has 8 GPUs"),
    ],
)
def test_a_size_of_the_user_stays_or_is_refused(asked: int, device: Literal["cpu", "cuda"], wrong: str | None) -> None:
    options = replace(OPTIONS, gpus=8, tensor_parallel=asked, device=device)
    if wrong is None:
        assert tensor_parallel(options, QWEN_7B) == asked
    else:
        with pytest.raises(BadInput, match=f"TENSOR_PARALLEL is {asked}, but {wrong}; leave it unset, which gives 4"):
            tensor_parallel(options, QWEN_7B)


@given(st.integers(1, 64), st.integers(1, 16), st.lists(st.integers(1, 9999), max_size=3), st.integers(1, 16))
def test_the_size_that_is_chosen_fits_and_no_larger_one_does(heads: int, kv: int, widths: list[int], gpus: int) -> None:
    split = Split(heads * kv, kv, widths)
    used = tensor_parallel(replace(OPTIONS, gpus=gpus), split)
    assert split.heads is not None
    assert (split.heads % used, [width % used for width in widths]) == (0, [0] * len(widths))
    assert kv % used == 0 if kv >= used else used % kv == 0
    assert all(misfit(split, more) for more in range(used + 1, gpus + 1))


def test_what_gpus_share_is_read_from_a_config_as_far_as_it_tells() -> None:
    plain = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584, "intermediate_size": 18944}
    assert split_of(plain.get) == QWEN_7B
    experts = {"num_attention_heads": 32, "intermediate_size": 6144, "moe_intermediate_size": 768}
    assert split_of(experts.get) == Split(32, None, (6144, 768))
    for name in EXPERTS:
        assert split_of({**experts, name: 8}.get) == Split(32, None, (6144, 768), experts=True)
    assert not split_of({**plain, "num_experts": 0}.get).experts
    by_layer = {"num_key_value_heads": [4, 2], "intermediate_size": [512, 768]}
    assert split_of(by_layer.get) == Split(None, None, (512, 768))
    assert split_of({"intermediate_size": None, "num_attention_heads": "many"}.get) == Split()


def test_a_blueprint_tells_what_gpus_share(tmp_path: Path) -> None:
    assert read_blueprint(write_model_files(tmp_path)).split == Split(heads=2, kv_heads=2, widths=(32, 64))


@pytest.mark.parametrize(
    ("gpus", "asked", "extra", "said"),
    [
        (7, None, (), "4 of this machine's 7 GPUs are used, the others idle: 4 key/value heads can't be divided"),
        (7, 2, (), "6 of this machine's 7 GPUs are used, the others idle: ECHO2_VLLM_TENSOR_PARALLEL says so"),
        (8, None, (), ""),
        (8, 2, (), ""),
        (8, None, ("--pipeline-parallel-size=2",), ""),
        (4, None, (), ""),
    ],
)
def test_gpus_that_idle_are_told(
    gpus: int, asked: int | None, extra: tuple[str, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(OPTIONS, gpus=gpus, tensor_parallel=asked, extra_args=extra)
    line = command(options, Path("/m"), 1, replace(PLAIN, split=QWEN_7B))
    assert line[line.index("--tensor-parallel-size") + 1] == str(asked or 4)
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


QWEN_MOE = replace(QWEN_30B_A3B, experts=True)


@pytest.mark.parametrize(
    ("gpus", "asked", "extra", "split", "made"),
    [
        (8, None, (), QWEN_7B, 2),
        (8, 1, (), QWEN_7B, 8),
        (8, 2, ("--seed", "3"), QWEN_7B, 4),
        (7, None, (), QWEN_7B, 1),
        (7, 2, (), QWEN_7B, 3),
        (8, None, (), QWEN_15B, 2),
        (8, None, (), Split(heads=12), 1),
        (1, None, (), QWEN_7B, 1),
        (8, 2, (), QWEN_MOE, 1),
        (8, None, ("--data-parallel-size", "1"), QWEN_7B, 1),
        (8, None, ("--data_parallel_size=3",), QWEN_7B, 3),
        (8, None, ("-dp", "3"), QWEN_MOE, 3),
        (8, 2, ("-tp", "4"), QWEN_7B, 1),
        (8, 2, ("-dp", "many"), QWEN_7B, 1),
        (8, 2, ("-dp",), QWEN_7B, 1),
    ],
)
def test_gpus_that_are_left_hold_further_copies_unless_the_user_says_otherwise(
    gpus: int, asked: int | None, extra: tuple[str, ...], split: Split, made: int
) -> None:
    options = replace(OPTIONS, gpus=gpus, tensor_parallel=asked, extra_args=extra, device="cuda")
    assert copies(options, split) == made
    line = command(options, Path("/m"), 1, replace(PLAIN, split=split))
    ours = line[: len(line) - len(extra)]
    by_hand = parallel_by_hand(extra)
    assert ("--data-parallel-size" in ours) == (made > 1 and not by_hand)
    if "--data-parallel-size" in ours:
        assert ours[ours.index("--data-parallel-size") + 1] == str(made)


def test_a_model_of_experts_has_one_copy_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    options = replace(OPTIONS, gpus=6, device="cuda")
    command(options, Path("/m"), 1, replace(PLAIN, split=QWEN_MOE))
    assert "4 of this machine's 6 GPUs are used" in caplog.text
    assert "there are no two copies of a model of experts" in caplog.text


def test_the_likeliest_answer_is_asked_for_as_such_and_is_certain() -> None:
    asked = sampling_params(seed=1, max_tokens=5, temperature=1e-6, eos=[2])
    assert asked["temperature"] == 0.0
    drawn = certain(Completion([4, 2], [-0.7, -0.1], "stop", (Span(3, 0),)))
    assert drawn == Completion([4, 2], [0.0, 0.0], "stop", (Span(3, 0),))
