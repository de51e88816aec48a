"""What the parts of bench/gpu_learner.py share: a model and batches of a size, a clock, and the bare loop."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from app.learner.advantages import batch_advantages
from app.learner.buffer import Group
from app.learner.microbatch import Row, row_of, split
from app.learner.optimizer import BETAS
from app.protocol.job import JobSpec
from app.protocol.trajectory import Rollout


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    vocabulary: int = 49_152
    hidden: int = 576
    inner: int = 1536
    layers: int = 30
    heads: int = 9
    groups: int = 32
    group: int = 8
    prompt: int = 64
    completion: int = 512
    micro_batch_tokens: int = 32_768
    pairs: int = 5


TINY = Size(512, 48, 64, 2, 3, groups=3, group=4, prompt=8, completion=24, micro_batch_tokens=256, pairs=2)
Result = dict[str, Any]


class Bench:
    """Device, sizes, and what the parts share."""

    def __init__(self, device: torch.device, size: Size) -> None:
        self.device = device
        self.size = size
        self.rng = random.Random(1)

    def model(self) -> Any:
        """The same random weights each time, in float32."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        s = self.size
        config = LlamaConfig(
            vocab_size=s.vocabulary, hidden_size=s.hidden, intermediate_size=s.inner, num_hidden_layers=s.layers,
            num_attention_heads=s.heads, num_key_value_heads=3, max_position_embeddings=2048,
            tie_word_embeddings=True, dtype="float32", bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval().to(self.device)

    def spec(self, **learner: Any) -> JobSpec:
        """A job with these fields of `learner`."""
        given = {"loss": "ppo_clip", "warmup_steps": 0, "micro_batch_tokens": self.size.micro_batch_tokens, **learner}
        task = {"name": "reasoning_gym", "params": {"dataset": "gcd"}}
        return JobSpec.model_validate({"model": "m", "task": task, "budget_usd": "1", "learner": given})

    def batch(self, name: str) -> list[Group]:
        """Groups of varied lengths; half of the rollouts are right; log-probs near those of random weights."""
        s, rng, made = self.size, self.rng, []
        for i in range(s.groups):
            prompt = [rng.randrange(s.vocabulary) for _ in range(s.prompt)]
            rows = []
            for j in range(s.group):
                ids = [rng.randrange(s.vocabulary) for _ in range(rng.randint(s.completion // 2, s.completion))]
                logprobs = [-math.log(s.vocabulary) - abs(rng.gauss(0, 0.3)) for _ in ids]
                rows.append(Rollout(f"{name}-{i}", i, j, prompt, ids, logprobs, [0], [0], float(j % 2), "stop"))
            made.append(Group(f"{name}-{i}", tuple(rows)))
        return made

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds, the device's work included."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """As the trainer makes them for v0."""
    advantages = batch_advantages([[r.reward for r in g.rollouts] for g in groups], "group")
    pairs = zip(groups, advantages, strict=True)
    return [row_of(r, a, 0) for g, values in pairs for r, a in zip(g.rollouts, values, strict=True)]


class Bare:
    """The loop that anybody would write, over the micro-batches that the trainer cuts."""

    def __init__(self, bench: Bench, half: bool) -> None:
        self.bench, self.half, self.model = bench, half, bench.model()
        rate = bench.spec().learner.learning_rate
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)

    def step(self, groups: Sequence[Group]) -> None:
        """Forward, clipped loss, backward, clip, AdamW."""
        rows, device = rows_of(groups), self.bench.device
        total = sum(len(r.completion_ids) for r in rows)
        for numbers in split([r.length for r in rows], self.bench.size.micro_batch_tokens):
            part = [rows[i] for i in numbers]
            width, first = max(r.length for r in part), min(len(r.prompt_ids) for r in part) - 1
            ids, keep = torch.zeros((len(part), width), dtype=torch.long), torch.zeros((len(part), width - 1))
            behaviour, advantage = torch.zeros((len(part), width - 1)), torch.zeros((len(part), width - 1))
            for i, r in enumerate(part):
                ids[i, : r.length] = torch.tensor([*r.prompt_ids, *r.completion_ids])
                where = slice(len(r.prompt_ids) - 1, r.length - 1)
                keep[i, where], advantage[i, where] = 1, r.advantage
                behaviour[i, where] = torch.tensor(r.logprobs)
            ids, keep, behaviour, advantage = (t.to(device) for t in (ids, keep.bool(), behaviour, advantage))
            with torch.autocast(device.type, torch.bfloat16, enabled=self.half):
                logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=width - first).logits[:, :-1]
            chosen = torch.log_softmax(logits[keep[:, first:]].float(), -1)
            chosen = chosen.gather(1, ids[:, 1:][keep][:, None])[:, 0]
            ratio, a = torch.exp(chosen - behaviour[keep]), advantage[keep]
            torch.autograd.backward(-torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a).sum() / total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def clean(bench: Bench) -> None:
    """Give the device's memory back."""
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
