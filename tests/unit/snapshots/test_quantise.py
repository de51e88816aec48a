"""Snapshots in eight bits: what is in them, how near they are to the weights, and that deltas of them are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors import safe_open

from app.protocol.errors import BadInput, IntegrityError
from app.snapshots import Manifest, SnapshotStore, new_key, public_hex, sign
from app.snapshots.codec import decode, encode_full
from app.snapshots.manifest import TensorEntry, verify
from app.snapshots.quantise import chosen, levels_of, restored_state, scale_of

torch.set_num_threads(1)
KEY = new_key()
LEAF = 4096


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    embedding = random(50, 100)
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": random(77),  # an odd number of bf16 elements before the matrices
        "model.layers.0.up_proj.weight": random(90, 101),
        "model.layers.0.bias": random(90),
        "model.layers.0.down_proj.weight": random(64, 128),
        "lm_head.weight": embedding,
    }


MATRICES = ["model.layers.0.up_proj.weight", "model.layers.0.down_proj.weight"]


def make(root: Path) -> SnapshotStore:
    return SnapshotStore(root, job_id="j", public_key=public_hex(KEY), leaf_bytes=LEAF, chunk_bytes=LEAF * 4)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.gate_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.gate.weight", (64, 64), False),
        ("model.layers.0.mlp.router.weight", (64, 64), False),
        ("model.embed_tokens.weight", (1000, 64), False),
        ("lm_head.weight", (1000, 64), False),
        ("transformer.wte.weight", (1000, 64), False),
        ("a.weight", (64, 63), False),  # too small
        ("a.weight", (65, 65), False),  # odd
        ("a.weight", (4096,), False),
        ("a.weight", (4, 64, 64), False),
    ],
)
def test_which_tensors_are_quantised(name: str, shape: tuple[int, ...], wanted: bool) -> None:
    assert chosen(name, torch.zeros(shape)) is wanted


def test_halves_go_to_the_even_level_and_rows_have_scales_of_their_own() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [0.0] * 6, [0.0, 0.0, -254.0, 1.0, 3.0, 253.0]])
    scale = scale_of("w", weight)
    assert scale.tolist() == [1.0, 0.0, 2.0]
    assert levels_of(weight, scale).tolist() == [[127, 0, 2, 2, 0, -2], [0] * 6, [0, 0, -127, 0, 2, 126]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1)
)
def test_every_finite_weight_is_at_most_half_a_step_away(rows: list[list[float]]) -> None:
    weight = torch.tensor(rows, dtype=torch.float32)
    scale = scale_of("w", weight)
    levels = levels_of(weight, scale)
    exact = levels.double() * scale.double()[:, None]
    # A scale that is no normal number has lost digits: there the step itself is the bound.
    bound = torch.where(scale > 1e-36, 0.5001 * scale, 64 * 1.5e-45 + scale).double()[:, None]
    assert ((weight.double() - exact).abs() <= bound).all()
    assert levels.abs().max() <= 127


def test_the_payload_is_safetensors_and_comes_back_as_the_restored_weights(tmp_path: Path) -> None:
    weights = state()
    entries = encode_full(weights, tmp_path / "p", quantise="int8")
    assert [(e.name, e.dtype) for e in entries] == [
        *((f"{name}.scale", "F32") for name in MATRICES),
        ("model.embed_tokens.weight", "BF16"), ("model.norm.weight", "BF16"),
        (MATRICES[0], "I8"), ("model.layers.0.bias", "BF16"), (MATRICES[1], "I8"),
    ]  # fmt: skip
    data = (tmp_path / "p").read_bytes()
    assert len(data) == entries[-1].end
    with safe_open(tmp_path / "p", framework="pt") as file:
        levels, scale = file.get_tensor(MATRICES[0]), file.get_tensor(f"{MATRICES[0]}.scale")
    entry = next(e for e in entries if e.name == MATRICES[0])
    assert data[entry.begin : entry.end] == levels.numpy().tobytes()
    slow = np.float32(levels.numpy()) * scale.numpy()[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        got = decode(tmp_path / "p", dtype)
        assert got.keys() == weights.keys()
        assert torch.equal(got[MATRICES[0]], torch.from_numpy(slow).to(dtype))
        assert got["lm_head.weight"] is got["model.embed_tokens.weight"]
        assert torch.equal(got["model.norm.weight"], weights["model.norm.weight"].to(torch.bfloat16))
    assert not torch.equal(decode(tmp_path / "p")[MATRICES[0]].bfloat16(), weights[MATRICES[0]].bfloat16())


SCALED = torch.zeros(2, 4, dtype=torch.int8)


@pytest.mark.parametrize(
    "stored",
    [
        {"w": SCALED},
        {"w": SCALED, "w.scale": torch.ones(3)},
        {"w": SCALED, "w.scale": torch.ones(2, 1)},
        {"w": SCALED, "w.scale": torch.ones(2, dtype=torch.bfloat16)},
        {"w": SCALED.reshape(-1), "w.scale": torch.ones(8)},
    ],
)
def test_a_matrix_whose_scales_do_not_fit_is_not_restored(stored: dict[str, torch.Tensor]) -> None:
    with pytest.raises(IntegrityError, match="w has eight bits, and no scales that fit"):
        restored_state(stored, torch.float32)


def test_the_same_weights_give_the_same_bytes_and_others_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        encode_full(state(seed), tmp_path / name, quantise="int8")
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    weights = state()
    weights[MATRICES[1]][3, 4] = value
    with pytest.raises(BadInput, match="down_proj"):
        encode_full(weights, tmp_path / "p", quantise="int8")


def test_a_tensor_that_is_called_like_scales_is_named(tmp_path: Path) -> None:
    weights = state() | {f"{MATRICES[0]}.scale": torch.ones(3)}
    with pytest.raises(BadInput, match=r"up_proj\.weight\.scale"):
        encode_full(weights, tmp_path / "p", quantise="int8")


def test_the_signed_manifest_says_so_and_others_have_no_such_field(tmp_path: Path) -> None:
    store = make(tmp_path)
    plain = store.publish(state(), version=0, key=KEY).snapshot
    small = store.publish(state(), version=1, key=KEY, quantise="int8").snapshot
    assert b"quantisation" not in plain.document
    assert b"quantisation" in small.document
    assert verify(small.document, public_key=public_hex(KEY), job_id="j").quantisation == "int8"
    assert [t.name for t in small.manifest.weights] == [t.name for t in plain.manifest.tensors]


def entry(name: str, dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "begin": begin, "end": end}


SCALES, LEVELS = entry("w.scale", "F32", [2], 0, 8), entry("w", "I8", [2, 4], 8, 16)


@pytest.mark.parametrize(
    ("tensors", "quantisation", "complaint"),
    [
        ([SCALES, LEVELS], None, "doesn't say"),
        ([LEVELS], "int8", "no scale"),
        ([entry("w", "I8", [2, 4], 0, 8), entry("w.scale", "F32", [2], 8, 16)], "int8", "before it"),
        ([entry("w.scale", "F32", [1], 0, 4), LEVELS], "int8", "no scale"),
        ([entry("w.scale", "BF16", [2], 0, 4), LEVELS], "int8", "no scale"),
        ([SCALES, entry("w", "I8", [8], 8, 16)], "int8", "per row"),
        ([SCALES, entry("w", "I8", [2, 3], 8, 16)], "int8", "is not"),
    ],
)
def test_a_manifest_whose_scales_do_not_fit_is_refused(
    tmp_path: Path, tensors: list[dict[str, Any]], quantisation: str | None, complaint: str
) -> None:
    good = make(tmp_path).publish(state(), version=0, key=KEY, quantise="int8").snapshot.manifest
    fields = good.model_dump() | {"tensors": [SCALES, LEVELS]}
    assert Manifest.model_validate(fields).weights == [TensorEntry.model_validate(LEVELS)]
    with pytest.raises(ValidationError, match=complaint):
        Manifest.model_validate(fields | {"tensors": tensors, "quantisation": quantisation})


def test_a_delta_between_quantised_versions_gives_the_payload_bit_for_bit(tmp_path: Path) -> None:
    learner, node = make(tmp_path / "learner"), make(tmp_path / "node")
    weights = state()
    first = learner.publish(weights, version=0, key=KEY, quantise="int8")
    incoming = node.begin(first.snapshot.document)
    incoming_leaves(incoming, first.snapshot.payload_path)
    incoming.complete()
    weights |= {name: weights[name].clone() for name in MATRICES}
    weights[MATRICES[0]][7] *= 1.01
    weights[MATRICES[1]].view(-1)[::50] += 1e-3
    second = learner.publish(weights, version=1, key=KEY, quantise="int8")
    assert second.delta is not None, second.note
    assert second.delta.manifest.quantisation is None
    with pytest.raises(ValidationError, match="a delta has a base"):
        Manifest.model_validate(second.delta.manifest.model_dump() | {"quantisation": "int8"})
    incoming = node.begin_delta(second.delta.document, second.delta.whole)
    incoming_leaves(incoming, second.delta.path)
    got = incoming.complete()
    assert got.payload_path.read_bytes() == second.snapshot.payload_path.read_bytes()
    assert got.manifest.quantisation == "int8"
    one, two = decode(first.snapshot.payload_path), decode(got.payload_path)
    assert not torch.equal(one[MATRICES[0]], two[MATRICES[0]])


def test_a_version_of_the_other_kind_is_sent_whole(tmp_path: Path) -> None:
    store = make(tmp_path)
    store.publish(state(), version=0, key=KEY)
    made = store.publish(state(), version=1, key=KEY, quantise="int8")
    assert made.delta is None
    assert "tensors are not those of v0" in made.note


def test_another_quantisation_under_the_same_signature_is_refused(tmp_path: Path) -> None:
    manifest = make(tmp_path).publish(state(), version=0, key=KEY, quantise="int8").snapshot.manifest
    document = sign(manifest, KEY)
    assert b"int8" in document
    with pytest.raises(Exception, match="signature"):
        verify(document.replace(b"int8", b"int9"), public_key=public_hex(KEY), job_id="j")


def incoming_leaves(incoming: Any, path: Path) -> None:
    data = path.read_bytes()
    for n in range(incoming.manifest.leaves):
        incoming.write_leaf(n, data[n * LEAF : (n + 1) * LEAF])
