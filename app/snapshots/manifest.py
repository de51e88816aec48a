"""The manifest: what a snapshot, or the delta that leads to it, consists of; signed by the job's key.

Invariant: a Manifest that exists is consistent in itself (leaves cover the payload exactly, tensors lie inside it), and
one that `verify` returns was signed by the given key for the given job. The signature covers the exact text that
travels, so that no second implementation has to agree on a canonical JSON.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AwareDatetime, Field, ValidationError, model_validator

from app.protocol.base import Strict
from app.protocol.errors import IntegrityError

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
MAX_VERSION = 2**31 - 1
"""Trajectories hold versions as int32."""
MAX_LEAF_BYTES = 16 * 1024 * 1024
MAX_CHUNK_BYTES = 1024 * 1024 * 1024
LEAF_BYTES = 128 * 1024
CHUNK_BYTES = 16 * 1024 * 1024
MOST_LEAVES = 16 * 1024
"""Payloads of more than that many leaves get larger ones: a manifest stays below about 2 MB."""
SIGNED_PREFIX = b"echo2 snapshot manifest\n"
"""Put before the text that is signed: a signature of this key over anything else can't pass for a manifest."""
DTYPE_BYTES = {"BF16": 2, "F32": 4, "I8": 1}
SCALE = ".scale"
"""A quantised tensor `w` has its scales, one a row, in `w.scale`."""
ADAPTER_ASSET = "adapter.json"
"""Among the assets of versions of the kind `adapter`: rank, scale and layers, in PEFT's fields."""

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Kind = Literal["full", "adapter", "delta"]
"""full: all weights of a model. adapter: an adapter's weights alone, for a model that nodes have. delta: what leads to
a version of one of these kinds from another one."""


class TensorEntry(Strict):
    """One tensor: elements row-major at `begin` … `end` (byte offsets in the payload)."""

    name: str = Field(min_length=1, max_length=1000)
    dtype: Literal["BF16", "F32", "I8"]
    shape: list[Annotated[int, Field(ge=0)]]
    begin: int = Field(ge=0)
    end: int = Field(ge=0)

    @model_validator(mode="after")
    def _size(self) -> Self:
        if self.end - self.begin != math.prod(self.shape) * DTYPE_BYTES[self.dtype]:
            raise ValueError(f"tensor {self.name}: {self.dtype} of shape {self.shape} is not {self.begin}…{self.end}")
        return self


class AssetEntry(Strict):
    """A small file that goes with the model: config.json, tokenizer.json."""

    path: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    size: int = Field(ge=0)
    blake3: Hash


class DeltaOf(Strict):
    """What a delta needs and what it gives: `version`'s payload, `result_bytes` long, out of `base`'s."""

    base_blake3: Hash
    result_bytes: int = Field(ge=1, le=2**50)
    result_blake3: Hash


class Probe(Strict):
    """Tokens, and what the published weights say of them: `logprobs[i]` is the natural log-probability of
    `token_ids[i + 1]` after `token_ids[: i + 1]`, at temperature 1. Under an adapter, of the base model with it."""

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=2, max_length=1024)
    logprobs: list[Annotated[float, Field(le=0, allow_inf_nan=False)]]

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError("a probe has one log-prob for each token but the first")
        return self


class Manifest(Strict):
    """What a version consists of (kinds `full`, `adapter`), or what leads to it from version `base` (kind `delta`).

    `leaf_hashes[n]` is blake3 of payload bytes n·leaf_bytes … (n+1)·leaf_bytes. A delta's payload is the delta itself.
    """

    format: Literal[1] = 1
    job_id: str = Field(min_length=1, max_length=200)
    version: int = Field(ge=0, le=MAX_VERSION)
    kind: Kind = "full"
    base: int | None = Field(default=None, ge=0, le=MAX_VERSION)
    codec: Literal["safetensors", "delta"] = "safetensors"
    payload_bytes: int = Field(ge=1, le=2**50)
    payload_blake3: Hash
    leaf_bytes: int = Field(default=LEAF_BYTES, ge=1, le=MAX_LEAF_BYTES)
    chunk_bytes: int = Field(default=CHUNK_BYTES, ge=1, le=MAX_CHUNK_BYTES)
    leaf_hashes: list[Hash]
    tensors: list[TensorEntry]
    assets: list[AssetEntry] = Field(default_factory=list)
    created_at: AwareDatetime
    delta: DeltaOf | None = None
    """Of a delta only; the text of others doesn't have the field."""
    quantisation: Literal["int8"] | None = None
    """How I8 tensors and their scales, F32 tensors `{name}.scale`, were made. The text has it only if it isn't None."""
    probe: Probe | None = None
    """What an engine that has loaded this version must say. The text has it only if it isn't None."""

    @model_validator(mode="after")
    def _kind(self) -> Self:
        if self.whole and (self.base is not None or self.delta or self.codec != "safetensors"):
            raise ValueError("a whole version has no base, no delta and the codec safetensors")
        described = any(asset.path == ADAPTER_ASSET for asset in self.assets)
        if self.kind == "adapter" and not described:
            raise ValueError(f"an adapter has {ADAPTER_ASSET} among its assets")
        if self.kind == "full" and described:
            raise ValueError(f"{ADAPTER_ASSET} is among the assets: then the kind is adapter, and not full")
        if self.kind == "delta":
            others = self.tensors or self.assets or self.quantisation or self.probe
            if self.base is None or self.delta is None or self.codec != "delta" or others:
                raise ValueError("a delta has a base, the codec delta, what it gives, and nothing that its version has")
            if self.base >= self.version:
                raise ValueError("a delta's base must be an older version")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.chunk_bytes % self.leaf_bytes:
            raise ValueError("chunk_bytes must be a multiple of leaf_bytes")
        if len(self.leaf_hashes) != -(-self.payload_bytes // self.leaf_bytes):
            raise ValueError(f"{len(self.leaf_hashes)} leaf hashes do not cover {self.payload_bytes} bytes")
        if len({t.name for t in self.tensors}) != len(self.tensors):
            raise ValueError("a tensor name occurs twice")
        if any(t.end > self.payload_bytes for t in self.tensors):
            raise ValueError("a tensor lies outside the payload")
        if any(a.end > b.begin for a, b in itertools.pairwise(self.tensors)):
            raise ValueError("tensors must be in order and must not overlap")
        return self

    @model_validator(mode="after")
    def _quantised(self) -> Self:
        if any(t.dtype == "I8" for t in self.tensors) and self.quantisation is None:
            raise ValueError("a tensor has eight bits, and the manifest doesn't say that it is quantised")
        scales: dict[str, TensorEntry] = {}
        for tensor in self.tensors:
            if tensor.dtype == "F32":
                scales[tensor.name] = tensor
            if tensor.dtype != "I8":
                continue
            scale = scales.get(tensor.name + SCALE)
            if len(tensor.shape) != 2 or scale is None or scale.shape != tensor.shape[:1]:
                raise ValueError(f"tensor {tensor.name} has eight bits and no scale per row before it")
        return self

    @property
    def whole(self) -> bool:
        """Whether this is a version, and not a delta that leads to one."""
        return self.kind != "delta"

    @property
    def weights(self) -> list[TensorEntry]:
        """The tensors of the model: all but the scales of quantised ones."""
        scales = {t.name + SCALE for t in self.tensors if t.dtype == "I8"}
        return [t for t in self.tensors if t.name not in scales]

    @property
    def leaves(self) -> int:
        """Number of leaves."""
        return len(self.leaf_hashes)

    @property
    def chunks(self) -> int:
        """Number of chunks in the object store."""
        return -(-self.payload_bytes // self.chunk_bytes)

    @property
    def leaves_per_chunk(self) -> int:
        """Leaves in a whole chunk; the last chunk may have fewer."""
        return self.chunk_bytes // self.leaf_bytes

    def leaf_size(self, n: int) -> int:
        """Bytes of leaf n: `leaf_bytes`, fewer for the last one."""
        return min(self.leaf_bytes, self.payload_bytes - n * self.leaf_bytes)


def kind_of(assets: Iterable[AssetEntry]) -> Literal["full", "adapter"]:
    """The kind of a version that goes with these assets."""
    return "adapter" if any(asset.path == ADAPTER_ASSET for asset in assets) else "full"


def leaf_bytes_for(payload_bytes: int, at_least: int, at_most: int) -> int:
    """The size of the leaves of a payload: `at_least`, doubled while there would be more than MOST_LEAVES.

    `at_most`, the chunk, must be a multiple of the result; it bounds it, and so does MAX_LEAF_BYTES.
    """
    size = at_least
    while payload_bytes > size * MOST_LEAVES and size * 2 <= min(at_most, MAX_LEAF_BYTES) and at_most % (size * 2) == 0:
        size *= 2
    return size


_RARE = ("delta", "quantisation", "probe")
"""Fields that the text has only when they say something: readers that don't know them read all other manifests."""


class _Document(Strict):
    manifest: str
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")


def new_key() -> Ed25519PrivateKey:
    """A fresh signing key."""
    return Ed25519PrivateKey.generate()


def load_or_create_key(path: Path) -> Ed25519PrivateKey:
    """The key in `path` (32 raw bytes as hex, mode 0600), created when there is none. IntegrityError if unreadable."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        try:
            return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text("ascii").strip()))
        except ValueError as error:
            raise IntegrityError(f"{path} does not hold an Ed25519 key; remove it to make a new one") from error
    key = new_key()
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key.private_bytes_raw().hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return key


def public_hex(key: Ed25519PrivateKey) -> str:
    """The public half, 64 hex digits."""
    return key.public_key().public_bytes_raw().hex()


def sign(manifest: Manifest, key: Ed25519PrivateKey) -> bytes:
    """The signed document: {"manifest": the exact JSON text, "signature": hex}."""
    text = manifest.model_dump_json(exclude={name for name in _RARE if getattr(manifest, name) is None})
    signature = key.sign(SIGNED_PREFIX + text.encode()).hex()
    return _Document(manifest=text, signature=signature).model_dump_json().encode()


def verify(document: bytes, *, public_key: str, job_id: str) -> Manifest:
    """The manifest in a signed document. IntegrityError when size, form, signature, job or format is wrong."""
    if len(document) > MAX_DOCUMENT_BYTES:
        raise IntegrityError(f"the manifest document has {len(document)} bytes, at most {MAX_DOCUMENT_BYTES} may be")
    try:
        signed = _Document.model_validate_json(document)
    except ValidationError as error:
        raise IntegrityError(f"not a signed manifest: {_first(error)}") from error
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signed.signature), SIGNED_PREFIX + signed.manifest.encode())
    except ValueError as error:
        raise IntegrityError("the public key must be 64 hex digits (Ed25519)") from error
    except InvalidSignature as error:
        raise IntegrityError("the manifest's signature is not of this job's key") from error
    try:
        manifest = Manifest.model_validate_json(signed.manifest)
    except ValidationError as error:
        raise IntegrityError(f"the manifest is inconsistent: {_first(error)}") from error
    if manifest.job_id != job_id:
        raise IntegrityError(f"the manifest is of job {manifest.job_id}, not {job_id}")
    return manifest


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"[:300]
