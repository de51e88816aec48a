"""The one error tree. Every error has a stable `code`, an HTTP status and a message that says what to change.

Invariant: whatever crosses a process boundary as an error is one of these, as `application/problem+json`.

EchoError
├── BadInput            422  the request is readable but wrong
├── Malformed           400  the request can't be read, or is too old
├── Unauthorized        401  no key, or a wrong one
├── Forbidden           403  a valid key that may not do this
├── NotFound            404
├── Conflict            409  the state or an earlier request forbids it
├── Gone                410  it existed and is over
├── TooLarge            413
├── Unavailable         503  a part that is needed can't answer now
├── Refused             422  a trajectory file that can't be accepted, with its reason
├── TaskFailed          500  a task's own code failed, hung or was killed
├── IntegrityError      500  a hash, size or signature does not match
└── LearnerError        500  the learner can't go on, with its reason
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldError:
    """One wrong field: a JSON pointer and what to change."""

    pointer: str
    detail: str


class EchoError(Exception):
    """Root of all errors of the application."""

    code = "internal"
    status = 500
    title = "Internal error"

    def __init__(self, detail: str, *, errors: Sequence[FieldError] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = tuple(errors)


class BadInput(EchoError):
    """The request is readable but wrong; `errors` names the fields."""

    code = "invalid_request"
    status = 422
    title = "Invalid request"


class Malformed(EchoError):
    """The request can't be read, or is too old."""

    code = "malformed_request"
    status = 400
    title = "Malformed request"


class Unauthorized(EchoError):
    """No key or token, or a wrong one."""

    code = "unauthorized"
    status = 401
    title = "Unauthorized"


class Forbidden(EchoError):
    """A valid key or token that may not do this."""

    code = "forbidden"
    status = 403
    title = "Forbidden"


class NotFound(EchoError):
    """There is no such thing."""

    code = "not_found"
    status = 404
    title = "Not found"


class Conflict(EchoError):
    """The current state, or an earlier request, forbids it."""

    code = "conflict"
    status = 409
    title = "Conflict"


class Gone(EchoError):
    """It existed and is over: a used join token, a closed lease."""

    code = "gone"
    status = 410
    title = "Gone"


class TooLarge(EchoError):
    """The body exceeds the limit."""

    code = "too_large"
    status = 413
    title = "Too large"


class Unavailable(EchoError):
    """A part that is needed can't answer now; try again."""

    code = "unavailable"
    status = 503
    title = "Unavailable"


class Refused(EchoError):
    """A trajectory file that can't be accepted. `reason` is one of a closed set and is counted."""

    code = "trajectory_refused"
    status = 422
    title = "Trajectory refused"

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TaskFailed(EchoError):
    """A task's own code raised, hung, was killed or answered nonsense. Never the same as a reward of 0."""

    code = "task_failed"
    title = "Task failed"


class IntegrityError(EchoError):
    """A hash, size or signature does not match what was promised."""

    code = "integrity"
    title = "Integrity check failed"


class LearnerError(EchoError):
    """The learner can't go on; the message is shown as the job's status reason."""

    code = "learner_failed"
    title = "Learner failed"
