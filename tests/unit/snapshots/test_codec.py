"""Weights go through a snapshot bit for bit."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from app.protocol.errors import BadInput, IntegrityError
from app.snapshots import SnapshotStore, decode, encode_full, new_key, public_hex

torch.set_num_threads(1)
KEY = new_key()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_values_survive_exactly_also_the_odd_ones(tmp_path: Path) -> None:
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3.14159, 65504.0])
    entries = encode_full({"odd": odd, "half": torch.arange(5, dtype=torch.float16)}, tmp_path / "p")
    back = decode(tmp_path / "p")
    assert same_bits(back["odd"], odd.to(torch.bfloat16))
    assert same_bits(back["half"], torch.arange(5).to(torch.bfloat16))
    raw = (tmp_path / "p").read_bytes()
    assert raw[entries[0].begin : entries[0].end] == odd.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert entries[-1].end == len(raw)


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    embedding = torch.randn(50, 8)
    entries = encode_full({"embed": embedding, "norm": torch.ones(8), "head": embedding}, tmp_path / "p")
    assert [e.name for e in entries] == ["embed", "norm"]
    back = decode(tmp_path / "p")
    assert set(back) == {"embed", "norm", "head"}
    assert back["head"] is back["embed"]


def test_a_square_matrix_and_its_transpose_are_two_tensors(tmp_path: Path) -> None:
    """They share memory and shape."""
    matrix = torch.arange(16.0).reshape(4, 4)
    encode_full({"a": matrix, "b": matrix.t()}, tmp_path / "p")
    back = decode(tmp_path / "p")
    assert torch.equal(back["a"].float(), matrix)
    assert torch.equal(back["b"].float(), matrix.t())


def test_layer_order_is_kept_and_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    state = {name: torch.randn(3) for name in ("z.embed", "a.layer", "m.head")}
    entries = encode_full(state, tmp_path / "p")
    assert [e.name for e in entries] == list(state)
    assert [e.begin for e in entries] == sorted(e.begin for e in entries)
    assert same_bits(load_file(tmp_path / "p")["m.head"], state["m.head"].to(torch.bfloat16))


def test_a_view_into_a_larger_tensor_is_stored_by_its_values(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    encode_full({"whole": whole, "column": whole[:, 1], "turned": whole.T}, tmp_path / "p")
    back = decode(tmp_path / "p")
    assert same_bits(back["column"], whole[:, 1].to(torch.bfloat16))
    assert same_bits(back["turned"].contiguous(), whole.T.contiguous().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "no tensors"),
        ({"ids": torch.arange(3)}, "int64"),
        ({"w": torch.empty(3, device="meta")}, "meta"),
        ({"__metadata__": torch.ones(1)}, "__metadata__"),
    ],
)
def test_what_is_no_weights_is_refused(state: dict[str, torch.Tensor], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says):
        encode_full(state, tmp_path / "p")


def test_a_payload_that_is_none_is_an_integrity_error(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"\x80\x04not a payload")
    with pytest.raises(IntegrityError):
        decode(tmp_path / "p")


@pytest.mark.parametrize(
    "tied", ["no JSON", "[]", '{"b": 1}', '{"b": "absent"}', '{"a": "a"}', '{"b": "a", "c": null}']
)
def test_a_payload_whose_tied_names_can_t_be_is_an_integrity_error(tied: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "p", metadata={"tied": tied})
    with pytest.raises(IntegrityError, match="tied"):
        decode(tmp_path / "p")


def test_a_payload_of_somebody_else_without_tied_names_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "p")
    assert list(decode(tmp_path / "p")) == ["a"]


@pytest.mark.parametrize("letters", range(1, 9))
def test_the_header_is_padded_to_a_multiple_of_eight(letters: int, tmp_path: Path) -> None:
    entries = encode_full({"a" * letters: torch.ones(3)}, tmp_path / "p")
    length = int.from_bytes((tmp_path / "p").read_bytes()[:8], "little")
    assert length % 8 == 0
    assert entries[0].begin == 8 + length


shapes = st.lists(st.integers(0, 7), max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    state_shapes=st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"), shapes, min_size=1, max_size=6
    ),
    leaf_bytes=st.integers(1, 300),
    leaves_per_chunk=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_any_state_dict_and_leaf_size_round_trips_leaf_by_leaf(
    state_shapes: dict[str, list[int]],
    leaf_bytes: int,
    leaves_per_chunk: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in state_shapes.items()}
    root = tmp_path_factory.mktemp("s")
    sender = SnapshotStore(
        root / "a",
        job_id="j",
        public_key=public_hex(KEY),
        leaf_bytes=leaf_bytes,
        chunk_bytes=leaf_bytes * leaves_per_chunk,
    )
    sent = sender.publish_full(state, version=0, key=KEY)
    receiver = SnapshotStore(root / "b", job_id="j", public_key=public_hex(KEY))
    incoming = receiver.begin(sent.document)
    reader = sender.open(0)
    assert reader is not None
    with reader:
        for n in range(sent.manifest.leaves):
            incoming.write_leaf(n, reader.read(n))
    got = incoming.complete()
    assert got.payload_path.read_bytes() == sent.payload_path.read_bytes()
    back = decode(got.payload_path)
    assert back.keys() == state.keys()
    assert all(same_bits(back[name], tensor.to(torch.bfloat16)) for name, tensor in state.items())
