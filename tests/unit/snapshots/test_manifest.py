"""Whose snapshots are installed: only this job's, only as they were signed."""

import json
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from pydantic import ValidationError

from app.protocol.errors import IntegrityError
from app.snapshots import Manifest, TensorEntry, load_or_create_key, new_key, public_hex, sign, verify

KEY = new_key()
PAYLOAD = bytes(range(256)) * 4 + b"x"


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "job_id": "j1",
        "version": 3,
        "payload_bytes": len(PAYLOAD),
        "payload_blake3": blake3(PAYLOAD).hexdigest(),
        "leaf_bytes": 256,
        "chunk_bytes": 512,
        "leaf_hashes": [blake3(PAYLOAD[i : i + 256]).hexdigest() for i in range(0, len(PAYLOAD), 256)],
        "tensors": [
            TensorEntry(name="a", dtype="BF16", shape=[2, 3], begin=8, end=20),
            TensorEntry(name="b", dtype="F32", shape=[], begin=20, end=24),
        ],
        "created_at": datetime(2026, 1, 2, tzinfo=UTC),
    }
    return Manifest.model_validate(fields | changes)


def test_a_signed_manifest_comes_back_as_it_was() -> None:
    original = manifest()
    assert verify(sign(original, KEY), public_key=public_hex(KEY), job_id="j1") == original
    assert (original.leaves, original.chunks, original.leaf_size(0), original.leaf_size(4)) == (5, 3, 256, 1)


def test_another_key_or_job_is_refused() -> None:
    document = sign(manifest(), KEY)
    with pytest.raises(IntegrityError, match="signature"):
        verify(document, public_key=public_hex(new_key()), job_id="j1")
    with pytest.raises(IntegrityError, match="job j1"):
        verify(document, public_key=public_hex(KEY), job_id="j2")


def test_a_changed_manifest_is_refused() -> None:
    document = json.loads(sign(manifest(), KEY))
    document["manifest"] = document["manifest"].replace('"version":3', '"version":4')
    with pytest.raises(IntegrityError, match="signature"):
        verify(json.dumps(document).encode(), public_key=public_hex(KEY), job_id="j1")


def test_a_signature_over_bare_text_is_no_manifest() -> None:
    text = manifest().model_dump_json()
    document = json.dumps({"manifest": text, "signature": KEY.sign(text.encode()).hex()}).encode()
    with pytest.raises(IntegrityError, match="signature"):
        verify(document, public_key=public_hex(KEY), job_id="j1")


def test_a_later_format_is_refused_even_when_signed() -> None:
    text = manifest().model_dump_json().replace('"format":1', '"format":2')
    signature = KEY.sign(b"echo2 snapshot manifest\n" + text.encode()).hex()
    document = json.dumps({"manifest": text, "signature": signature}).encode()
    with pytest.raises(IntegrityError, match="format"):
        verify(document, public_key=public_hex(KEY), job_id="j1")


@pytest.mark.parametrize("document", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"manifest": "{}", "signature": "00"}'])
def test_what_is_no_document_is_refused(document: bytes) -> None:
    with pytest.raises(IntegrityError):
        verify(document, public_key=public_hex(KEY), job_id="j1")


def test_an_oversized_document_is_refused_unread() -> None:
    with pytest.raises(IntegrityError, match="at most"):
        verify(b" " * (64 * 1024 * 1024 + 1), public_key=public_hex(KEY), job_id="j1")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"version": 2**31},
        {"payload_bytes": 0},
        {"leaf_hashes": manifest().leaf_hashes[:-1]},
        {"leaf_hashes": [*manifest().leaf_hashes, "0" * 64]},
        {"leaf_hashes": ["zz"] * 5},
        {"leaf_bytes": 0},
        {"chunk_bytes": 300},
        {"base": 2},
        {"kind": "delta"},
        {"tensors": [{"name": "a", "dtype": "BF16", "shape": [2], "begin": 0, "end": 5}]},
        {"tensors": [{"name": "a", "dtype": "BF16", "shape": [600], "begin": 0, "end": 1200}]},
        {"tensors": [{"name": "a", "dtype": "BF16", "shape": [2], "begin": b, "end": b + 4} for b in (0, 4)]},
        {
            "tensors": [
                {"name": n, "dtype": "BF16", "shape": [2], "begin": b, "end": b + 4} for n, b in (("a", 0), ("b", 3))
            ]
        },
        {"tensors": [{"name": n, "dtype": "BF16", "shape": [2], "begin": 0, "end": 4} for n in "ab"]},
        {"assets": [{"path": "../x", "size": 1, "blake3": "0" * 64}]},
        {"created_at": datetime(2026, 1, 2)},
        {"surprise": 1},
    ],
)
def test_an_inconsistent_manifest_does_not_exist(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        manifest(**changes)


def of_one_leaf(leaf_bytes: int, chunk_bytes: int) -> Manifest:
    return manifest(leaf_bytes=leaf_bytes, chunk_bytes=chunk_bytes, leaf_hashes=["0" * 64])


def test_leaves_and_chunks_have_the_documented_sizes_and_bounds() -> None:
    mib = 2**20
    fields = of_one_leaf(16 * mib, 1024 * mib).model_dump(exclude={"leaf_bytes", "chunk_bytes"})
    usual = Manifest.model_validate(fields)
    assert (usual.leaf_bytes, usual.chunk_bytes, usual.leaves_per_chunk) == (mib // 8, 16 * mib, 128)
    for leaf_bytes, chunk_bytes in ((16 * mib + 1, 16 * mib + 1), (16 * mib, 1040 * mib)):
        with pytest.raises(ValidationError, match="less than or equal"):
            of_one_leaf(leaf_bytes, chunk_bytes)


@pytest.mark.parametrize("base", [3, 4, None])
def test_a_delta_leads_on_from_an_older_version(base: int | None) -> None:
    step = {"base_blake3": "0" * 64, "result_bytes": 1, "result_blake3": "0" * 64}
    fields: dict[str, Any] = {"kind": "delta", "codec": "delta", "delta": step, "tensors": []}
    assert not manifest(base=2, **fields).whole
    with pytest.raises(ValidationError, match="a delta"):
        manifest(base=base, **fields)


ADAPTER = {"path": "adapter.json", "size": 2, "blake3": "0" * 64}


def signed(text: str) -> bytes:
    return json.dumps(
        {"manifest": text, "signature": KEY.sign(b"echo2 snapshot manifest\n" + text.encode()).hex()}
    ).encode()


def test_an_adapter_says_so_and_the_signature_covers_it() -> None:
    original = manifest(kind="adapter", assets=[ADAPTER])
    document = sign(original, KEY)
    found = verify(document, public_key=public_hex(KEY), job_id="j1")
    assert (found, found.kind, found.whole) == (original, "adapter", True)
    changed = document.replace(b'\\"kind\\":\\"adapter\\"', b'\\"kind\\":\\"full\\"')
    assert changed != document
    with pytest.raises(IntegrityError, match="signature"):
        verify(changed, public_key=public_hex(KEY), job_id="j1")


@pytest.mark.parametrize(
    ("kind", "assets", "says"),
    [
        ("adapter", [], "an adapter has adapter.json among its assets"),
        ("adapter", [{**ADAPTER, "path": "config.json"}], "an adapter has adapter.json among its assets"),
        ("full", [ADAPTER], "then the kind is adapter, and not full"),  # as versions of adapters were written before
    ],
)
def test_a_kind_that_its_assets_contradict_is_refused_even_when_signed(kind: str, assets: list, says: str) -> None:
    text = manifest().model_dump(mode="json") | {"kind": kind, "assets": assets}
    with pytest.raises(IntegrityError, match=says):
        verify(signed(json.dumps(text)), public_key=public_hex(KEY), job_id="j1")


def test_an_adapter_has_no_base() -> None:
    with pytest.raises(ValidationError, match="a whole version has no base"):
        manifest(kind="adapter", assets=[ADAPTER], base=2)


def test_the_key_is_kept_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first = load_or_create_key(path)
    assert public_hex(load_or_create_key(path)) == public_hex(first)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("not a key")
    with pytest.raises(IntegrityError, match="Ed25519"):
        load_or_create_key(path)
