"""What the learner costs on top of the mathematics, at a model of 135M parameters.

* `step_vs_bare`: the trainer's step against a bare torch loop over the same rollouts: forward, loss, backward, clip,
  AdamW. Both are timed in turns, pair by pair, in processor time of the thread, and the median of the pairs' ratios is
  told: the machine may be busy.
* `publish_block_share`: what a publish with its checkpoint takes from the training thread, as a share of T_train: the
  start of the copy, and what the step then waits for it.
* `load_share`: from Parquet to tensors, for a batch of 2,000 rollouts: reading, checking, advantages, micro-batches.
  As a share of that batch's step, which is reckoned from the tokens per second that were measured.

Weights are random (Llama, the shape of SmolLM2-135M), in float32 on the CPU, one thread.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.learner.advantages import batch_advantages
from app.learner.buffer import Group, ReplayBuffer
from app.learner.inbox import GroupReader
from app.learner.microbatch import Row, collate, split, token_lags
from app.learner.optimizer import BETAS
from app.learner.trainer import GRPOTrainer
from app.protocol.job import JobSpec
from app.protocol.learner import TrajectoryRef
from app.protocol.trajectory import Rollout, encode
from app.storage.objects import ObjectInfo

VOCABULARY, PROMPT, COMPLETION = 49_152, 16, 32
STEP_GROUPS, GROUP = 2, 4
PAIRS = int(os.environ.get("PAIRS", "5"))
LOAD_ROLLOUTS, LOAD_GROUP, LOAD_PROMPT, LOAD_COMPLETION = 2_000, 8, 64, 640
SPEC = JobSpec.model_validate(
    {
        "model": "tiny",
        "task": {"name": "reasoning_gym", "params": {"dataset": "gcd"}},
        "budget_usd": "1",
        "learner": {"loss": "ppo_clip", "warmup_steps": 0},
    }
)


def model() -> LlamaForCausalLM:
    """The same random weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def group(name: str, rng: random.Random, size: int, prompt: int, completion: int) -> Group:
    """Rollouts of varied length; half of them right."""
    ids = [rng.randrange(VOCABULARY) for _ in range(prompt)]
    rows = []
    for i in range(size):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(completion // 2, completion))]
        logprobs = [-rng.uniform(9.0, 12.0) for _ in tokens]
        rows.append(Rollout(name, 0, i, ids, tokens, logprobs, [0], [0], float(i % 2), "stop"))
    return Group(name, tuple(rows))


class Bare:
    """The loop that anybody would write."""

    def __init__(self) -> None:
        self.model = model()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=SPEC.learner.learning_rate, betas=BETAS, weight_decay=0.0
        )

    def step(self, groups: Sequence[Group]) -> float:
        """Processor seconds."""
        began = time.thread_time()
        rows, signs = [r for g in groups for r in g.rollouts], []
        for g in groups:
            rewards = torch.tensor([r.reward for r in g.rollouts])
            signs += ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        width = max(len(r.prompt_ids) + len(r.completion_ids) for r in rows)
        ids = torch.zeros((len(rows), width), dtype=torch.long)
        mask, behaviour = torch.zeros((len(rows), width - 1)), torch.zeros((len(rows), width - 1))
        for i, r in enumerate(rows):
            start, end = len(r.prompt_ids), len(r.prompt_ids) + len(r.completion_ids)
            ids[i, :end] = torch.tensor([*r.prompt_ids, *r.completion_ids])
            mask[i, start - 1 : end - 1] = 1
            behaviour[i, start - 1 : end - 1] = torch.tensor(r.logprobs)
        first = PROMPT - 1
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=width - first).logits[:, :-1]
        keep = mask[:, first:].bool()
        chosen = torch.log_softmax(logits[keep], -1).gather(1, ids[:, first + 1 :][keep][:, None])[:, 0]
        advantage = torch.tensor(signs)[:, None].expand(-1, keep.shape[1])[keep]
        ratio = torch.exp(chosen - behaviour[:, first:][keep])
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / keep.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.thread_time() - began


def measure_steps() -> dict[str, float]:
    """Both loops in turns, each pair in the other order than the one before."""
    rng, trainer, bare = random.Random(1), GRPOTrainer(model(), SPEC), Bare()
    ratios, steps, blocks, tokens = [], [], [], 0
    for number in range(PAIRS + 1):
        groups = [group(f"{number}-{i}", rng, GROUP, PROMPT, COMPLETION) for i in range(STEP_GROUPS)]
        other = bare.step(groups) if number % 2 else None
        began = time.thread_time()
        trainer.step(groups)
        own = time.thread_time() - began
        other = bare.step(groups) if other is None else other
        if number == 0:
            continue  # allocation, and the optimizer's first step
        ratios.append(own / other)
        steps.append(own)
        tokens += sum(r_len(g) for g in groups)
    for number in range(3):
        began = time.perf_counter()
        state = trainer.snapshot()
        started = time.perf_counter() - began
        done = trainer.step([group(f"p{number}-{i}", rng, GROUP, PROMPT, COMPLETION) for i in range(STEP_GROUPS)])
        blocks.append((started + done.times["t_publish"]) / done.t_train)
        assert len(state.weights) > 0
        del state  # giving this copy back is no part of beginning the next one
    return {
        "step_vs_bare": statistics.median(ratios),
        "publish_block_share": statistics.median(blocks),
        "t_step": statistics.median(steps),
        "tokens_per_s": tokens / sum(steps),
    }


def r_len(made: Group) -> int:
    """Prompt and completion tokens of a group."""
    return sum(len(r.prompt_ids) + len(r.completion_ids) for r in made.rollouts)


class Memory:
    """An object store with one object."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def get(self, key: str, most: int | None = None) -> bytes:
        """The object."""
        return self.data

    def head(self, key: str) -> ObjectInfo:
        """Its size."""
        return ObjectInfo(key, len(self.data))


def measure_load() -> dict[str, float]:
    """Processor seconds from Parquet to the tensors of all micro-batches, the least of three times."""
    from blake3 import blake3

    rng = random.Random(2)
    groups = [group(f"g{i}", rng, LOAD_GROUP, LOAD_PROMPT, LOAD_COMPLETION) for i in range(LOAD_ROLLOUTS // LOAD_GROUP)]
    prompts = {g.work_item: list(g.rollouts[0].prompt_ids) for g in groups}
    numbered = [
        Rollout(r.work_item, i, r.sample_index, r.prompt_ids, r.completion_ids, r.logprobs, [0], [0], r.reward, "stop")
        for i, g in enumerate(groups)
        for r in g.rollouts
    ]
    data = encode(numbered)
    reader = GroupReader(
        Memory(data),  # type: ignore[arg-type]
        lambda index: prompts[f"g{index}"],
        group_size=LOAD_GROUP,
        max_tokens=LOAD_COMPLETION,
        vocabulary=VOCABULARY,
    )
    ref = TrajectoryRef(
        seq=1, key="k", size=len(data), blake3=blake3(data).hexdigest(), node_id="n", work_items=list(prompts)
    )
    spent = []
    for _ in range(3):
        began = time.process_time()
        buffer = ReplayBuffer()
        for made in reader.read(ref):
            buffer.add(made)
        taken, _ = buffer.take(0, 3, len(groups))
        advantages = batch_advantages([[r.reward for r in g.rollouts] for g in taken], "group")
        rows = [
            Row(r.prompt_ids, r.completion_ids, r.logprobs, a, token_lags(r, 0))
            for g, values in zip(taken, advantages, strict=True)
            for r, a in zip(g.rollouts, values, strict=True)
        ]
        for batch in split([r.length for r in rows], 16_384):
            collate([rows[i] for i in batch], torch.device("cpu"))
        spent.append(time.process_time() - began)
    return {"load_s": min(spent), "load_tokens": float(sum(r_len(g) for g in groups))}


def main() -> None:
    """Print what was measured; the last line is one JSON object."""
    torch.set_num_threads(1)
    load = measure_load()
    print(f"2,000 rollouts, {load['load_tokens']:.0f} tokens: {load['load_s']:.2f} s from Parquet to tensors")
    steps = measure_steps()
    whole = load["load_tokens"] / steps["tokens_per_s"]
    print(f"a step of {steps['t_step']:.2f} s, {steps['tokens_per_s']:.0f} tokens/s; that batch takes {whole:.0f} s")
    result = {name: round(steps[name], 4) for name in ("step_vs_bare", "publish_block_share")}
    print(json.dumps(result | {"load_share": round(load["load_s"] / whole, 5)}))


if __name__ == "__main__":
    main()
