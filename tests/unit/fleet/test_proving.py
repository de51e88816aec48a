"""Who can give the proofs that a job asks for."""

from __future__ import annotations

import pytest

from app.fleet.proving import engine_for, lack, problem
from app.fleet.trust import MOST_DRIFT, Standing, after, guilt
from app.protocol.audits import Audit
from app.protocol.proofs import Proofs


@pytest.mark.parametrize(
    ("engine", "wanted", "started", "possible"),
    [
        ("transformers", "none", "transformers", True),
        ("transformers", "toploc", "transformers", True),
        ("auto", "none", "auto", True),
        ("auto", "toploc", "transformers", True),
        ("vllm", "none", "vllm", True),
        ("vllm", "toploc", "vllm", False),
    ],
)
def test_what_nodes_are_started_with(engine: str, wanted: Proofs, started: str, possible: bool) -> None:
    assert engine_for(engine, wanted) == started
    said = problem(engine, wanted)
    assert (said == "") == possible
    assert possible or "ECHO2_AGENT_ENGINE" in said


@pytest.mark.parametrize(
    ("given", "wanted", "joins"),
    [("none", "none", True), ("toploc", "none", True), ("toploc", "toploc", True), ("none", "toploc", False)],
)
def test_who_may_join(given: Proofs, wanted: Proofs, joins: bool) -> None:
    said = lack("vllm", given, wanted)
    assert (said == "") == joins
    assert joins or "ECHO2_ENGINE=transformers" in said


def audit(verdict: str = "passed", fault: str = "") -> Audit:
    return Audit.model_validate(
        {
            "node_id": "n", "work_item": "w", "version": 1, "verdict": verdict, "fault": fault, "tokens": 100,
            "rms": 0.001, "detail": "its proofs miss 20 of 64 hidden states" if fault else "",
        }
    )  # fmt: skip


def convicted(*audits: Audit) -> tuple[int | None, str]:
    standing = Standing()
    for number, one in enumerate(audits, 1):
        standing = after(standing, one, 0.03)
        why = guilt(standing, one, 0.03)
        if why:
            return number, why
    return None, ""


def test_proofs_that_are_suspect_again_and_again_convict_though_the_log_probs_are_right() -> None:
    at, why = convicted(*[audit("suspect", "proof")] * 20)
    assert at == MOST_DRIFT
    assert "its proofs miss 20 of 64 hidden states" in why
    assert convicted(*[audit("suspect", "proof"), audit()] * 200)[0] is None
    assert convicted(audit("failed", "proof"))[0] == 1
    assert convicted(*[audit("unclear", "proof")] * 100)[0] is None
