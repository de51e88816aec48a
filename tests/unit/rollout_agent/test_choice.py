"""Which engine a machine gets that may choose."""

from __future__ import annotations

import pytest

from app.protocol.startup import GpuFacts, MachineFacts
from app.rollout_agent.choice import engine_for


@pytest.mark.parametrize(
    ("wanted", "gpus_gb", "on_gpu", "has_vllm", "chosen"),
    [
        ("auto", (24,), True, True, "vllm"),
        ("auto", (24, 80), True, True, "vllm"),
        ("auto", (24, 8), True, True, "transformers"),
        ("auto", (), True, True, "transformers"),
        ("auto", (24,), False, True, "transformers"),
        ("auto", (24,), True, False, "transformers"),
        ("vllm", (), False, False, "vllm"),
        ("transformers", (80,), True, True, "transformers"),
    ],
)
def test_the_choice(wanted: str, gpus_gb: tuple[int, ...], on_gpu: bool, has_vllm: bool, chosen: str) -> None:
    facts = MachineFacts(gpus=[GpuFacts(name="x", memory_bytes=gb * 2**30) for gb in gpus_gb])
    assert engine_for(wanted, facts, on_gpu=on_gpu, has_vllm=has_vllm) == chosen
