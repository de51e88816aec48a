"""The marks of a version: hashes of what an engine keeps, and whether they show in which order it keeps it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from app.protocol.errors import IntegrityError
from app.rollout_agent.engines.checksums import Mark
from app.rollout_agent.engines.marks import marks_of

GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
FUSED = "model.layers.0.mlp.gate_up_proj.weight"
NORM = "model.norm.weight"
MANY = 5000
"""More elements than are looked at first."""


def mark(path: Path, engine: str, **state: torch.Tensor) -> Mark:
    """The mark of one of the engine's parameters, of a version with these tensors."""
    names = {"gate": GATE, "up": UP, "norm": NORM}
    save_file({names[name]: tensor.to(torch.bfloat16) for name, tensor in state.items()}, path / "p")
    return marks_of(path / "p", [engine], torch.float32)[engine]


def sha(*values: torch.Tensor) -> str:
    whole = torch.cat([value.reshape(-1) for value in values]).to(torch.float32)
    return hashlib.sha256(whole.view(torch.uint8).numpy().data).hexdigest()


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


@pytest.mark.parametrize(
    ("gate", "up", "telling"),
    [
        (ones(2), ones(3), False),
        (ones(2), 2 * ones(3), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0]), True),
        (torch.tensor([2.0]), torch.tensor([2.0, 1.0]), True),
        (ones(0), ones(3), False),
        (ones(0), torch.tensor([1.0, 2.0]), True),
        (ones(2), ones(0), False),
        (torch.cat([ones(MANY), 2 * ones(1)]), ones(1), True),
        (ones(MANY), ones(MANY), False),
        (ones(0), ones(0), False),
    ],
)
def test_a_parameter_tells_its_order_unless_its_elements_are_all_alike(
    tmp_path: Path, gate: torch.Tensor, up: torch.Tensor, telling: bool
) -> None:
    assert mark(tmp_path, FUSED, gate=gate, up=up) == Mark(sha(gate, up), telling)


def test_every_element_counts_by_its_bits_in_the_engine_s_type(tmp_path: Path) -> None:
    long = torch.arange(MANY).remainder(7)
    other = long.clone()
    other[-1] += 1
    assert mark(tmp_path, NORM, norm=long) == Mark(sha(long))
    assert mark(tmp_path, NORM, norm=other).sha256 != sha(long)
    zero, minus = (mark(tmp_path, NORM, norm=torch.tensor([value, 1.0])) for value in (0.0, -0.0))
    assert zero.sha256 != minus.sha256


def test_tensors_that_no_parameter_is_made_of_have_marks_of_their_own(tmp_path: Path) -> None:
    state = {name: torch.randn(2, 3).to(torch.bfloat16) for name in (GATE, UP, NORM)}
    save_file(state, tmp_path / "p", metadata={"tied": json.dumps({"lm_head.weight": NORM})})
    found = marks_of(tmp_path / "p", [FUSED, "lm_head.weight", "model.rotary.inv_freq"], torch.bfloat16)
    assert found.keys() == {FUSED, "lm_head.weight"}
    apart = marks_of(tmp_path / "p", [UP], torch.bfloat16)
    assert apart.keys() == {GATE, UP, NORM}
    assert apart[NORM] == found["lm_head.weight"]


@pytest.mark.parametrize("content", [None, b"", b"no payload", (9).to_bytes(8, "little") + b"{not json"])
def test_a_payload_that_can_not_be_read_is_no_version(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "p").write_bytes(content)
    with pytest.raises(IntegrityError, match="the payload p can't be read"):
        marks_of(tmp_path / "p", [NORM], torch.float32)


def test_a_payload_whose_tied_names_are_no_map_is_no_version(tmp_path: Path) -> None:
    save_file({NORM: torch.ones(2)}, tmp_path / "p", metadata={"tied": "{"})
    with pytest.raises(IntegrityError, match="can't be read"):
        marks_of(tmp_path / "p", [NORM], torch.float32)
