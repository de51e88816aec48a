"""The learner's side of the conversation with the control service.

Invariant: every call ends, at the latest when the control service has been away for `patience_s`; a learner that has
been replaced (409) never goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from app.loopback import PAST_PROXIES
from app.protocol import errors
from app.protocol.audits import AuditAnswer, AuditReport
from app.protocol.errors import EchoError, FieldError, LearnerError, Malformed, Unavailable
from app.protocol.learner import (
    Done,
    Drops,
    EvalReport,
    LearnerDirectives,
    LearnerHeartbeat,
    Published,
    Ready,
    ReadyAnswer,
    StartAnswer,
    StartRequest,
    StepReport,
    TrajectoryPage,
)

log = logging.getLogger(__name__)
PATIENCE_S = 600.0
_TIMEOUT = httpx.Timeout(15.0, connect=5.0)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_CLASSES: Mapping[str, type[EchoError]] = {
    c.code: c
    for c in vars(errors).values()
    if isinstance(c, type) and issubclass(c, EchoError) and c is not errors.Refused
}
_BY_STATUS: Mapping[int, type[EchoError]] = {c.status: c for c in _CLASSES.values() if c.status < 500}

A = TypeVar("A", bound=BaseModel)


class Fenced(LearnerError):
    """Another learner process has taken this job over; this one must end."""

    code = "learner_fenced"


class Control(Protocol):
    """What the learner needs of the control service; see app/protocol/learner.py for the calls."""

    def start(self, request: StartRequest) -> StartAnswer: ...
    def ready(self, body: Ready) -> ReadyAnswer: ...
    def heartbeat(self, body: LearnerHeartbeat) -> LearnerDirectives: ...
    def trajectories(self, after: int, wait_s: float) -> TrajectoryPage: ...
    def published(self, body: Published) -> LearnerDirectives: ...
    def step(self, body: StepReport) -> LearnerDirectives: ...
    def evaluation(self, body: EvalReport) -> LearnerDirectives: ...
    def drops(self, body: Drops) -> LearnerDirectives: ...
    def audits(self, body: AuditReport) -> AuditAnswer: ...
    def done(self, body: Done) -> None: ...


class ControlClient:
    """Blocking; usable from several threads. Close it with `close`, which also ends waits between tries."""

    def __init__(
        self,
        base_url: str,
        job_id: str,
        token: str,
        *,
        patience_s: float = PATIENCE_S,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=f"{base_url.rstrip('/')}/v1/jobs/{job_id}/learner",
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT,
            transport=transport,
            mounts=None if transport is not None else PAST_PROXIES,
        )
        self._patience_s = patience_s
        self._clock = clock
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait

    def close(self) -> None:
        """Release connections; later calls fail."""
        self._closed.set()
        self._http.close()

    def start(self, request: StartRequest) -> StartAnswer:
        """Take the job over; later calls carry the epoch of the answer."""
        answer = self._call("POST", "/start", StartAnswer, body=request)
        self._http.headers["Echo2-Epoch"] = str(answer.epoch)
        return answer

    def ready(self, body: Ready) -> ReadyAnswer:
        """The learner can train; the answer says which steps are to be made again from which groups."""
        return self._call("POST", "/ready", ReadyAnswer, body=body)

    def heartbeat(self, body: LearnerHeartbeat) -> LearnerDirectives:
        """One try only: the next heartbeat comes soon enough. Raises Unavailable."""
        return self._call("POST", "/heartbeat", LearnerDirectives, body=body, patience_s=0)

    def trajectories(self, after: int, wait_s: float) -> TrajectoryPage:
        """Accepted files after a cursor; waits up to `wait_s` for the first."""
        query = {"after": after, "wait_s": wait_s}
        return self._call("GET", "/trajectories", TrajectoryPage, params=query, extra_s=wait_s)

    def published(self, body: Published) -> LearnerDirectives:
        """A version can be pulled."""
        return self._call("POST", "/published", LearnerDirectives, body=body)

    def step(self, body: StepReport) -> LearnerDirectives:
        """A step is done; the same step again is harmless."""
        return self._call("POST", "/steps", LearnerDirectives, body=body)

    def evaluation(self, body: EvalReport) -> LearnerDirectives:
        """A held-out reward."""
        return self._call("POST", "/evals", LearnerDirectives, body=body)

    def drops(self, body: Drops) -> LearnerDirectives:
        """Groups that can't be trained on; the same ones again are harmless."""
        return self._call("POST", "/drops", LearnerDirectives, body=body)

    def audits(self, body: AuditReport) -> AuditAnswer:
        """What audits found; the same ones again are harmless."""
        return self._call("POST", "/audits", AuditAnswer, body=body)

    def done(self, body: Done) -> None:
        """The last word."""
        self._send("POST", "/done", body=body)

    def _call(self, method: str, path: str, answer: type[A], **options: Any) -> A:
        response = self._send(method, path, **options)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise Malformed(f"the answer to {path} is not a {answer.__name__}: {error.error_count()} errors") from error

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: Mapping[str, float] | None = None,
        extra_s: float = 0,
        patience_s: float | None = None,
    ) -> httpx.Response:
        patience = self._patience_s if patience_s is None else patience_s
        deadline = self._clock() + patience
        wait = _FIRST_PAUSE_S
        timeout = httpx.Timeout(15.0 + extra_s, connect=5.0)
        content = None if body is None else body.model_dump_json()
        headers = {"Content-Type": "application/json"} if content is not None else {}
        while True:
            if self._closed.is_set():
                raise Unavailable(f"this client was closed before {path} was answered")
            try:
                response = self._http.request(
                    method, path, content=content, params=params, headers=headers, timeout=timeout
                )
                if response.status_code not in _TRY_AGAIN:
                    return _checked(response, path)
                trouble = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                trouble = type(error).__name__
            if self._clock() + wait > deadline:
                raise Unavailable(f"the control service has not answered {path} for {patience:.0f} s: {trouble}")
            log.info("%s: %s; next try in %.1f s", path, trouble, wait)
            self._pause(wait)
            wait = min(_LONGEST_PAUSE_S, wait * 2)


def _checked(response: httpx.Response, path: str) -> httpx.Response:
    if response.is_success:
        return response
    raise problem(response.status_code, response.content, path)


def problem(status: int, content: bytes, path: str) -> EchoError:
    """An `application/problem+json` answer as an error of the tree; 409 is always Fenced."""
    detail, code, fields = f"{path} was answered HTTP {status}", "", []
    try:
        body = httpx.Response(status, content=content).json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        detail = f"{path}: {body.get('detail') or body.get('title') or f'HTTP {status}'}"
        code = str(body.get("code") or body.get("type") or "").rsplit("/", 1)[-1].rsplit(":", 1)[-1]
        listed = body.get("errors")
        for entry in listed if isinstance(listed, list) else []:
            if isinstance(entry, dict):
                fields.append(FieldError(str(entry.get("pointer", "")), str(entry.get("detail", ""))))
    if status == 409:
        return Fenced(f"this learner may not go on, another has taken over or it is out of step: {detail}")
    return (_CLASSES.get(code) or _BY_STATUS.get(status) or LearnerError)(detail, errors=fields)
