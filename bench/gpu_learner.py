"""The learner on a GPU: how fast, how near to a bare loop, and whether its numbers are those of other ways.

`python -m bench.gpu_learner [--device cuda] [--seconds 420] [--tiny]`, without network. Parts, each told on a line of
its own as soon as it is done, all together as one JSON object on the last line; one that fails tells its traceback:

* `float32`, `bfloat16`: the trainer's steps at a model of 135M parameters (random, the shape of SmolLM2), pair by pair
  with a bare torch loop over the same micro-batches; what a publish with its checkpoint takes from a step; how long
  the batch takes from Parquet to groups, as a share of the step.
* `compile`: `learner.compile` on, against off.
* `shards`: FSDP2 on one rank (NCCL on a GPU) against no FSDP, in float32: loss, gradient norm, weights.
* `adapter`: a LoRA step, if PEFT is there.
* `engine`: log-probs of tokens that the engine `transformers` sampled in its own precision, against the learner's of
  the same published weights, in float32 and as it trains in bfloat16: root mean square of the differences.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app.learner.buffer import Group
from app.learner.inbox import GroupReader
from app.learner.lora import add_adapter
from app.learner.microbatch import Row, collate, completion_logprobs, split
from app.learner.model import trained_weights
from app.learner.parallel import launch
from app.learner.parallel.ranks import ALONE
from app.learner.parallel.shards import shard
from app.learner.tiny import build_tokenizer
from app.learner.trainer import GRPOTrainer
from app.protocol.job import SamplingSpec
from app.protocol.learner import TrajectoryRef
from app.protocol.learner_spec import LoraSpec
from app.protocol.trajectory import encode
from app.snapshots.manifest import new_key, public_hex
from app.snapshots.store import SnapshotStore
from bench.gpu_common import TINY, Bare, Bench, Result, Size, clean, rows_of


def steps(bench: Bench, precision: str) -> Result:
    """Trainer against bare loop, a publish beside a step, and what loading takes."""
    trainer = GRPOTrainer(bench.model(), bench.spec(precision=precision))
    bare = Bare(bench, precision == "bfloat16")
    own, other, times = [], [], []
    for number in range(bench.size.pairs + 1):
        groups = bench.batch(str(number))
        if number % 2:
            other.append(bench.timed(partial(bare.step, groups)))
        own.append(bench.timed(lambda made=groups: times.append(trainer.step(made).times)))  # type: ignore[misc]
        if not number % 2:
            other.append(bench.timed(partial(bare.step, groups)))
    groups = bench.batch("tokens")
    tokens, step = sum(r.length for r in rows_of(groups)), statistics.median(own[1:])
    return {
        "step_s": step,
        "bare_step_s": statistics.median(other[1:]),
        "step_vs_bare": statistics.median(a / b for a, b in zip(own[1:], other[1:], strict=True)),
        "tokens_per_s": tokens / step,
        "tokens": tokens,
        "first_step_s": own[0],
        "laps_s": {name: statistics.median(t[name] for t in times[1:]) for name in times[0]},
        **publishing(bench, trainer, step),
        **loading(bench, groups, step),
    }


def publishing(bench: Bench, trainer: GRPOTrainer, step: float) -> Result:
    """A copy of weights and optimizer beside a step; then that and a real publish beside it."""
    shares, copies, slower, blocked = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        key = new_key()
        store = SnapshotStore(Path(folder), job_id="j", public_key=public_hex(key))
        for number in range(4):
            began = time.perf_counter()
            state = trainer.snapshot()
            started = time.perf_counter() - began
            publish = threading.Thread(target=partial(store.publish, state.weights, version=number, key=key))
            if number >= 2:
                publish.start()
            done = trainer.step(bench.batch(f"p{number}"))
            shares.append((started + done.times["t_publish"]) / done.t_train)
            copies.append(bench.timed(lambda: len(trainer.snapshot().optimizer)))
            blocked.append({"start_s": started, "wait_s": done.times["t_publish"]})
            slower.append(done.t_train / step)
            if number >= 2:
                publish.join(300)
            # Giving the last copy back is no part of beginning the next one.
            del state, publish
    return {
        "publish_blocks": blocked,
        "publish_block_share": statistics.median(shares),
        "copy_alone_s": min(copies),
        "step_with_copy_vs_without": statistics.median(slower[:2]),
        "step_with_publish_vs_without": statistics.median(slower[2:]),
    }


class Memory:
    """An object store with one object."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def get(self, key: str, most: int | None = None) -> bytes:
        """The object."""
        return self.data


def loading(bench: Bench, groups: list[Group], step: float) -> Result:
    """From a Parquet file to groups, of the batch that a step takes."""
    from blake3 import blake3

    data = encode([r for g in groups for r in g.rollouts])
    reader = GroupReader(
        Memory(data),  # type: ignore[arg-type]
        lambda index: list(groups[index].rollouts[0].prompt_ids),
        group_size=bench.size.group, max_tokens=bench.size.completion, vocabulary=bench.size.vocabulary,
    )  # fmt: skip
    items = [g.work_item for g in groups]
    ref = TrajectoryRef(seq=1, key="k", size=len(data), blake3=blake3(data).hexdigest(), node_id="n", work_items=items)
    spent = min(bench.timed(lambda: reader.read(ref)) for _ in range(3))
    return {"load_s": spent, "load_share": spent / step}


def compiled(bench: Bench) -> Result:
    """Step seconds and loss with compiled layers, and without."""
    found: Result = {}
    for name, on in (("eager", False), ("compiled", True)):
        bench.rng = random.Random(2)
        trainer = GRPOTrainer(bench.model(), bench.spec(precision="bfloat16", compile=on))
        spent, losses = [], []
        for number in range(4):
            groups = bench.batch(f"{name}{number}")
            bench.wait()
            began = time.perf_counter()
            losses.append(trainer.step(groups).values["loss"])
            spent.append(time.perf_counter() - began)
        found[name] = {"first_step_s": spent[0], "step_s": min(spent[1:]), "losses": losses}
        clean(bench)
    return found | {"speedup": found["eager"]["step_s"] / found["compiled"]["step_s"]}


def sharded(bench: Bench) -> Result:
    """The same steps in float32 with and without FSDP2, on one rank."""
    told, weights = [], []
    for split_up in (False, True):
        bench.rng, model, spec = random.Random(3), bench.model(), bench.spec(precision="float32")
        if split_up:
            shard(model, spec.learner, ALONE)
        trainer = GRPOTrainer(model, spec)
        told.append([trainer.step(bench.batch(f"s{n}")[:4]).values for n in range(2)])
        weights.append(trainer.state().weights)
        copied = trainer.snapshot().weights
        assert all(torch.equal(copied[n], t) for n, t in weights[-1].items())
    apart = {
        name: max(abs(a[name] - b[name]) for a, b in zip(*told, strict=True))
        for name in ("loss", "grad_norm", "mismatch_kl")
    }
    furthest = max(float((t - weights[1][n]).abs().max()) for n, t in weights[0].items())
    return {"apart": apart, "weights_apart": furthest, "loss": told[0][0]["loss"], "same": apart["loss"] <= 1e-5}


def adapter(bench: Bench) -> Result:
    """A step that trains an adapter alone."""
    model = bench.model()
    add_adapter(model, LoraSpec(rank=16), name="m", seed=1)
    trainer = GRPOTrainer(model, bench.spec(precision="bfloat16", lora={"rank": 16}))
    spent = [bench.timed(partial(trainer.step, bench.batch(f"a{number}"))) for number in range(3)]
    return {"step_s": min(spent[1:]), "tensors": len(trainer.state().weights)}


def engine(bench: Bench) -> Result:
    """Publish, install, sample, and score the samples on the learner's side."""
    from app.rollout_agent.engines.base import GenRequest
    from app.rollout_agent.engines.transformers import TransformersEngine

    key, model = new_key(), bench.model()
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        store = SnapshotStore(Path(folder) / "snapshots", job_id="j", public_key=public_hex(key))
        # Sharper than random weights, so that log-probs are spread as those of a trained model.
        state = {n: t * (4.0 if "lm_head" in n or "embed" in n else 1.0) for n, t in trained_weights(model).items()}
        made = store.publish(state, version=1, key=key)
        sampler = TransformersEngine(device=str(bench.device))
        sampler.load(Path(folder))
        sampler.install(made.snapshot.payload_path, made.snapshot.manifest, 1)
    sampling = SamplingSpec(max_tokens=bench.size.completion)
    prompts = [[bench.rng.randrange(bench.size.vocabulary) for _ in range(bench.size.prompt)] for _ in range(16)]
    requests = [GenRequest(p, 4, i, sampling) for i, p in enumerate(prompts)]
    samples = []
    spent = bench.timed(lambda: samples.extend(sampler.generate(requests)))
    rows = [Row(prompts[i // 4], c.token_ids, c.logprobs, 0.0, [0] * len(c.token_ids)) for i, c in enumerate(samples)]
    model.load_state_dict({n: t.bfloat16().float() for n, t in state.items()}, strict=False)
    found: Result = {"sample_s": spent, "sampled": sum(len(c.token_ids) for c in samples)}
    for precision in ("float32", "bfloat16"):
        if precision == "bfloat16":
            shard(model, bench.spec(precision=precision).learner, ALONE)
        found[precision] = differences(bench, model, rows)
    return found


@torch.no_grad()
def differences(bench: Bench, model: Any, rows: list[Row]) -> Result:
    """The learner's log-probs minus those recorded."""
    apart = []
    for numbers in split([r.length for r in rows], bench.size.micro_batch_tokens):
        batch = collate([rows[i] for i in numbers], bench.device)
        apart.append((completion_logprobs(model, batch, 1.0) - batch.behaviour).double().cpu())
    whole = torch.cat(apart)
    kl = (whole.exp() - 1 - whole).mean()
    return {
        "rms": float(whole.square().mean().sqrt()),
        "mean": float(whole.mean()),
        "largest": float(whole.abs().max()),
        "mismatch_kl": float(kl),
    }


PARTS: dict[str, Callable[[Bench], Result]] = {
    "bfloat16": lambda bench: steps(bench, "bfloat16"),
    "shards": sharded,
    "engine": engine,
    "float32": lambda bench: steps(bench, "float32"),
    "adapter": adapter,
    "compile": compiled,
}


def guarded(bench: Bench, part: Callable[[Bench], Result]) -> Result:
    """What a part found, or how it failed: the other parts still run."""
    began = time.perf_counter()
    try:
        found = part(bench)
    except Exception:  # noqa: BLE001  a part that fails is a finding
        found = {"error": traceback.format_exc()[-3000:]}
    if bench.device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(bench.device) / 2**30
    clean(bench)
    return found | {"part_s": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Run the parts; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and batches for a smoke test")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin no part after so long")
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas between them")
    given = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if given.tiny:
        torch.set_num_threads(1)
    began, bench = time.perf_counter(), Bench(torch.device(given.device), TINY if given.tiny else Size())
    told: Result = {"torch": torch.__version__, "device": given.device}
    if bench.device.type == "cuda":
        told["gpu"] = torch.cuda.get_device_name(bench.device)
    for name in given.parts.split(","):
        late = time.perf_counter() - began > given.seconds
        told[name] = {"error": "not begun: out of time"} if late else guarded(bench, PARTS[name])
        print(json.dumps({name: told[name]}), flush=True)
    launch.leave(ALONE)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
