"""What becomes of an HTTP call of the agent: how long it waits before the next try, and which error an answer means.

Invariant: no error holds a URL, which may be presigned.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import httpx

from app.protocol import errors
from app.protocol.errors import EchoError, FieldError, Refused, Unavailable

BACKOFF_S, BACKOFF_MAX_S = 0.25, 5.0

_BY_CODE: dict[str, type[EchoError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EchoError)
}
_BY_STATUS: dict[int, type[EchoError]] = {
    400: errors.Malformed,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    410: errors.Gone,
    413: errors.TooLarge,
    422: errors.BadInput,
    429: errors.Unavailable,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.Unavailable,
}

Got = TypeVar("Got")


class Unreached(Unavailable):
    """No connection came about: the request was certainly not seen."""

    code = "unreached"


def never_sent(error: Unavailable) -> bool:
    """Whether the other side certainly has not seen a call."""
    return isinstance(error, Unreached)


async def reach(call: Awaitable[Got], whom: str) -> Got:
    """Await an HTTP call; what goes wrong below HTTP becomes Unavailable, without URL."""
    try:
        return await call
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        raise Unreached(f"{whom} can't be reached ({type(error).__name__})") from error
    except (httpx.HTTPError, TimeoutError) as error:
        raise Unavailable(f"{whom} does not answer ({type(error).__name__})") from error


def backoff(attempt: int, jitter: float) -> float:
    """Seconds before repeat number `attempt` (from 0): doubles up to a limit, then drawn from its upper half."""
    full = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(attempt, 10))
    return full * (0.5 + 0.5 * jitter)


def error_of(response: httpx.Response) -> EchoError:
    """The error that an `application/problem+json` answer stands for; without one, by the status."""
    problem = _problem(response)
    detail = str(problem.get("detail") or problem.get("title") or f"HTTP {response.status_code}")[:1000]
    code = str(problem.get("code") or str(problem.get("type", "")).replace(":", "/").rsplit("/", 1)[-1])
    if code == Refused.code:
        return Refused(str(problem.get("reason") or "unknown"), detail)
    default = Unavailable if response.status_code >= 500 else errors.BadInput
    kind = _BY_CODE.get(code.replace("-", "_")) or _BY_STATUS.get(response.status_code, default)
    if response.status_code >= 500:
        kind = Unavailable
    fields = problem.get("errors")
    listed = [f for f in fields if isinstance(f, dict)] if isinstance(fields, list) else []
    return kind(detail, errors=[FieldError(str(f.get("pointer", "")), str(f.get("detail", ""))) for f in listed])


def _problem(response: httpx.Response) -> dict[str, Any]:
    if not response.headers.get("content-type", "").startswith("application/problem+json"):
        return {}
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
