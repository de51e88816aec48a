"""The model on the Hugging Face Hub: which of its files nodes take from there, and what then becomes of the store.

Invariant: nodes are sent to the Hub only for what it gives to anybody, without a token, at the very commit that the
learner has loaded. Everything else is in the store before a machine is rented.

Why large public files are not put into the store as well: nobody would read them there. Reading is what costs (some
$0.09 a GB at the large clouds, for every node again), and putting them there holds up the start of the job by the
learner's uplink. Where the Hub does fail a node, the control service says so, and they are put there then; the node
waits for that, and all later ones find them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.learner.files import hash_file
from app.protocol.hub import COMMIT, HubRef
from app.protocol.learner import AssetInfo

log = logging.getLogger(__name__)

MOST_BYTES = 50 * 1000**3
"""The Hub gives larger ones by its own protocol only, in chunks."""
ASK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is announced to nodes, and which of it goes into the store."""

    assets: list[AssetInfo]
    now: list[Path]
    """In the store before anything is rented."""
    later: list[Path]
    """On the Hub, and in the store once it is wanted there."""


def plan(name: str, folder: Path, files: Sequence[Path], *, endpoint: str | None = None) -> Plan:
    """Which way the files take that go with the model `name`, loaded from `folder`. Asks the Hub if there is need.

    `endpoint`: of the Hub; default: the one of its library, `HF_ENDPOINT`.
    """
    ref, large = hub_ref(name, folder), outsourced(files, folder)
    wrong = why_not_public(ref, large[0], endpoint=endpoint) if ref is not None and large else ""
    if wrong:
        log.warning("nodes get %s from the object store, not from the Hugging Face Hub: %s", name, wrong)
    later = large if ref is not None and not wrong else []
    infos = [
        AssetInfo(path=p.name, size=p.stat().st_size, blake3=hash_file(p), hub=ref if p in later else None)
        for p in files
    ]
    return Plan(infos, [p for p in files if p not in later], later)


def hub_ref(name: str, folder: Path) -> HubRef | None:
    """Where a model lies on the Hub that was loaded from `folder`; None if it is not from there.

    The Hub's library keeps each commit in a folder `models--{org}--{name}/snapshots/{commit}`.
    """
    org, slash, model = name.partition("/")
    if not slash or folder.parent.parent.name != f"models--{org}--{model}" or not re.match(COMMIT, folder.name):
        return None
    return HubRef(repo=name, revision=folder.name)


def outsourced(files: Sequence[Path], folder: Path) -> list[Path]:
    """Those of the model's files that are worth a way of their own: its weights."""
    return [
        path
        for path in files
        if path.parent == folder and path.suffix == ".safetensors" and path.stat().st_size <= MOST_BYTES
    ]


def why_not_public(ref: HubRef, path: Path, *, endpoint: str | None = None) -> str:
    """Asks the Hub for a file as a node will, without a token: why it would get another one, or none; else empty."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(ref.repo, path.name, revision=ref.revision, endpoint=endpoint)
    try:
        found = get_hf_file_metadata(url, token=False, timeout=ASK_TIMEOUT_S, endpoint=endpoint)
    except network_errors() as error:
        return first_line(error)
    if found.size != path.stat().st_size:
        return f"{path.name} has {found.size} bytes there and {path.stat().st_size} here"
    return ""


def network_errors() -> tuple[type[Exception], ...]:
    """What a call of the Hub's library raises: its own error, and those of its HTTP client, of which it has changed."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(k for k in HfHubHTTPError.__mro__ if issubclass(k, Exception) and k is not Exception)


def first_line(error: Exception) -> str:
    """An error in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]
