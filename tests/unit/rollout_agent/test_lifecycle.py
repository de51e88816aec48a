from __future__ import annotations

import pytest

from app.protocol.errors import BadInput, EchoError, Gone, Unauthorized, Unavailable
from app.protocol.node import Directives
from app.rollout_agent.ledger import MAX_FAULTS, WorkerFault, WorkLedger
from app.rollout_agent.lifecycle import LeaseWatch, ending_of, join_ending


def directives(lease_s: float) -> Directives:
    return Directives(upstreams=[], target_version=None, lease_expires_in_s=lease_s, heartbeat_interval_s=5)


def test_a_lease_ends_by_the_nodes_own_clock() -> None:
    watch = LeaseWatch.start(900, 100.0, directives(60))
    assert watch.ending(159.9) is None
    ending = watch.ending(160.0)
    assert ending is not None
    assert ending.destroy
    assert ending.reachable
    assert ending.code == 0


def test_a_heartbeat_renews_the_lease_from_when_it_was_sent() -> None:
    watch = LeaseWatch.start(900, 0.0, directives(60))
    watch.contact(50.0, directives(60))
    assert watch.ending(109.9) is None
    assert watch.ending(110.0) is not None


def test_an_orphan_ends_without_a_last_word() -> None:
    watch = LeaseWatch.start(900, 0.0, directives(1e9))
    watch.contact(100.0, directives(1e9))
    assert watch.ending(999.9) is None
    ending = watch.ending(1000.0)
    assert ending is not None
    assert ending.destroy
    assert not ending.reachable
    assert ending.code == 1


def test_the_next_check_is_never_late() -> None:
    watch = LeaseWatch.start(900, 0.0, directives(60))
    assert watch.next_check_s(10.0) == 1.0
    assert watch.next_check_s(59.75) == pytest.approx(0.25)
    assert watch.next_check_s(70.0) > 0


@pytest.mark.parametrize(
    ("error", "code", "reachable", "destroy"),
    [
        (Gone("closed"), 0, False, True),
        (Unauthorized("who"), 1, False, True),
        (WorkerFault("five in a row"), 1, True, False),
        (ZeroDivisionError("oh"), 1, True, False),
    ],
)
def test_errors_mean_endings(error: Exception, code: int, reachable: bool, destroy: bool) -> None:
    ending = ending_of(error, "worker")
    assert (ending.code, ending.reachable, ending.destroy) == (code, reachable, destroy)
    assert str(error) in ending.reason


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Gone("used"), "new one"),
        (Unauthorized("unknown"), "new one"),
        (Unavailable("away"), "away"),
        (BadInput("x"), "x"),
    ],
)
def test_a_failed_join_says_what_to_do(error: EchoError, said: str) -> None:
    ending = join_ending(error)
    assert ending.code == 1
    assert said in ending.reason


def test_the_ledger_hands_back_what_is_still_leased() -> None:
    now = [0.0]
    ledger = WorkLedger(lambda: now[0])
    ledger.leased({"a": 10.0, "b": 10.0, "c": 10.0, "d": 99.0})
    ledger.settled(["a"])
    ledger.give_up(["b", "never leased"])
    assert ledger.in_flight == 2
    assert sorted(ledger.unfinished()) == ["b", "c", "d"]
    now[0] = 50.0
    assert ledger.unfinished() == ["d"]


def test_only_faults_in_a_row_end_the_worker() -> None:
    ledger = WorkLedger(lambda: 0.0)
    for _ in range(3):
        for _ in range(MAX_FAULTS - 1):
            ledger.fault("refused", "no")
        ledger.accepted(late=0)
    for _ in range(MAX_FAULTS - 1):
        ledger.fault("refused", "no")
    with pytest.raises(WorkerFault, match="engine_error: out of memory"):
        ledger.fault("engine_error", "out of memory")
    assert ledger.errors == {"refused": 4 * (MAX_FAULTS - 1), "engine_error": 1}
