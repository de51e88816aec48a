"""What goes wrong with versions is counted and named, also when the control service won't hear it."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.protocol.errors import Gone, IntegrityError
from app.protocol.node import NodeState
from app.rollout_agent.faults import Faults
from app.rollout_agent.heartbeats import describe
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from app.snapshots.rates import News
from app.snapshots.sources import Source
from tests.unit.rollout_agent.fakes import Answer, Clock, Wire, problem

PEER = Source("peer", "http://peer", "node_1")


def parts(answers: dict[str, Answer]) -> tuple[Wire, WorkLedger, Faults]:
    wire, clock = Wire(answers), Clock()
    ledger = WorkLedger(clock)
    return wire, ledger, Faults(wire.client(clock), ledger)


@pytest.mark.parametrize(("version", "known"), [(-1, None), (0, 0), (7, 7)])
async def test_a_fault_names_its_source_and_the_version_if_it_is_known(version: int, known: int | None) -> None:
    wire, ledger, faults = parts({})
    await faults.lied(PEER, version, "x" * 5000)
    await faults.stalled(Source("store"), version, "silent")
    await faults.delta_refused(PEER, version, "no base")
    told = wire.of("reports")
    assert [(r["kind"], r["subject"], r.get("version")) for r in told] == [
        ("upstream_lied", "node_1", known),
        ("upstream_stalled", "store", known),
        ("delta_refused", "node_1", known),
    ]
    assert len(told[0]["detail"]) == 1000
    assert dict(ledger.errors) == {"upstream_lied": 1, "upstream_stalled": 1, "delta_refused": 1}


async def test_a_report_that_is_refused_counts_and_one_that_says_it_is_over_ends() -> None:
    _, ledger, faults = parts({"reports": lambda _: problem("bad_input", 422)})
    await faults.lied(PEER, 1, "wrong leaf")
    assert ledger.errors["upstream_lied"] == 1
    _, ledger, faults = parts({"reports": lambda _: problem("gone", 410)})
    with pytest.raises(Gone):
        await faults.lied(PEER, 1, "wrong leaf")
    assert ledger.errors["upstream_lied"] == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [(IntegrityError("no such tensor"), "no such tensor"), (RuntimeError("x" * 5000), "RuntimeError: " + "x" * 986)],
)
async def test_a_version_that_the_engine_can_t_take_is_reported_with_its_number(
    error: IntegrityError | RuntimeError, said: str
) -> None:
    wire, ledger, faults = parts({})
    snapshot: Any = SimpleNamespace(version=7)
    for _ in range(MAX_FAULTS - 1):
        await faults.not_installed(snapshot, error)
    told = wire.of("reports")
    assert {(r["kind"], r["subject"], r["version"], r["detail"]) for r in told} == {
        ("engine_error", "install", 7, said)
    }
    assert ledger.errors == {"install_failed": MAX_FAULTS - 1}
    with pytest.raises(WorkerFault, match="install_failed"):
        await faults.not_installed(snapshot, error)
    assert len(wire.of("reports")) == MAX_FAULTS, "the last one is told, too"


async def test_an_engine_that_died_or_hangs_is_reported_and_only_a_death_is_a_fault_in_a_row() -> None:
    wire, ledger, faults = parts({})
    await faults.died()
    await faults.hung("y" * 5000)
    assert [(r["subject"], len(r["detail"]) > 0) for r in wire.of("reports")] == [("died", True), ("hung", True)]
    assert len(wire.of("reports")[1]["detail"]) == 1000
    assert (ledger.errors, ledger.faults_in_a_row) == ({"engine_died": 1, "hung": 1}, 1)


async def test_a_model_file_that_the_hub_does_not_give_is_named() -> None:
    wire, ledger, faults = parts({})
    await faults.hub_failed("p" * 300, "z" * 5000)
    (told,) = wire.of("reports")
    assert (told["kind"], told["subject"], told["detail"]) == ("hub_failed", "p" * 200, "z" * 1000)
    assert (ledger.errors, ledger.faults_in_a_row) == ({"hub_failed": 1}, 0)


async def test_a_node_that_warms_up_says_nothing_of_what_it_has_not_got() -> None:
    wire, clock = Wire({}), Clock()
    ledger = WorkLedger(clock)
    ledger.leased({"w0": clock() + 60})
    beat = describe(
        NodeState.WARMING,
        None,
        clock(),
        client=wire.client(clock),
        ledger=ledger,
        meter=None,
        puller=None,
        relay=None,
        news=News(),
        interruption=None,
    )
    assert (beat.state, beat.in_flight, beat.policy_version, beat.progress) == (NodeState.WARMING, 1, None, None)
    assert (beat.rollouts_per_s, beat.tokens_per_s, beat.busy_share, beat.upstream) == (None, None, None, "")
    assert beat.bytes_from == {"learner": 0, "peer": 0, "store": 0}
