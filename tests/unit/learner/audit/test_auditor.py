"""Between inbox and buffer: what is held, what is let through, what is forgotten."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch

from app.learner.audit.auditor import BEHIND, Auditor
from app.learner.buffer import Group, ReplayBuffer
from app.learner.outbox import Directives
from app.protocol.audits import Audit, AuditAnswer, AuditReport
from app.protocol.errors import LearnerError, TaskFailed, Unavailable
from app.protocol.learner import LearnerDirectives, TrajectoryRef
from tests.unit.learner.audit.samples import Shelf, sampled, sharper, told
from tests.unit.learner.samples import job

WORD = LearnerDirectives(command="run", staleness_budget=3, publish_period=2)
MODEL = sharper()


class Court:
    """The control service: whoever fails is in quarantine, and its items in `held` are withdrawn."""

    def __init__(self) -> None:
        self.audits_told: list[Audit] = []
        self.convicted: set[str] = set()
        self.held: dict[str, list[str]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.away = False

    def audits(self, body: AuditReport) -> AuditAnswer:
        self.asked.set()
        assert self.gate.wait(30)
        if self.away:
            raise Unavailable("away")
        self.audits_told += body.audits
        failed = {a.node_id for a in body.audits if a.verdict == "failed"} - self.convicted
        self.convicted |= failed
        withdrawn = [i for node in failed for i in self.held.get(node, [])]
        return AuditAnswer(withdrawn=withdrawn, quarantined=sorted(self.convicted))


class Scripted:
    """Rewards are right but those of these work items; those of others can't be computed."""

    def __init__(self) -> None:
        self.wrong: set[str] = set()
        self.unknown: set[str] = set()

    def off(self, group: Group, *, heldout: bool = False) -> float | None:
        if group.work_item in self.unknown:
            raise TaskFailed("it hangs")
        return 1.0 if group.work_item in self.wrong else 0.0


class Rig:
    def __init__(self, *, versions=(0,), draw: float = 0.9, **trust) -> None:
        self.court, self.rewards, self.buffer = Court(), Scripted(), ReplayBuffer()
        self.directives = Directives(WORD)
        self.auditor = Auditor(
            job(trust=trust), Shelf(dict.fromkeys(versions, MODEL)), self.rewards, self.court, self.buffer,
            self.directives, draw=lambda: draw,
        )  # fmt: skip

    def receive(self, *groups: Group, node: str = "n", **ref) -> None:
        for group in groups:
            fields = {"seq": 1, "key": "k", "size": 1, "blake3": "", "node_id": node, "work_items": [group.work_item]}
            self.auditor.receive(dataclasses.replace(group, node=node), TrajectoryRef(**{**fields, **ref}))

    def settled(self) -> None:
        assert self.auditor.idle(30)

    @property
    def here(self) -> list[str]:
        taken, _ = self.buffer.take(0, 10, 1000, least=0)
        self.buffer.withdraw((), {group.node for group in taken})
        for group in taken:
            self.buffer.add(group)
        return sorted(g.work_item for g in taken)

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(a.work_item, a.verdict) for a in self.court.audits_told]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(probation=2)
    made.auditor.start()
    yield made
    made.auditor.stop()


def groups(*names: str, version: int = 0) -> list[Group]:
    return sampled(MODEL, names, torch.Generator().manual_seed(1), version=version, size=3)


def noisy(group: Group) -> Group:
    return told(group, logprobs=lambda r: [p - 0.05 for p in r.logprobs])


def far_off(group: Group) -> Group:
    return told(group, logprobs=lambda r: [p - 1.0 for p in r.logprobs])


def test_on_probation_a_group_waits_for_its_audit_and_then_no_more(rig: Rig):
    rig.court.gate.clear()
    rig.receive(*groups("a", "b"))
    assert rig.court.asked.wait(30)
    assert rig.here == ["a", "b"], "good ones don't wait for the control service"
    rig.court.gate.set()
    rig.settled()
    rig.receive(*groups("c"))
    rig.settled()
    assert rig.here == ["a", "b", "c"]
    assert rig.told == [("a", "passed"), ("b", "passed")]
    assert rig.auditor.metrics()["audits_passed"] == 2


def test_what_the_learner_may_wait_for_is_computed_before_answers_to_held_out_prompts():
    rig = Rig(probation=2)
    answers = groups(*(f"answer {n:02}" for n in range(40)))
    ref = TrajectoryRef(seq=1, key="k", size=1, blake3="", node_id="n", work_items=[], heldout=True)
    for answer in answers[:39]:
        rig.auditor.examine(answer, ref)
    rig.receive(*groups("a", "b"))
    rig.auditor.examine(answers[39], ref)
    rig.auditor.start()
    rig.settled()
    rig.auditor.stop()
    assert [name for name, _ in rig.told] == ["a", "b", *(a.work_item for a in answers)]


def test_nothing_of_a_liar_is_trained_on_and_its_work_may_come_from_others(rig: Rig):
    rig.rewards.wrong = {"a"}
    rig.court.held = {"n": ["a", "b"]}
    rig.receive(*groups("a", "b"))
    rig.settled()
    assert rig.here == []
    assert rig.court.convicted == {"n"}
    rig.receive(*groups("c"))
    assert rig.buffer.evict(0, 10) == [], "they are not dropped: they will come again"
    rig.rewards.wrong = set()
    rig.receive(*groups("a", "b"), node="other")
    rig.settled()
    assert rig.here == ["a", "b"]


def test_what_was_let_through_before_is_taken_back(rig: Rig):
    rig.receive(*groups("a", "b", "c"), audits_passed=5)
    rig.settled()
    assert rig.here == ["a", "b", "c"]
    rig.receive(*groups("x"), node="honest", audits_passed=5)
    rig.rewards.wrong = {"d"}
    rig.court.held = {"n": ["a", "b", "c", "d"]}
    rig.receive(*groups("d", version=0), audits_passed=5)
    rig.settled()
    assert rig.here == ["a", "b", "c", "d", "x"], "not audited"
    caught = Rig(probation=0, each_version=False, audit_share=1.0)
    caught.rewards.wrong = {"d"}
    caught.court.held = {"n": ["a", "b", "c", "d"]}
    caught.receive(*groups("a", "b", "c", "d"))
    caught.receive(*groups("x"), node="honest")
    assert caught.here == ["a", "b", "c", "d", "x"]
    caught.auditor.start()
    caught.settled()
    caught.auditor.stop()
    assert caught.here == ["x"]


def test_while_a_node_is_judged_nothing_of_it_is_taken_for_a_step():
    rig = Rig(probation=0, each_version=False, audit_share=1.0)
    rig.rewards.wrong = {"b"}
    rig.court.gate.clear()
    rig.receive(*groups("a", "b"))
    rig.receive(*groups("x"), node="honest")
    rig.auditor.start()
    assert rig.court.asked.wait(30)
    assert rig.here == ["x"]
    rig.court.gate.set()
    rig.settled()
    rig.auditor.stop()
    assert rig.here == ["x"]


def test_a_node_that_is_expelled_while_its_group_is_computed_again_gets_it_nowhere():
    rig = Rig(probation=2)

    class Meanwhile(Scripted):
        def off(self, group: Group, *, heldout: bool = False) -> float | None:
            rig.auditor.banish(["n"])
            return 0.0

    rig.auditor._rewards = Meanwhile()
    rig.receive(*groups("a"))
    rig.auditor.start()
    rig.settled()
    rig.auditor.stop()
    assert rig.told == [("a", "passed")]
    assert rig.here == []
    rig.receive(*groups("a"), node="other", audits_passed=2)
    assert rig.auditor.metrics()["audits_waiting"] == 1, "the answer of another node is welcome"


def test_answers_to_held_out_prompts_that_wait_keep_nobody_from_being_audited():
    rig = Rig(probation=0, each_version=False, audit_share=1.0)
    ref = TrajectoryRef(seq=1, key="k", size=1, blake3="", node_id="n", work_items=[], heldout=True)
    (answer,) = groups("answer")
    for n in range(BEHIND):
        rig.auditor.examine(dataclasses.replace(answer, work_item=f"answer {n}"), ref)
    rig.receive(*groups("a"))
    assert rig.auditor.metrics()["audits_waiting"] == BEHIND + 1


def test_chosen_audits_that_are_left_out_because_too_many_wait_are_counted():
    rig = Rig(probation=0, each_version=False, audit_share=1.0)
    (one,) = groups("g")
    rig.receive(*(dataclasses.replace(one, work_item=f"g {n}") for n in range(BEHIND + 3)))
    assert rig.auditor.metrics()["audits_waiting"] == BEHIND
    assert rig.auditor.metrics()["audits_skipped"] == 3
    assert len(rig.buffer) == BEHIND + 3, "they are trained on all the same"


def test_groups_whose_rewards_are_unknown_end_no_probation_and_accuse_nobody(rig: Rig):
    rig.rewards.unknown = {"a", "b"}
    rig.receive(*groups("a", "b"))
    rig.settled()
    assert rig.told == [("a", "unclear"), ("b", "unclear")]
    assert [(a.fault, a.reward_ok) for a in rig.court.audits_told] == [("", None)] * 2
    assert "it hangs" in rig.court.audits_told[0].detail
    assert rig.court.convicted == set()
    assert rig.here == ["a", "b"], "nothing was found wrong with them"
    assert rig.auditor.metrics()["audits_unscored"] == 2
    rig.receive(*groups("c", "d"))
    rig.settled()
    assert rig.told[2:] == [("c", "passed"), ("d", "passed")], "still on probation"
    rig.receive(*groups("e"))
    rig.settled()
    assert len(rig.told) == 4
    assert rig.auditor.metrics()["audits_unscored"] == 2


def test_under_each_version_one_with_known_rewards_is_looked_at_before_others_are_let_through():
    rig = Rig(versions=(0, 2), probation=0)
    rig.rewards.unknown = {"a"}
    rig.receive(*groups("a", "b", "c", version=2))
    rig.auditor.start()
    rig.settled()
    rig.auditor.stop()
    assert rig.told == [("a", "unclear"), ("b", "passed")]
    assert rig.here == ["a", "b", "c"]


def test_a_suspect_group_is_dropped_alone_and_the_node_goes_on(rig: Rig):
    first, second, third = groups("a", "b", "c")
    rig.receive(noisy(first), second, third)
    rig.settled()
    assert [(d.work_item, d.reason) for d in rig.buffer.evict(0, 10)] == [("a", "invalid")]
    assert rig.here == ["b", "c"]
    assert rig.court.convicted == set()


def test_under_each_version_the_first_group_is_looked_at_before_others_are_trained_on():
    rig = Rig(versions=(0, 2), probation=0)
    first, *others = groups("a", "b", "c", version=2)
    rig.receive(far_off(first), *others)
    assert rig.here == []
    rig.auditor.start()
    rig.settled()
    rig.auditor.stop()
    assert rig.here == []
    assert rig.court.convicted == {"n"}


def test_a_group_with_a_fault_is_at_no_time_in_the_buffer(rig: Rig):
    rig.court.gate.clear()
    rig.receive(noisy(groups("a")[0]))
    assert rig.court.asked.wait(30)
    assert rig.here == []
    rig.court.gate.set()
    rig.settled()
    assert rig.here == []


def test_after_a_suspect_group_the_next_that_waited_is_looked_at():
    rig = Rig(versions=(0, 2), probation=0)
    first, *others = groups("a", "b", "c", version=2)
    rig.receive(noisy(first), *others)
    rig.auditor.start()
    rig.settled()
    rig.auditor.stop()
    assert rig.told == [("a", "suspect"), ("b", "passed")]
    assert rig.here == ["b", "c"]


def test_what_waits_for_a_good_group_follows_it():
    rig = Rig(versions=(0, 2), probation=0)
    rig.receive(*groups("a", "b", "c", version=2))
    assert rig.here == []
    assert rig.auditor.metrics()["audits_waiting"] == 3
    rig.auditor.start()
    rig.settled()
    rig.auditor.stop()
    assert rig.here == ["a", "b", "c"]
    assert rig.told == [("a", "passed")]


def test_a_version_that_is_not_at_hand_is_trusted_for_its_rewards_only(rig: Rig):
    rig.rewards.wrong = {"b"}
    rig.receive(*groups("a", version=1))
    rig.receive(*groups("b", version=1), node="liar")
    rig.settled()
    assert rig.here == ["a"]
    assert rig.told == [("a", "unclear"), ("b", "failed")]


def test_who_finishes_what_another_began_is_not_held_to_its_log_probs(rig: Rig):
    rig.receive(far_off(groups("a")[0]), written_by={"a": ["before"]})
    rig.settled()
    assert rig.here == []
    assert rig.told == [("a", "unclear")]
    assert rig.court.audits_told[0].variance == 0
    rig.receive(*groups("b"), written_by={"b": ["n"]})
    rig.settled()
    assert rig.told[1:] == [("b", "passed")]


def test_a_page_that_names_nodes_in_quarantine_is_enough(rig: Rig):
    rig.receive(*groups("a", "b"))
    rig.settled()
    rig.auditor.banish(["n"])
    assert rig.here == []
    rig.receive(*groups("c"))
    rig.settled()
    assert rig.here == []


def test_a_control_service_that_stays_away_is_told_to_the_loop(rig: Rig):
    rig.court.away = True
    rig.receive(*groups("a"))
    rig.auditor._thread.join(30)
    with pytest.raises(Unavailable):
        rig.directives.current()


def test_a_machine_without_memory_for_audits_does_not_keep_the_learner_waiting(rig: Rig):
    def score(version, rollouts):
        raise RuntimeError("CUDA out of memory")

    rig.auditor._scorer.score = score
    rig.receive(*groups("a"))
    rig.auditor._thread.join(30)
    with pytest.raises(LearnerError, match="out of memory"):
        rig.directives.current()


@pytest.mark.parametrize("spoil", [noisy, far_off])
def test_what_others_began_is_never_trained_on_unseen(spoil):
    rig = Rig(probation=0, each_version=False, audit_share=0.02)
    good, bad, own = groups("good", "bad", "own")
    rig.receive(good, spoil(bad), written_by={"good": ["before"], "bad": ["before"]})
    rig.receive(own)
    assert rig.here == ["own"]
    rig.auditor.start()
    rig.settled()
    rig.auditor.stop()
    assert rig.here == ["good", "own"]
    assert rig.told == [("good", "passed"), ("bad", "unclear")]
