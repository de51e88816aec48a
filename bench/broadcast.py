"""How long a snapshot takes to reach every node, on a wide-area network built for it, beside the limit of the links.

The processes are the project's own (store, relay, puller), the places in the chains are those of `app.fleet.topology`.
A small version goes first, as in a running job, then a pause, then the version that is timed: from the moment it is
published until the last node holds it verified and in place. The limit is M / B_w with the headers of the packets.
Each node's disk is memory (/dev/shm), for the nodes of a real fleet have one each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from app.fleet.topology import Member, arrange
from app.snapshots import Source, new_key
from bench import broadcast_nodes as roles
from bench.delta import measure_delta
from bench.wan import Link, Wan, missing

MTU, SEGMENT = 1500, 1448
START_TIMEOUT_S = 60.0
MB = 1_000_000
LIES_FROM = 400
"""Leaf from which on a liar lies: about the middle."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `slow`, `liar` and `kill` are nodes (1…n); `kill` dies at half of the limit."""

    name: str
    transport: str = "chain"
    n: int = 9
    rtt_ms: float = 40.0
    size: int = 100 * MB
    learner_mbps: float = 200.0
    node_mbps: float = 100.0
    slow: int | None = None
    liar: int | None = None
    kill: int | None = None
    pause_s: float = 2.5
    warm_up: int = 20 * MB
    congestion: str = "cubic"
    idle_restart: bool = False
    """Whether the hosts' TCP starts slowly after a pause: Linux's default; docs/broadcast.md says to turn it off."""

    @property
    def limit_s(self) -> float:
        """M / B_w, headers counted."""
        return self.size * 8 * MTU / SEGMENT / (min(self.node_mbps, self.learner_mbps) * 1e6)


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds per node that finished, what else was told, and CPU seconds per node."""

    case: Case
    done: dict[int, float]
    told: list[roles.Event]
    cpu_s: float

    def seconds(self, without: int | None = None) -> float:
        """When the last node had it; `without` one that doesn't count."""
        return max(s for host, s in self.done.items() if host != without)


QUICK = [
    Case("chains", size=60 * MB, pause_s=1.0),
    Case("star", "star", size=60 * MB, pause_s=1.0, warm_up=2 * MB),
]
"""Smaller, so that it stays under a minute."""
FULL = [
    Case("chains", n=1),
    Case("chains", n=3),
    Case("chains"),
    Case("chains", n=16),
    Case("star", "star", warm_up=2 * MB),
    Case("star", "star", n=16, warm_up=2 * MB),
    Case("chains, hosts not tuned", idle_restart=True),
    Case("chains, 100 ms", rtt_ms=100),
    Case("one hop, 1 Gbit/s", n=1, rtt_ms=20, size=500 * MB, learner_mbps=1000, node_mbps=1000),
    Case("a node killed at half time", kill=3),
    Case("a node at half rate", slow=4),
    Case("a node that flips bits", liar=3),
]


class Lab:
    """A network with a learner (host 0) and n nodes, for one case."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self._folder = folder
        self._stack = ExitStack()
        self.processes: list[roles.Process] = []
        self.told: list[roles.Event] = []

    def __enter__(self) -> Lab:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        case, key = self.case, new_key()
        half = case.rtt_ms / 4
        rates = [case.node_mbps / (2 if k == case.slow else 1) for k in range(1, case.n + 1)]
        links = [Link(case.learner_mbps, case.learner_mbps, half), *(Link(rate, rate, half) for rate in rates)]
        wan = stack.enter_context(Wan(links, self._folder, idle_restart=case.idle_restart))
        stores = Path(
            tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="bench-broadcast-")
        )
        stack.callback(shutil.rmtree, stores)
        sources = upstreams(case, rates)
        everybody = [roles.Role(0, stores / "0", key, case.learner_mbps, congestion=case.congestion)]
        everybody += [
            roles.Role(
                k,
                stores / str(k),
                key,
                rates[k - 1],
                sources[k],
                LIES_FROM if k == case.liar else None,
                case.congestion,
            )
            for k in range(1, case.n + 1)
        ]
        for role in everybody:
            main = roles.node if role.host else roles.learner
            process = roles.fork(role, wan.enter, main)
            self.processes.append(process)
            stack.callback(process.kill)
        self.wait(lambda: self.hosts("ready") == {role.host for role in everybody}, START_TIMEOUT_S)

    def hosts(self, event: str, version: int | None = None) -> set[int]:
        """Who told of an event."""
        return {e["host"] for e in self.told if e["event"] == event and version in (None, e.get("version"))}

    def wait(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Listen until the condition is true; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.told += roles.events(self.processes, left)
        return True

    def publish(self, version: int, size: int) -> float:
        """Let the learner publish; the moment when it had."""
        self.processes[0].command(version=version, bytes=size)
        if not self.wait(lambda: 0 in self.hosts("published", version), START_TIMEOUT_S):
            raise RuntimeError("the learner did not publish")
        return next(float(e["at"]) for e in self.told if e["event"] == "published" and e["version"] == version)


def upstreams(case: Case, rates: Sequence[float]) -> dict[int, list[Source]]:
    """Where each node pulls from, in order."""
    learner = Source("learner", f"http://{Wan.address(0)}:{roles.PORT}")
    if case.transport == "star":
        return {k: [learner] for k in range(1, case.n + 1)}
    members = [Member(str(k), rate, rate, True, 1.0) for k, rate in enumerate(rates, 1)]
    return {
        int(name): [
            *(Source("peer", f"http://{Wan.address(int(a))}:{roles.PORT}", a) for a in place.ancestors),
            learner,
        ]
        for name, place in arrange(case.learner_mbps, members).items()
    }


def measure(case: Case, folder: Path) -> Result:
    """Build the network, run one broadcast on it, take it down."""
    with Lab(case, folder) as lab:
        nodes = set(range(1, case.n + 1))
        lab.publish(1, case.warm_up)
        if not lab.wait(lambda: lab.hosts("have", 1) == nodes, START_TIMEOUT_S):
            raise RuntimeError(f"only {sorted(lab.hosts('have', 1))} of {case.n} nodes got the first version")
        lab.wait(lambda: False, case.pause_s)
        before = {e["host"]: e["cpu"] for e in lab.told if e["event"] == "have"}
        published = lab.publish(2, case.size)
        if case.kill is not None:
            lab.wait(lambda: False, case.limit_s / 2)
            lab.processes[case.kill].kill()
            nodes.discard(case.kill)
        lab.wait(lambda: lab.hosts("have", 2) >= nodes, case.limit_s * (case.n + 3) + 30)
        have = {e["host"]: e for e in lab.told if e["event"] == "have" and e["version"] == 2}
        if not nodes <= set(have):
            raise RuntimeError(f"nodes {sorted(nodes - set(have))} did not get the version: {lab.told[-5:]}")
        told = [e for e in lab.told if e["event"] in ("lie", "stall")]
        cpu = sum(e["cpu"] - before[host] for host, e in have.items()) / len(have)
        return Result(case, {host: e["at"] - published for host, e in have.items()}, told, cpu)


def row(result: Result) -> dict[str, Any]:
    """A result as the JSON shows it. A node of half the rate doesn't count for its own row."""
    case, seconds = result.case, result.seconds(result.case.slow)
    return {
        "case": case.name,
        "transport": case.transport,
        "n": case.n,
        "rtt_ms": case.rtt_ms,
        "bytes": case.size,
        "seconds": round(seconds, 3),
        "limit_seconds": round(case.limit_s, 3),
        "vs_limit": round(seconds / case.limit_s, 3),
    }


def summary(results: Sequence[Result], delta: dict[str, Any] | None) -> dict[str, Any]:
    """The last line of the output; null is what was not run."""
    plain = {(r.case.transport, r.case.n): r.seconds() for r in results if r.case.name in ("chains", "star")}
    found: dict[str, Any] = {"rows": [row(r) for r in results]}
    for n in (9, 16):
        star, chain = plain.get(("star", n)), plain.get(("chain", n))
        found[f"star_over_chain_{n}"] = round(star / chain, 2) if star and chain else None
    return found | {"shardcast_over_chain_9": None, "delta": delta}


def show(console: Console, results: Sequence[Result], delta: dict[str, Any] | None) -> None:
    """The table for people."""
    table = Table("case", "N", "RTT ms", "MB", "seconds", "limit", "× limit", "CPU s/node", "told")
    for result in results:
        r = row(result)
        told = ", ".join(sorted({f"{e['host']}: {e['event']} {e['source']}" for e in result.told}))
        numbers = [f"{r[key]:.2f}" for key in ("seconds", "limit_seconds", "vs_limit")]
        table.add_row(
            r["case"], str(r["n"]), f"{r['rtt_ms']:g}", f"{r['bytes'] / MB:g}", *numbers, f"{result.cpu_s:.2f}", told
        )
    console.print(table)
    if delta is not None:
        console.print("delta of one step:", delta)
    console.print("1-minute load of this machine:", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="chain and star with N = 9, and the delta")
    parser.add_argument("--only", default="", help="cases whose 'name n' contains this")
    parser.add_argument("--congestion", default="cubic", help="congestion control of all hosts")
    options = parser.parse_args()
    console = Console(width=140)
    reason = missing()
    if reason:
        console.print(f"bench-broadcast: no network lab here, so no broadcast was measured: {reason}")
    cases = [c for c in (QUICK if options.quick else FULL) if options.only in f"{c.name} {c.n}" and not reason]
    cases = [replace(c, congestion=options.congestion) for c in cases]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="bench-wan-") as folder:
        for case in cases:
            results.append(measure(case, Path(folder)))
            r = row(results[-1])
            console.print(f"{r['case']}, N = {r['n']}: {r['seconds']:.2f} s, {r['vs_limit']:.2f} × limit")
    delta = None if options.only else measure_delta()
    show(console, results, delta)
    print(json.dumps(summary(results, delta)))


if __name__ == "__main__":
    main()
