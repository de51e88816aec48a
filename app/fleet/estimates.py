"""Estimates: throughput before and after it is measured, broadcast time, smoothing. Pure.

Invariant: an unknown GPU gets a cautious estimate and is marked, never dropped; what was measured outweighs the prior.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Gpu:
    """Facts of a GPU model: memory bandwidth in GB/s, dense bf16 TFLOP/s, memory in GB."""

    memory_gb_s: float
    tflops: float
    memory_gb: float


@dataclass(frozen=True, slots=True)
class Workload:
    """What a rollout is made of."""

    parameters: int
    tokens_per_rollout: float
    concurrency: int = 256
    benched: Mapping[str, float] = field(default_factory=dict)
    """GPU model → what was measured by hand over the roofline (`app/fleet/priors.py`)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Rollouts per second of a machine, and where the number comes from."""

    mu: float
    source: str
    """`measured`, `gpu` (others of this GPU model were measured), `scaled` (any were), `bench` (measured by hand),
    `roofline`, `unknown_gpu`."""


MODEL_EFFICIENCY = 0.35
"""Share of the roofline that serving reaches; a prior, corrected by the first measurement."""
STEP_OVERHEAD_S = 0.004
"""A decode step costs at least this much whatever the model: launch and host work."""


@cache
def gpu_table() -> Mapping[str, Gpu]:
    """The GPUs that we have facts of, by normalised name. Sources are in `gpus.toml`."""
    raw = tomllib.loads(files("app.fleet").joinpath("gpus.toml").read_text())
    return {_key(name): Gpu(**facts) for name, facts in raw["gpus"].items()}


def _key(name: str) -> str:
    """Providers' and drivers' names alike: `RTX_4090`, `NVIDIA GeForce RTX 4090`."""
    return name.replace("_", " ").strip().upper().removeprefix("NVIDIA ").removeprefix("GEFORCE ")


def reference(name: str) -> tuple[str, Gpu]:
    """A GPU model's name as it is compared, and the card that its roofline is reckoned with: the weakest known one
    where it is unknown."""
    gpu = find_gpu(name)
    return _key(name), gpu or min(gpu_table().values(), key=lambda g: g.memory_gb_s)


def find_gpu(name: str) -> Gpu | None:
    """Facts by the provider's name, `_` and space alike, whole names only."""
    return gpu_table().get(_key(name))


def roofline(gpu: Gpu, num_gpus: int, load: Workload) -> float:
    """Rollouts/s: decode is bound by reading the weights once per step, by FLOPs, and by per-step overhead."""
    read_s = 2 * load.parameters / (gpu.memory_gb_s * 1e9)
    compute_s = 2 * load.parameters * load.concurrency / (gpu.tflops * 1e12)
    step_s = max(read_s, compute_s) / MODEL_EFFICIENCY + STEP_OVERHEAD_S
    return num_gpus * load.concurrency / step_s / load.tokens_per_rollout


def prior(gpu_name: str, num_gpus: int, load: Workload) -> Estimate:
    """What to expect of a machine that has not worked: by measurements by hand, else by its data sheet.

    An unknown GPU counts as the weakest known one.
    """
    key, like = reference(gpu_name)
    if key in load.benched:
        return Estimate(roofline(like, num_gpus, load) * load.benched[key], "bench")
    gpu = find_gpu(gpu_name)
    if gpu is not None:
        return Estimate(roofline(gpu, num_gpus, load), "roofline")
    weakest = min(roofline(g, num_gpus, load) for g in gpu_table().values())
    return Estimate(weakest, "unknown_gpu")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A node's measured rate beside its prior."""

    gpu_name: str
    mu: float
    prior: float


def estimate(base: Estimate, gpu_name: str, measured: Iterable[Measurement]) -> Estimate:
    """Correct a prior by what was measured: of the same GPU model if any was, else of all, as a geometric mean."""
    every = [m for m in measured if m.mu > 0 and m.prior > 0]
    same = [m for m in every if _key(m.gpu_name) == _key(gpu_name)]
    chosen, source = (same, "gpu") if same else (every, "scaled")
    if not chosen:
        return base
    correction = math.exp(sum(math.log(m.mu / m.prior) for m in chosen) / len(chosen))
    return Estimate(base.mu * correction, source)


def settle(measured: float, guess: float, active_s: float, settle_s: float) -> float:
    """A node's throughput: the estimate at first, what it measures once it has worked for `settle_s` seconds.

    The first batches of a node are small and its machine is still busy with starting; believed at once, they would rent
    a machine that is given back as soon as the node is warm.
    """
    share = min(1.0, max(0.0, active_s / settle_s)) if settle_s > 0 else 1.0
    return share * measured + (1 - share) * guess


def smooth(old: float | None, new: float, weight: float) -> float:
    """Exponential moving average; `weight` is the share of the new value."""
    return new if old is None else old + weight * (new - old)


def weight(sample_s: float) -> float:
    """Share of a new sample that took `sample_s` seconds: the average spans at least 10 samples and ten seconds."""
    return min(0.1, max(0.02, sample_s / 10))


USUAL_STEPS, USUAL_S, MOST_STEPS = 9, 10.0, 50
"""The usual step is that of so many steps, or more of short ones, until they are so many seconds."""


def usual_step(times: Sequence[float]) -> float:
    """T_train of the newest steps, `times` from the newest back to the job's first, at least one; seconds.

    Their mean, the longest counted as the second longest and the shortest as the second shortest: one step that other
    work held up, or the first with its warm-up, says nothing of the next; what comes every few steps counts as often
    as it comes; and what was before is forgotten, not only outweighed.
    """
    taken, seconds = 0, 0.0
    while taken < min(len(times), MOST_STEPS) and (taken < USUAL_STEPS or seconds < USUAL_S):
        seconds += times[taken]
        taken += 1
    found = sorted(times[:taken])
    if taken > 2:
        found = [found[1], *found[1:-1], found[-2]]
    return statistics.fmean(found)


def fastest_step(times: Sequence[float]) -> float:
    """The usual step in the fastest stretch of these steps, newest first, at least one; seconds.

    How fast a learner gets again that was slow for a while: a machine is not given back for a hiccup.
    """
    parts = [times[i : i + USUAL_STEPS] for i in range(0, len(times), USUAL_STEPS)]
    return min(usual_step(part) for part in [p for p in parts if len(p) == USUAL_STEPS] or [times])


def broadcast_time(size: int, nodes: int, uplink_mbps: float, node_mbps: float, hop_s: float = 0.05) -> float:
    """Seconds until the last of `nodes` has `size` bytes through N_ch ≈ ⌊B_0/B_w⌋ chains (docs/broadcast.md).

    T ≈ M/b + (L − 1)·hop with b = min(B_w, B_0/N_ch) and L = ⌈N/N_ch⌉.
    """
    if nodes == 0:
        return 0.0
    chains = min(nodes, max(1, int(uplink_mbps // node_mbps)))
    rate = min(node_mbps, uplink_mbps / chains) * 1e6 / 8
    return size / rate + (math.ceil(nodes / chains) - 1) * hop_s
