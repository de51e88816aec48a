"""Refusals in vast.ai's own shapes.

Invariant: a refusal has changed nothing, unless it carries `new_contract`.
"""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """An answer other than success. `status` is the HTTP status, `body` the JSON object sent."""

    def __init__(self, status: int, error: str, msg: str, **extra: Any) -> None:
        super().__init__(msg)
        self.status = status
        self.body: dict[str, Any] = {"success": False, "error": error, "msg": msg, **extra}


def auth_error() -> Refused:
    """A missing or wrong key: vast.ai answers 404, not 401."""
    return Refused(404, "auth_error", "Invalid user key")


def no_such_instance(instance_id: int) -> Refused:
    """The instance never was, or is gone."""
    return Refused(404, "no_such_instance", f"Instance {instance_id} not found.")


def invalid_args(msg: str) -> Refused:
    """The request is wrong."""
    return Refused(400, "invalid_args", msg)


def invalid_request(msg: str) -> Refused:
    """The query is wrong."""
    return Refused(400, "invalid_request", msg)
