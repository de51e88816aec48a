"""Jobs that ask for proofs, and nodes that can't give them. Pure.

Invariant: such a job is refused, or such a node, with what to change; neither is taken as if nothing had been asked.
"""

from __future__ import annotations

from app.protocol.proofs import Proofs

PROVING = "transformers"
"""The engine that shows the hidden states of what it samples."""


def engine_for(engine: str, wanted: Proofs) -> str:
    """The engine that nodes are started with: where each machine may choose, one that gives the proofs wanted."""
    return PROVING if engine == "auto" and wanted != "none" else engine


def problem(engine: str, wanted: Proofs) -> str:
    """Why a job can't have its proofs from nodes of this service; empty: it can."""
    if wanted == "none" or engine_for(engine, wanted) == PROVING:
        return ""
    return (
        f"nodes of this service generate with {engine}, which can't give hidden states: set ECHO2_AGENT_ENGINE to "
        f"{PROVING} or auto, or leave proofs out"
    )


def lack(engine: str, given: Proofs, wanted: Proofs) -> str:
    """What a node that wants to join lacks of the proofs that its job asks for; empty: nothing."""
    if wanted in ("none", given):
        return ""
    return f"its engine {engine} gives no proofs; the job asks for trust.proofs {wanted}: use ECHO2_ENGINE={PROVING}"
