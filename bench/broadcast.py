"""How long a snapshot takes to reach every node, on a wide-area network built for it, beside the limit of the links.

The processes are the project's own (store, relay, puller), the places in the chains are those of `app.fleet.topology`.
A small version goes first, as in a running job, then a pause, then the version that is timed: from the moment it is
published until the last node holds it verified and in place. The limit is M / B_w with the headers of the packets.
Each node's disk is memory (/dev/shm), for the nodes of a real fleet have one each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from app.fleet.topology import Member, arrange
from app.snapshots import Source, new_key
from bench import broadcast_nodes as roles
from bench import broadcast_shardcast
from bench.broadcast_cases import FULL, MIDDLE_LEAF, QUICK, SHARDCAST, Case, Result
from bench.broadcast_report import plot, row, show, summary
from bench.broadcast_side import measure_memory, measure_training
from bench.delta import measure_delta
from bench.wan import Link, Wan, missing

START_TIMEOUT_S = 60.0


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
        self.wan = wan = stack.enter_context(Wan(links, self._folder, idle_restart=case.idle_restart))
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
                range(MIDDLE_LEAF, MIDDLE_LEAF + case.lies) if k == case.liar else None,
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
        int(name): [*map(_peer, place.ancestors), learner, *map(_peer, place.helpers)]
        for name, place in arrange(case.learner_mbps, members).items()
    }


def _peer(name: str) -> Source:
    return Source("peer", f"http://{Wan.address(int(name))}:{roles.PORT}", name)


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
        if case.cut is not None:
            lab.wait(lambda: False, case.limit_s / 2)
            lab.wan.cut(case.cut, True)
            nodes.discard(case.cut)
        lab.wait(lambda: lab.hosts("have", 2) >= nodes, case.limit_s * (case.n + 3) + 30)
        have = {e["host"]: e for e in lab.told if e["event"] == "have" and e["version"] == 2 and e["host"] in nodes}
        if not nodes <= set(have):
            raise RuntimeError(f"nodes {sorted(nodes - set(have))} did not get the version: {lab.told[-5:]}")
        told = [e for e in lab.told if e["event"] in ("lie", "stall")]
        cpu = sum(e["cpu"] - before[host] for host, e in have.items()) / len(have)
        return Result(case, {host: e["at"] - published for host, e in have.items()}, told, cpu)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="chain and star with N = 9, and the delta")
    parser.add_argument("--only", default="", help="cases whose 'name n' contains this")
    parser.add_argument("--congestion", default="cubic", help="congestion control of all hosts")
    parser.add_argument("--plot", type=Path, help="draw seconds against N into this file")
    parser.add_argument("--memory-gb", type=float, default=10.0, help="snapshot of the memory measurement, in GB")
    return parser.parse_args()


def run_cases(options: argparse.Namespace, console: Console) -> tuple[list[Result], dict[str, str]]:
    """All cases that can be run here, and why the others weren't."""
    skipped: dict[str, str] = {}
    results: list[Result] = []
    wanted = [c for c in (QUICK if options.quick else [*FULL, *SHARDCAST]) if options.only in f"{c.name} {c.n}"]
    reason = missing()
    without = broadcast_shardcast.prepare() if not reason and any(c in SHARDCAST for c in wanted) else ""
    with tempfile.TemporaryDirectory(prefix="bench-wan-") as folder:
        for case in wanted:
            why = reason or (without if case.transport == "shardcast" else "")
            if not why:
                run = broadcast_shardcast.measure if case.transport == "shardcast" else measure
                try:
                    results.append(run(replace(case, congestion=options.congestion), Path(folder)))
                except RuntimeError as error:
                    why = str(error)
            if why:
                skipped[f"{case.name} {case.n}"] = why
                console.print(f"{case.name}, N = {case.n}: not measured: {why}")
            else:
                r = row(results[-1])
                console.print(f"{r['case']}, N = {r['n']}: {r['seconds']:.2f} s, {r['vs_limit']:.2f} × limit")
    return results, skipped


def main() -> None:
    """Run what the command line asks for."""
    options, console = parse(), Console(width=140)
    results, skipped = run_cases(options, console)
    more: dict[str, Any] = {"not_run": skipped} if skipped else {}
    delta = None
    if not options.only:
        delta = measure_delta()
    if not options.quick and options.only in "training":
        more["training"] = measure_training()
    if not options.quick and options.only in "memory":
        more["memory"] = measure_memory(int(options.memory_gb * 1e9))
    found = summary([row(result) for result in results], delta, **more)
    show(console, found)
    if options.plot is not None:
        try:
            plot(found, options.plot)
        except ImportError as error:
            console.print(f"no plot: {error}; pip install matplotlib")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
