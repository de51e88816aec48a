"""Small made-up things for the learner's tests."""

from __future__ import annotations

import random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from app.learner.buffer import Group
from app.protocol.job import JobSpec
from app.protocol.trajectory import Rollout

VOCABULARY = 50


def job(**changes) -> JobSpec:
    learner = {"learning_rate": 1e-2, "warmup_steps": 2, **changes.pop("learner", {})}
    return JobSpec.model_validate(
        {
            "model": "tiny",
            "task": {"name": "reasoning_gym", "params": {"dataset": "gcd"}},
            "budget_usd": "1",
            "learner": learner,
            **changes,
        }
    )


def random_model(seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=32,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            dtype="float32",
        )
        return Qwen3ForCausalLM(config).eval()


def group(name: str, *, version: int | list[int] = 0, rewards=(0.0, 1.0, 0.0, 1.0), seed: int = 0) -> Group:
    rng = random.Random(f"{name} {seed}")
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 9))]
    versions = version if isinstance(version, list) else [version] * len(rewards)
    made = []
    for i, reward in enumerate(rewards):
        size = rng.randint(1, 7)
        ids = [rng.randrange(VOCABULARY) for _ in range(size)]
        logprobs = [-rng.uniform(0.5, 5.0) for _ in ids]
        made.append(Rollout(name, 0, i, prompt, ids, logprobs, [versions[i]], [0], reward, "stop"))
    return Group(name, tuple(made))


def batch(number: int, prompts: int = 5) -> list[Group]:
    return [group(f"{number}-{i}", seed=number) for i in range(prompts)]
