"""What an engine's checksums of its own parameters say of the version that was loaded. Pure.

Invariant: nothing is concluded from a checksum but what has to be so. The engine hashes its parameters as its kernels
want them, which may be the learner's tensors or not; so it is only held against

- the SHA-256 of what the learner's tensors make when they are put together as the engine does. If it is the same, that
  parameter is the learner's, bit for bit. How an engine keeps a parameter does not change while it runs: one that was
  the same once has to be so for every version ("exact");
- its own checksum of the version that was looked at before: what does not change must not move, and what changes must
  ("moved"). Of a parameter that several workers hold in parts, at least one part. Not of an engine that rounds what it
  gets (`lossless` False): there another tensor may give the same parameter;
- nothing, for a parameter whose bytes the engine keeps elsewhere: on a CPU, vLLM empties those of linear layers.

What has no counterpart by name (experts that are stacked, say) is held against the checksums layer by layer.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from app.rollout_agent.engines.base import Tainted

NOTHING = hashlib.sha256(b"").hexdigest()
"""Of a parameter without a byte."""
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Layers that an engine makes of several, one below the other, in this order."""
_COPY = re.compile(r"^dp\d+:")
_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class Mark:
    """SHA-256, hex, of the learner's tensors for one parameter. `telling`: their elements are not all alike; such a
    tensor is the same in every order, so that it shows nothing of how an engine keeps it."""

    sha256: str
    telling: bool = True


@dataclass(frozen=True, slots=True)
class Seen:
    """An engine at one look. `digests`: by the engine's own keys, which name the worker, too. `marks`: by parameter, of
    the version that it had; empty: weights of no version. `exact`: parameters that were the learner's, bit for bit."""

    digests: Mapping[str, str]
    marks: Mapping[str, Mark]
    exact: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The engine's parameters."""
        return frozenset(map(parameter, self.digests))

    @property
    def workers(self) -> int:
        """How many share a copy of the model, in all ways together."""
        return len({_of_one_copy(key).rpartition(":")[0] for key in self.digests})

    @property
    def digest(self) -> str:
        """SHA-256 of all of it: the same in engines of one kind that hold the same version in all of their copies,
        however many these are."""
        lines = "".join(
            f"{key} {sha}\n" for key, sha in sorted({(_of_one_copy(k), v) for k, v in self.digests.items()})
        )
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def coverage(self) -> str:
        """How much of the engine these checksums can speak of."""
        shas = _by_parameter(self.digests)
        blind = sum(set(found.values()) == {NOTHING} for found in shas.values())
        known = len(self.names & self.marks.keys())
        return f"of {len(shas)} parameters {known} known by name, {len(self.exact)} exact, {blind} kept elsewhere"


def parameter(key: str) -> str:
    """A parameter's name out of the engine's key: `dp0:pp0:pcp0:tp0:model.norm.weight`."""
    return key.rpartition(":")[2]


def _of_one_copy(key: str) -> str:
    """A key without the number of the model's copy: `pp0:pcp0:tp0:model.norm.weight`."""
    return _COPY.sub("", key)


def sources(engine: Collection[str], stored: Collection[str], tied: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Parameter → the tensors of a snapshot that it is made of, in order; what is left of those, under its own name.

    `engine`: the engine's names; `stored`: those of the snapshot; `tied`: second name → the one that is stored.
    """
    have, found = frozenset(stored), dict[str, tuple[str, ...]]()
    for name in engine:
        if name in have:
            found[name] = (name,)
        elif tied.get(name) in have:
            found[name] = (tied[name],)
        elif (parts := _parts(name)) and have.issuperset(parts):
            found[name] = parts
    used = {part for parts in found.values() for part in parts}
    return found | {name: (name,) for name in stored if name not in used}


def _parts(name: str) -> tuple[str, ...]:
    """`….qkv_proj.weight` → `….q_proj.weight` and so on; nothing for others."""
    layer, _, leaf = name.rpartition(".")
    above, _, last = layer.rpartition(".")
    return tuple(f"{above}.{part}.{leaf}" for part in FUSED.get(last, ()))


def check(before: Seen, marks: Mapping[str, Mark], digests: Mapping[str, str], *, lossless: bool) -> Seen:
    """Hold an engine that has loaded the version of `marks` against what it was before. Raises Tainted."""
    if digests.keys() != before.digests.keys():
        other = sorted(digests.keys() ^ before.digests.keys())
        raise Tainted(f"the engine's parameters are others than before: {', '.join(other[:3])}")
    found = _by_parameter(digests)
    moved = {parameter(key) for key, sha in digests.items() if sha != before.digests[key]}
    exact = frozenset(n for n, shas in found.items() if n in marks and set(shas.values()) == {marks[n].sha256})
    wrong = [f"{name} is not the learner's" for name in sorted(before.exact - exact)]
    if lossless:
        changed = {name for name, mark in marks.items() if _changed(before.marks.get(name), mark)}
        blind = {name for name, shas in found.items() if set(shas.values()) == {NOTHING}}
        judged = (found.keys() & marks.keys()) - blind - exact - before.exact
        wrong += [f"{name} has not taken the new values" for name in sorted((judged & changed) - moved)]
        wrong += [f"{name} has other values than before" for name in sorted((judged & moved) - changed)]
        wrong += _of_layers(changed - found.keys(), found.keys() - marks.keys(), moved, blind)
    if wrong:
        raise Tainted(f"by the engine's checksums {'; '.join(wrong[:3])} ({len(wrong)} in all)")
    return Seen(digests, marks, before.exact | {name for name in exact if marks[name].telling})


def _changed(before: Mark | None, now: Mark) -> bool:
    return before is None or before.sha256 != now.sha256


def _of_layers(
    changed: Iterable[str], unknown: Iterable[str], moved: Collection[str], blind: Collection[str]
) -> list[str]:
    """Layers of which a tensor without a counterpart has changed, and no parameter without one has moved."""
    parameters = defaultdict[str, list[str]](list)
    for name in unknown:
        parameters[_layer(name)].append(name)
    wrong = []
    for layer in sorted({_layer(name) for name in changed}):
        mine = parameters[layer]
        if mine and not any(name in moved or name in blind for name in mine):
            wrong.append(f"{layer or 'the model'} has not taken the new values")
    return wrong


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found[1] if found is not None else ""


def _by_parameter(digests: Mapping[str, str]) -> dict[str, dict[str, str]]:
    found = defaultdict[str, dict[str, str]](dict)
    for key, sha in digests.items():
        found[parameter(key)][key] = sha
    return found
