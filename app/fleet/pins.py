"""Exact versions for machines that install the agent: those that this service itself runs with. `constraints` reads a
file, `pins` metadata; the rest is pure.

Invariant: only what the agent needs is pinned, at versions that are installed here together; what is not here is left
to the package's own bounds. Local parts (`2.6.0+cpu`) are dropped: they name another build of the same version.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

from app.protocol.errors import Unavailable

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA = re.compile(r"extra\s*==\s*['\"]([A-Za-z0-9._-]+)['\"]")
BROUGHT_BY_VLLM = frozenset(
    ("huggingface-hub", "numpy", "setuptools", "starlette", "tokenizers", "torch", "transformers", "triton", "uvicorn")
)
"""vLLM is built for versions of its own."""

Requires = Callable[[str], tuple[str, Iterable[str]] | None]
"""Distribution → its version and requirements; None where it is not installed."""


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(root: str, extras: Iterable[str], requires: Requires) -> Mapping[str, str]:
    """Versions of everything that `root` with these extras needs, itself not among them."""
    found: dict[str, str] = {}
    wanted = [(normal(root), frozenset(map(normal, extras)))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        name, active = wanted.pop()
        known = None if (name, active) in seen else requires(name)
        seen.add((name, active))
        if known is None:
            continue
        version, requirements = known
        if name != normal(root):
            found[name] = version.partition("+")[0]
        for requirement in requirements:
            wanted += _needed(requirement, active)
    return dict(sorted(found.items()))


def _needed(requirement: str, active: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """What one requirement asks for; nothing if it belongs to an extra that is not wanted.

    Other markers (platform, Python) are not looked at: what is installed here shows what they say.
    """
    text, _, marker = requirement.partition(";")
    of_extras = {normal(extra) for extra in EXTRA.findall(marker)}
    name = NAME.match(text.strip())
    if name is None or (of_extras and not of_extras & active):
        return []
    inner = re.search(r"\[([^\]]*)\]", text)
    extras = frozenset(normal(e.strip()) for e in inner[1].split(",") if e.strip()) if inner else frozenset()
    return [(normal(name[0]), extras)]


def installed(name: str) -> tuple[str, Iterable[str]] | None:
    """From the metadata of this process's packages."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return found.version, found.requires or ()


def pins(engine: str, requires: Requires = installed) -> str:
    """The text of a constraints file for an agent with this engine."""
    found = _of_agent(requires)
    left_out = BROUGHT_BY_VLLM if engine == "vllm" else frozenset()
    return "".join(f"{name}=={version}\n" for name, version in found.items() if name not in left_out)


def constraints(engine: str, own: Path | None) -> str:
    """The operator's file, else what this service runs with. Raises Unavailable for a file that can't be read."""
    if own is None:
        return pins(engine)
    try:
        return own.read_text()
    except (OSError, UnicodeDecodeError) as error:
        # Anybody may ask, so the path is for the log only.
        log.error("ECHO2_AGENT_CONSTRAINTS %s can't be read: %s", own, error)
        raise Unavailable(
            "the file that ECHO2_AGENT_CONSTRAINTS names in the service's settings can't be read"
        ) from error


@functools.lru_cache(maxsize=4)
def _of_agent(requires: Requires) -> Mapping[str, str]:
    """Looked up once: anybody may ask, and what is installed here stays the same."""
    return closure("echo2", ["agent"], requires)
