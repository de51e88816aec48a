"""Lease lives against the local marketplace with everything going wrong: what leaks, what is paid twice, what the bill
says.

Three processes: the marketplace over real HTTP, whose machines sleep; the control side, which is killed (SIGKILL) at
random instants and started again; and this one, which orders faults at every call, moves prices, lets hosts die and
come back, and kills. Time is compressed: the market and the control side share a clock that moves five seconds with
each round. `LIVES=50 make soak-providers` is a short run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.soak.clock import SharedClock
from bench.soak.place import KEY, LABEL, MACHINES, START_S, Place

FAULTS = {
    "create": ("429", "500", "502_html", "drop_before", "drop_after_process", "500_after_process", "never_starts",
               "success_false_with_id", "outbid_loading", "auth_error"),
    "list": ("429", "500", "502_html", "drop_before", "list_truncated", "list_410", "auth_error"),
    "destroy": ("429", "500", "502_html", "drop_before", "drop_after_process", "500_after_process", "auth_error"),
    "search": ("429", "500", "502_html", "drop_before"),
    "bid": ("429", "500", "drop_after_process"),
    "show": ("500", "drop_before"),
    "charges": ("500", "502_html"),
    "user": ("500", "drop_before"),
}  # fmt: skip
START_WAIT_S = 60.0
END_WAIT_S = 300.0
KILL_S = (6.0, 30.0)
"""Seconds between two kills of the control side; starting takes it about three."""
STUCK_S = 3600.0
"""Seconds of the market's time without any new instance after which the soak gives up: a slow machine is no fault."""
DEAD_S = 120.0
"""Seconds in which the market's time must move."""
EARLY_KILLS = 2
"""So often in a row the control side is killed before it got anywhere."""
FOREIGN = "somebody-else"


def price_list(rng: random.Random) -> str:
    """Machines with one card of a few kinds each."""
    names = ("RTX 3090", "RTX 4090", "RTX A5000", "L40S")
    rows = []
    for number in range(MACHINES):
        base = rng.uniform(0.10, 0.60)
        rows.append(
            f'[[machine]]\nmachine_id = {5000 + number}\ngpu_name = "{rng.choice(names)}"\ngpu_ram_mb = 24576\n'
            f'dph_base = "{base:.6f}"\nmin_bid = "{base * 0.5:.6f}"\nstorage_cost = "{rng.uniform(0.05, 0.3):.6f}"\n'
            'inet_up = 500.0\ninet_down = 500.0\ninet_up_cost = "0.002000"\ninet_down_cost = "0.002000"\n'
            'reliability = 0.99\ngeolocation = "Sweden, SE"\ndlperf = 30.0\nspeed = 700.0\n'
        )
    return "\n".join(rows)


class Market:
    """The market's control side."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)

    def get(self, path: str) -> Any:
        """JSON of a read."""
        answer = self._http.get(f"/_market/{path}")
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: Any = None) -> None:
        """An order."""
        self._http.post(f"/_market/{path}", json=body or {}).raise_for_status()

    def calm(self) -> None:
        """No more faults."""
        self._http.delete("/_market/faults").raise_for_status()

    def rent(self, ask: int, label: str) -> None:
        """Somebody else's instance in the same account."""
        body = {"client_id": "me", "image": "any", "disk": 10, "label": label, "onstart": "exec sleep 100000"}
        self._http.put(f"/api/v0/asks/{ask}/", json=body).raise_for_status()


@dataclass
class Chaos:
    """What goes wrong next."""

    market: Market
    rng: random.Random
    dead: list[int] = field(default_factory=list)
    """Machines whose host is down."""

    def act(self) -> None:
        """One thing, mostly a fault at a call."""
        chance = self.rng.random()
        if chance < 0.80:
            call = self.rng.choice(list(FAULTS))
            self.market.post("faults", {"call": call, "kind": self.rng.choice(FAULTS[call]), "count": 1})
        elif chance < 0.92:
            self._move_price()
        elif chance < 0.97:
            if self.dead:
                self.market.post(f"machines/{self.dead.pop(0)}/revive")
        else:
            machine = 5000 + self.rng.randrange(MACHINES)
            self.market.post(f"machines/{machine}/kill")
            self.dead.append(machine)

    def _move_price(self) -> None:
        """One machine's price; up is often above the bid of whoever has it."""
        number = 5000 + self.rng.randrange(MACHINES)
        base = self.rng.uniform(0.10, 0.60)
        prices = {"dph_base": f"{base:.6f}", "min_bid": f"{base * self.rng.uniform(0.3, 0.9):.6f}"}
        self.market.post("price", {"selector": {"machine_id": number}, **prices})

    def stop(self) -> None:
        """Good weather, so that what leaks is not the weather's doing."""
        self.market.calm()
        for machine in self.dead:
            self.market.post(f"machines/{machine}/revive")


class Child:
    """A process of the soak."""

    def __init__(self, module: str, place: Place) -> None:
        self._module, self._place = module, place
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its output is appended to its log."""
        with self._place.log(self._module.rpartition(".")[2]).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(self._place.folder)], stdout=output, stderr=output
            )

    @property
    def code(self) -> int | None:
        """Exit status, if it has ended."""
        return self._process.poll() if self._process is not None else None

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end."""
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(30)


def wait_for(path: Path) -> str:
    """The text of a file that is about to be there."""
    deadline = time.monotonic() + START_WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path.name} is not there after {START_WAIT_S:.0f} s")
        time.sleep(0.05)
    return path.read_text()


def ours(state: Any) -> list[Any]:
    """Instances with a label of our fleet, ended ones too."""
    return [i for i in state["instances"] if (i["label"] or "").startswith(LABEL)]


def report(place: Place, state: Any, requests: Any, lives: int) -> dict[str, Any]:
    """The figures, from the market's books and the control side's database."""
    with sqlite3.connect(f"file:{place.database}?mode=ro", uri=True) as db:
        ledger = dict(db.execute("SELECT lease_id, sum(micros) FROM ledger GROUP BY lease_id"))
        jobs = dict(db.execute("SELECT id, budget_micros FROM jobs"))
        job_of = dict(db.execute("SELECT label, job_id FROM leases"))
        lease_of = dict(db.execute("SELECT label, id FROM leases"))
    db.close()
    mine = ours(state)
    labels = Counter(i["label"] for i in mine)
    billed = sum(i["billed_micros"] for i in mine)
    by_job: Counter[str] = Counter()
    for i in mine:
        if i["label"] in job_of:
            by_job[job_of[i["label"]]] += i["billed_micros"]
    worst = sorted(mine, key=lambda i: -abs(i["billed_micros"] - ledger.get(lease_of.get(i["label"], ""), 0)))[:5]
    for i in worst:
        said = ledger.get(lease_of.get(i["label"], ""), 0)
        print(f"{i['label']} {i['detail']!r}: bill {i['billed_micros']}, ledger {said}", file=sys.stderr)
    return {
        "lives": lives,
        "faults": sum(requests["faults"].values()),
        "leaked": sum(1 for i in mine if i["state"] != "destroyed"),
        "double_rents": sum(count - 1 for count in labels.values()),
        "bill_diff_pct": round(100 * abs(sum(ledger.values()) - billed) / billed, 4) if billed else None,
        "budget_passed": sum(1 for job, budget in jobs.items() if by_job[job] > budget),
        "creates_per_attempt_max": max(
            (n for label, n in requests["creates_by_label"].items() if label.startswith(LABEL)), default=0
        ),
    }


def storm(place: Place, market: Market, control: Child, rng: random.Random, lives: int) -> int:
    """Let things go wrong until there were enough lives; how often the control side was killed."""
    chaos, clock, kills, early, seen = Chaos(market, rng), SharedClock(place.clock), 0, 0, 0
    news = started = last = clock()
    moved, kill_at = time.monotonic(), time.monotonic() + rng.uniform(*KILL_S)
    while True:
        chaos.act()
        if clock() != last:
            last, moved = clock(), time.monotonic()
        elif time.monotonic() - moved > DEAD_S:
            raise RuntimeError(f"not one round in {DEAD_S:.0f} s; see {place.log('driver')}")
        time.sleep(rng.uniform(0.05, 0.5))
        if control.code is not None:
            raise RuntimeError(
                f"the control side ended by itself with status {control.code}; see {place.log('driver')}"
            )
        if time.monotonic() >= kill_at and (clock() != started or early < EARLY_KILLS):
            early = early + 1 if clock() == started else 0
            control.end(signal.SIGKILL)
            control.start()
            kills, started = kills + 1, clock()
            moved, kill_at = time.monotonic(), time.monotonic() + rng.uniform(*KILL_S)
            count = len(ours(market.get("state")))
            if count > seen:
                seen, news = count, clock()
                print(f"{seen} lives, {kills} kills", file=sys.stderr, flush=True)
            if seen >= lives:
                chaos.stop()
                return kills
            if clock() - news > STUCK_S:
                raise RuntimeError(f"no new instance for {STUCK_S:.0f} s of the market; see {place.log('driver')}")


def run(place: Place, lives: int, seed: int) -> dict[str, Any]:
    """The whole soak."""
    rng = random.Random(seed)
    place.prices.write_text(price_list(rng))
    SharedClock(place.clock, START_S)
    server, control = Child("bench.soak.market", place), Child("bench.soak.driver", place)
    server.start()
    try:
        market = Market(wait_for(place.url))
        market.rent(market.get("state")["machines"][0]["ask_id"], FOREIGN)
        control.start()
        kills = storm(place, market, control, rng, lives)
        place.finish.touch()
        deadline = time.monotonic() + END_WAIT_S
        while control.code is None and time.monotonic() < deadline:
            time.sleep(0.2)
        state, requests = market.get("state"), market.get("requests")
        foreign = [i for i in state["instances"] if i["label"] == FOREIGN]
        if [i["state"] == "destroyed" for i in foreign] != [False]:
            raise RuntimeError("somebody else's instance was touched")
        failed = place.log("driver").read_text().count("Traceback")
        print(f"{kills} kills, {failed} failed parts of rounds, exit status {control.code}", file=sys.stderr)
        return report(place, state, requests, len(ours(state)))
    finally:
        if control.code is None:
            control.end(signal.SIGKILL)
        server.end(signal.SIGTERM)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Lease lives with everything going wrong.")
    parser.add_argument("--lives", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="keep everything here")
    options = parser.parse_args()
    # Whoever ends this process means the others too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = options.folder or Path(tempfile.mkdtemp(prefix="echo2-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    figures = run(Place(folder.absolute()), options.lives, options.seed)
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
