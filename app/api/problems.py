"""Every error answer is `application/problem+json` (RFC 9457).

Invariant: an answer never holds a value that the client sent in a field (it may be a secret) nor anything about an
error that we did not foresee; such an error is logged under the id that the client is given.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from app.protocol.errors import (
    BadInput,
    Conflict,
    EchoError,
    FieldError,
    Forbidden,
    Gone,
    Malformed,
    NotFound,
    Refused,
    TooLarge,
    Unauthorized,
    Unavailable,
)

PROBLEM_JSON = "application/problem+json"
REQUEST_ID_HEADER = "X-Request-Id"
CHALLENGE = 'Bearer realm="echo2"'
"""RFC 9110 asks for a challenge with every 401."""

_BY_STATUS: dict[int, type[EchoError]] = {
    kind.status: kind
    for kind in (Malformed, Unauthorized, Forbidden, NotFound, Conflict, Gone, TooLarge, BadInput, Unavailable)
}
"""What the framework's own errors are called here, so that a status has one code whoever raised it."""

_ZERO_BYTE = frozenset({"22021", "22P05"})
"""PostgreSQL's codes for it, in a text and in JSON."""
_log = logging.getLogger(__name__)


class Problem(JSONResponse):
    """An error answer. `code` is stable and is also the end of `type`; `extra` adds members."""

    media_type = PROBLEM_JSON

    def __init__(
        self,
        *,
        status: int,
        code: str,
        title: str,
        detail: str,
        errors: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        content: dict[str, Any] = {
            "type": f"urn:echo2:problem:{code}",
            "title": title,
            "status": status,
            "detail": detail,
            "code": code,
        }
        if errors:
            content["errors"] = [dict(error) for error in errors]
        sent = dict(headers or {})
        if status == HTTPStatus.UNAUTHORIZED and not any(name.lower() == "www-authenticate" for name in sent):
            sent["WWW-Authenticate"] = CHALLENGE
        super().__init__(content | dict(extra or {}), status_code=status, headers=sent)


def problem(error: EchoError, headers: Mapping[str, str] | None = None) -> Problem:
    """One of our errors as an answer; a refused trajectory file adds its `reason`."""
    return Problem(
        status=error.status,
        code=error.code,
        title=error.title,
        detail=error.detail,
        errors=[_field(e) for e in error.errors],
        headers=headers,
        extra={"reason": error.reason} if isinstance(error, Refused) else None,
    )


def json_pointer(parts: Sequence[str | int]) -> str:
    """RFC 6901: `("batch", "group_size")` → `/batch/group_size`; no parts are the whole document, ``."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def within(document: object, parts: Sequence[str | int], *, missing: bool) -> list[str | int]:
    """The parts that lead to a place in the document: pydantic puts the kinds that a value might have been between
    them (`("machine_id", "int")`), which are no places. `missing`: the last one is a field that should be there."""
    found: list[str | int] = []
    for part in parts:
        inside = isinstance(part, int) and isinstance(document, list) and part < len(document)
        if inside or (isinstance(document, dict) and part in document):
            document = document[part]  # type: ignore[index]
            found.append(part)
        elif not found:
            # A field of the document itself that a validator filled in.
            return [part]
    return [*found, parts[-1]] if missing and parts else found


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem."""
    app.add_exception_handler(EchoError, _on_echo_error)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(DBAPIError, _on_database)
    app.add_exception_handler(Exception, _on_surprise)


def _field(error: FieldError) -> dict[str, str]:
    return {"pointer": error.pointer, "detail": error.detail}


def _where(request: Request) -> str:
    request_id = getattr(request.state, "request_id", "-")
    return f"request {request_id}: {request.method} {request.url.path}"


async def _on_echo_error(request: Request, error: Exception) -> Problem:
    assert isinstance(error, EchoError)
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.warning("%s: %s: %s", _where(request), error.code, error.detail)
    return problem(error)


async def _on_database(request: Request, error: Exception) -> Problem:
    """PostgreSQL keeps no zero byte in a text; whoever sent one is told so."""
    assert isinstance(error, DBAPIError)
    if getattr(error.orig, "sqlstate", None) in _ZERO_BYTE:
        return problem(BadInput("a text in the request has a zero byte (\\u0000), which can't be kept"))
    return await _on_surprise(request, error)


async def _on_validation(request: Request, error: Exception) -> Problem:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    unreadable = [e for e in found if e["type"] == "json_invalid"]
    if unreadable:
        position, why = unreadable[0]["loc"][-1], unreadable[0].get("ctx", {}).get("error", "")
        return problem(Malformed(f"the body is not JSON: {why} at character {position}"))
    errors = [_explain(e, error.body) for e in found]
    if any(e["loc"] == ("body",) and isinstance(e.get("input"), bytes) for e in found):
        # It was not even looked at: curl -d says that what it sends is a form.
        errors = [{"in": "header", "pointer": "/Content-Type", "detail": "send Content-Type: application/json"}]
    first = f"{errors[0]['pointer'] or errors[0]['in']}: {errors[0]['detail']}" if errors else "see errors"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    detail = f"the request is not valid: {first}{more}"
    return Problem(status=BadInput.status, code=BadInput.code, title=BadInput.title, detail=detail, errors=errors)


def _explain(error: Mapping[str, Any], body: object) -> dict[str, str]:
    """One error of pydantic: where (`in` is body, query, path, header or cookie), and what to change."""
    place, *parts = error["loc"] or ("body",)
    if place == "body":
        parts = within(body, parts, missing=error["type"] == "missing")
    return {"in": str(place), "pointer": json_pointer(parts), "detail": what_to_change(error)}


def what_to_change(error: Mapping[str, Any]) -> str:
    """One error of pydantic in words for who wrote the request."""
    match error["type"]:
        case "extra_forbidden":
            return "there is no such field; remove it"
        case "missing":
            return "this field is required"
        case "model_attributes_type" | "model_type" | "dict_type":
            return "must be a JSON object"
    return str(error["msg"]).removeprefix("Value error, ")


async def _on_http(request: Request, error: Exception) -> Problem:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    known = _BY_STATUS.get(int(status))
    title = known.title if known else status.phrase.capitalize()
    code = known.code if known else re.sub(r"[^a-z0-9]+", "_", status.phrase.lower())
    detail = error.detail
    if status is HTTPStatus.NOT_FOUND and detail == status.phrase:
        detail = f"there is nothing at {request.url.path}"
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_methods(request)) or (error.headers or {}).get("Allow", "")
        detail = f"{request.method} is not possible here" + (f"; possible: {allowed}" if allowed else "")
        return Problem(status=int(status), code=code, title=title, detail=detail, headers={"Allow": allowed})
    return Problem(status=int(status), code=code, title=title, detail=detail, headers=error.headers)


def _methods(request: Request) -> list[str]:
    """What may be done at this path; the framework itself names only the methods of the first route that has it."""
    found: set[str] = set()
    for template, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", template), request.url.path):
            found |= {method.upper() for method in operations}
    return sorted(found)


async def _on_surprise(request: Request, error: Exception) -> Problem:
    _log.error("%s failed: %s", _where(request), type(error).__name__)
    request_id = getattr(request.state, "request_id", None)
    known = f"; its id is {request_id}" if request_id else ""
    return Problem(
        status=500,
        code=EchoError.code,
        title=EchoError.title,
        detail=f"something went wrong here, and the request may or may not have had an effect{known}",
        # This answer is made outside of the middleware that sets the id on all others, and the server ends the
        # connection after it: a client that did not know would send its next request into the void.
        headers={"Connection": "close"} | ({REQUEST_ID_HEADER: request_id} if request_id else {}),
    )
