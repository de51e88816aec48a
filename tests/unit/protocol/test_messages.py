"""Messages between machines: what a node or a learner may say, and what is refused before anything acts on it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from app.protocol.audits import Audit, AuditAnswer, AuditReport
from app.protocol.node import (
    AssetRef,
    BroadcastProgress,
    Directives,
    Heartbeat,
    Interruption,
    JoinRequest,
    Leave,
    Report,
    SnapshotUrls,
    Weights,
)
from app.protocol.startup import GpuFacts, MachineFacts, StartPhase, StartProgress
from app.protocol.task_spec import TaskFile, TaskLimits, TaskSpec
from app.protocol.trust_spec import TrustSpec
from app.protocol.work import CommitAnswer, CommitRequest, UploadRequest, WorkAnswer, WorkItem, WorkRequest

HASH = "0" * 64
MOST = 2**53 - 1
LEAST: dict[type[BaseModel], dict[str, Any]] = {
    Heartbeat: {"state": "active", "policy_version": 3},
    JoinRequest: {"agent_version": "0.1.0", "engine": "transformers"},
    BroadcastProgress: {"version": 1, "bytes_have": 2, "bytes_total": 3},
    Interruption: {"kind": "interruption", "source": "ec2"},
    Weights: {"version": 1, "engine": "vllm", "digest": HASH},
    Report: {"kind": "engine_error"},
    Leave: {"reason": "done"},
    WorkRequest: {"max_items": 1, "policy_version": 0},
    UploadRequest: {"policy_version": 0},
    CommitRequest: {"key": "k", "size": 1, "blake3": HASH, "work_items": ["w"]},
    StartProgress: {"phase": "booting"},
    GpuFacts: {"name": "L4", "memory_bytes": 1},
    MachineFacts: {},
    Audit: {"node_id": "n", "work_item": "w", "version": 0, "verdict": "passed"},
    AuditReport: {"audits": [{"node_id": "n", "work_item": "w", "version": 0, "verdict": "passed"}]},
    TaskFile: {"role": "train", "size": 0, "blake3": HASH},
    TaskLimits: {},
    TaskSpec: {"name": "poker"},
    TrustSpec: {},
}
GOOD: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (Heartbeat, {"policy_version": None}),
    (Heartbeat, {"policy_version": MOST, "busy_share": 1, "tokens_generated": MOST, "detail": "x" * 500}),
    (Heartbeat, {"rollouts_per_s": 0, "tokens_per_s": 1e12, "down_bytes_per_s": 0.1}),
    (Heartbeat, {"errors": {str(n): n for n in range(100)}, "tokens_wasted": {"stale": 1}, "bytes_from": {"peer": 1}}),
    (Heartbeat, {"weights": {"version": 0, "engine": "e", "digest": HASH}, "upstream": "x" * 200}),
    (Report, {"version": 0, "detail": "x" * 1000, "work_items": ["w"] * 4096}),
    (Leave, {"reason": "x" * 500, "unfinished": ["w"] * 4096}),
    (WorkRequest, {"max_items": 1024, "wait_s": 30}),
    (WorkRequest, {"wait_s": 0}),
    (CommitRequest, {"work_items": ["w"] * 4096, "key": "x" * 500, "size": MOST}),
    (StartProgress, {"have": 0, "total": 2**62, "since_s": 0, "detail": "x" * 200}),
    (GpuFacts, {"temperature_c": -300, "ecc_errors": 0, "pcie_width": 16}),
    (MachineFacts, {"gpus": [{"name": "L4", "memory_bytes": 1}] * 64}),
    (Audit, {"bias": -1, "surprise": -1, "excess": -1, "reward_ok": False}),
    (AuditReport, {"audits": [LEAST[Audit]] * 256}),
    (TaskLimits, {"timeout_s": 600, "load_timeout_s": 3600, "memory_mb": 64, "processes": 256, "read": ["/data"] * 16}),
    (TaskLimits, {"memory_mb": 1_048_576, "processes": 1}),
    (TrustSpec, {"audit_share": 1, "probation": 0, "twin_share": 0, "max_logprob_rms": 10, "max_proof_misses": 0.99}),
    (TrustSpec, {"proofs": "toploc", "audit_share": 0, "probation": 0}),
    (TrustSpec, {"proofs": "toploc", "audit_share": 0, "each_version": False}),
    (TrustSpec, {"proofs": "toploc", "probation": 0, "each_version": False}),
]
BAD: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (Heartbeat, {"policy_version": -1}, "policy_version"),
    (Heartbeat, {"policy_version": 10**30}, "policy_version"),
    (Heartbeat, {"state": "asleep"}, "state"),
    (Heartbeat, {"rollouts_per_s": -1}, "rollouts_per_s"),
    (Heartbeat, {"rollouts_per_s": "inf"}, "rollouts_per_s"),
    (Heartbeat, {"tokens_per_s": "nan"}, "tokens_per_s"),
    (Heartbeat, {"busy_share": 1.01}, "busy_share"),
    (Heartbeat, {"bytes_down": -1}, "bytes_down"),
    (Heartbeat, {"tokens_generated": MOST + 1}, "tokens_generated"),
    (Heartbeat, {"tokens_wasted": {"lost": 1}}, "tokens_wasted"),
    (Heartbeat, {"tokens_wasted": {"stale": -1}}, "tokens_wasted"),
    (Heartbeat, {"bytes_from": {"moon": 1}}, "bytes_from"),
    (Heartbeat, {"down_bytes_per_s": 0}, "down_bytes_per_s"),
    (Heartbeat, {"up_bytes_per_s": "inf"}, "up_bytes_per_s"),
    (Heartbeat, {"errors": {str(n): n for n in range(101)}}, "errors"),
    (Heartbeat, {"detail": "x" * 501}, "detail"),
    (BroadcastProgress, {"bytes_have": 10**400}, "bytes_have"),
    (BroadcastProgress, {"version": -1}, "version"),
    (JoinRequest, {"engine": "x" * 51}, "engine"),
    (JoinRequest, {"relay_url": "x" * 501}, "relay_url"),
    (JoinRequest, {"proofs": "mine"}, "proofs"),
    (Interruption, {"at": "2026-12-01T10:00:00"}, "at"),
    (Interruption, {"at": "0001-01-01T00:00:00+23:00"}, "at"),
    (Weights, {"digest": "A" * 64}, "digest"),
    (Weights, {"digest": HASH + "\n"}, "digest"),
    (Report, {"kind": "bored"}, "kind"),
    (Report, {"version": -1}, "version"),
    (Report, {"work_items": ["w"] * 4097}, "work_items"),
    (Leave, {"unfinished": ["w"] * 4097}, "unfinished"),
    (WorkRequest, {"max_items": 0}, "max_items"),
    (WorkRequest, {"max_items": 1025}, "max_items"),
    (WorkRequest, {"policy_version": -1}, "policy_version"),
    (WorkRequest, {"policy_version": 2**63}, "policy_version"),
    (WorkRequest, {"wait_s": 30.1}, "wait_s"),
    (WorkRequest, {"wait_s": -1}, "wait_s"),
    (UploadRequest, {"policy_version": 2**63}, "policy_version"),
    (CommitRequest, {"size": 0}, "size"),
    (CommitRequest, {"size": 10**30}, "size"),
    (CommitRequest, {"work_items": []}, "work_items"),
    (CommitRequest, {"work_items": ["w"] * 4097}, "work_items"),
    (CommitRequest, {"blake3": "0" * 63}, "blake3"),
    (StartProgress, {"phase": "asleep"}, "phase"),
    (StartProgress, {"have": -1}, "have"),
    (StartProgress, {"total": 2**63}, "total"),
    (StartProgress, {"since_s": "inf"}, "since_s"),
    (MachineFacts, {"gpus": [{"name": "L4", "memory_bytes": 1}] * 65}, "gpus"),
    (MachineFacts, {"disk_free_bytes": -1}, "disk_free_bytes"),
    (Audit, {"rms": "nan"}, "rms"),
    (Audit, {"rms": -1}, "rms"),
    (Audit, {"surprise": "inf"}, "surprise"),
    (Audit, {"verdict": "fine"}, "verdict"),
    (Audit, {"fault": "taste"}, "fault"),
    (AuditReport, {"audits": []}, "audits"),
    (AuditReport, {"audits": [LEAST[Audit]] * 257}, "audits"),
    (TaskFile, {"role": "test"}, "role"),
    (TaskFile, {"blake3": "../../x"}, "blake3"),
    (TaskLimits, {"timeout_s": 0}, "timeout_s"),
    (TaskLimits, {"timeout_s": 601}, "timeout_s"),
    (TaskLimits, {"load_timeout_s": 3601}, "load_timeout_s"),
    (TaskLimits, {"load_timeout_s": 0}, "load_timeout_s"),
    (TaskLimits, {"memory_mb": 63}, "memory_mb"),
    (TaskLimits, {"memory_mb": 1_048_577}, "memory_mb"),
    (TaskLimits, {"processes": 0}, "processes"),
    (TaskLimits, {"processes": 257}, "processes"),
    (TaskLimits, {"read": ["data"]}, "read"),
    (TaskLimits, {"read": ["/data\0"]}, "read"),
    (TaskLimits, {"read": ["/data"] * 17}, "read"),
    (TaskLimits, {"read": ["/" + "x" * 1000]}, "read"),
    (TaskFile, {"size": -1}, "size"),
    (TaskSpec, {"name": ""}, "name"),
    (TaskSpec, {"name": "x" * 201}, "name"),
    (TaskSpec, {"files": [LEAST[TaskFile]] * 4}, "files"),
    (TrustSpec, {"audit_share": 1.01}, "audit_share"),
    (TrustSpec, {"audit_share": -0.01}, "audit_share"),
    (TrustSpec, {"probation": -1}, "probation"),
    (TrustSpec, {"probation": 10_001}, "probation"),
    (TrustSpec, {"twin_share": 1.01}, "twin_share"),
    (TrustSpec, {"max_logprob_rms": 10.1}, "max_logprob_rms"),
    (TrustSpec, {"twin_share": -0.1}, "twin_share"),
    (TrustSpec, {"max_logprob_rms": 0}, "max_logprob_rms"),
    (TrustSpec, {"max_proof_misses": 1}, "max_proof_misses"),
    (TrustSpec, {"max_proof_misses": 0}, "max_proof_misses"),
    (TrustSpec, {"proofs": "toploc", "audit_share": 0, "probation": 0, "each_version": False}, ""),
]


@pytest.mark.parametrize("kind", LEAST, ids=lambda k: k.__name__)
def test_the_least_of_each_message_is_taken_and_an_unknown_field_is_not(kind: type[BaseModel]) -> None:
    assert kind.model_validate(LEAST[kind])
    with pytest.raises(ValidationError, match="not permitted"):
        kind.model_validate({**LEAST[kind], "colour": "red"})


@pytest.mark.parametrize(("kind", "changes"), GOOD, ids=lambda v: v.__name__ if isinstance(v, type) else None)
def test_what_is_within_bounds_is_taken(kind: type[BaseModel], changes: dict[str, Any]) -> None:
    assert kind.model_validate({**LEAST[kind], **changes})


@pytest.mark.parametrize(
    ("kind", "changes", "field"), BAD, ids=lambda v: v.__name__ if isinstance(v, type) else str(v)[:60]
)
def test_what_is_out_of_bounds_is_refused_at_its_field(
    kind: type[BaseModel], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({**LEAST[kind], **changes})
    assert {str(e["loc"][0]) if e["loc"] else "" for e in caught.value.errors()} == {field}


def unbounded(schema: dict[str, Any], defs: dict[str, Any], where: str) -> Iterator[str]:
    """Places of a JSON schema where a number or a text may be as large as whoever sends it likes."""
    schema = defs[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for each in schema.get("anyOf", []):
        yield from unbounded(each, defs, where)
    kind, keys = schema.get("type"), schema.keys()
    fine = {
        "integer": {"minimum", "maximum"} <= keys,
        "number": bool({"minimum", "exclusiveMinimum"} & keys),
        "string": bool({"maxLength", "pattern", "enum", "const", "format"} & keys),
        "array": "maxItems" in keys,
    }
    if kind in fine and not fine[kind]:
        yield where
    for name, part in schema.get("properties", {}).items():
        yield from unbounded(part, defs, f"{where}.{name}")
    for inner in (schema.get("additionalProperties"), schema.get("items")):
        # What a list of texts holds is bounded by the size of the whole.
        if isinstance(inner, dict) and inner.get("type") != "string":
            yield from unbounded(inner, defs, f"{where}[]")


@pytest.mark.parametrize(
    "kind",
    [JoinRequest, Heartbeat, Report, Leave, WorkRequest, UploadRequest, CommitRequest, StartProgress],
    ids=lambda k: k.__name__,
)
def test_nothing_that_a_node_says_is_without_bounds(kind: type[BaseModel]) -> None:
    schema = kind.model_json_schema()
    assert list(unbounded(schema, schema.get("$defs", {}), kind.__name__)) == []


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (Directives, {"upstreams": [], "target_version": None, "lease_expires_in_s": 1, "heartbeat_interval_s": 1}),
        (SnapshotUrls, {"version": 1, "manifest_url": "", "chunk_urls": {"0": "u"}}),
        (WorkItem, {"id": "w", "prompt_index": 0, "group_size": 2, "seed": 1, "deadline_s": 1}),
        (WorkAnswer, {"items": []}),
        (CommitAnswer, {"accepted": []}),
        (AuditAnswer, {}),
    ],
)
def test_answers_may_grow_fields(kind: type[BaseModel], answer: dict[str, Any]) -> None:
    assert kind.model_validate({**answer, "colour": "red"}) == kind.model_validate(answer)


@pytest.mark.parametrize("path", ["", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\0", "a\n", "a b"])
def test_a_model_file_is_a_name_without_a_way_out_of_its_folder(path: str) -> None:
    told = {"path": path, "size": 1, "blake3": HASH, "url": ""}
    assert AssetRef.model_validate({**told, "path": "model-00001-of-00002.safetensors"})
    with pytest.raises(ValidationError):
        AssetRef.model_validate(told)


def test_the_end_of_a_machine_is_told_in_utc() -> None:
    told = Interruption.model_validate({**LEAST[Interruption], "at": "2026-12-01T12:00:00+02:00"})
    assert (told.at, told.at and told.at.tzinfo) == (datetime(2026, 12, 1, 10, tzinfo=UTC), UTC)


def test_the_steps_of_a_start_are_in_order() -> None:
    words = (StartPhase.__doc__ or "").partition(",")[0].split(" → ")
    assert [p.value for p in sorted(StartPhase, key=lambda p: p.rank)] == words
    assert [p.rank for p in StartPhase] == list(range(8))


@pytest.mark.parametrize(
    ("verdict", "fault", "clean"),
    [("passed", "", True), ("unclear", "", True), ("unclear", "copied", False), ("suspect", "", False),
     ("failed", "reward", False)],
)  # fmt: skip
def test_an_audit_is_clean_if_it_found_nothing(verdict: str, fault: str, clean: bool) -> None:
    assert Audit.model_validate({**LEAST[Audit], "verdict": verdict, "fault": fault}).clean is clean


@pytest.mark.parametrize(
    ("role", "name"), [("source", "source.py"), ("train", "train.jsonl"), ("heldout", "heldout.jsonl")]
)
def test_a_task_s_file_has_what_it_holds_in_its_key(role: str, name: str) -> None:
    file = TaskFile.model_validate({"role": role, "size": 1, "blake3": "0123456789abcdef" * 4})
    assert (file.name, file.key("job_1")) == (name, f"jobs/job_1/task/0123456789abcdef-{name}")


@pytest.mark.parametrize(
    ("changes", "off"),
    [
        ({}, False),
        ({"audit_share": 0, "probation": 0, "each_version": False}, True),
        ({"audit_share": 0.1, "probation": 0, "each_version": False}, False),
        ({"audit_share": 0, "probation": 1, "each_version": False}, False),
        ({"audit_share": 0, "probation": 0, "each_version": True}, False),
    ],
)
def test_trust_is_blind_only_without_any_audit(changes: dict[str, Any], off: bool) -> None:
    assert TrustSpec.model_validate(changes).off is off
