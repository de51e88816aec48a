"""What an answer to a create proves.

Invariant: "created" takes a success with an id; "refused" takes an id, an error that is named below status 500, or a
429; all else is "unknown".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from providers.base import ProviderError, RateLimited, RentResult

from .errors import malformed, parse_object


def outcome(response: httpx.Response, refusal: Callable[[], ProviderError], provider: str) -> RentResult:
    """What an answer to a create proves. `refusal` is called for what it says, if it is not a success."""
    answer = parse_object(response.text)
    made = _contract_id(answer)
    success = (answer or {}).get("success")
    if response.is_success and success is not False:
        if made is not None:
            return RentResult("created", instance_id=made)
        return RentResult("unknown", error=malformed("create: an answer without new_contract", answer, provider))
    error = refusal()
    if made is not None:
        return RentResult("refused", doomed_id=made, error=error)
    told = answer is not None and (success is False or "error" in answer) and response.status_code < 500
    if told or isinstance(error, RateLimited):
        return RentResult("refused", error=error)
    return RentResult("unknown", error=error)


def _contract_id(answer: dict[str, Any] | None) -> str | None:
    made = (answer or {}).get("new_contract")
    if isinstance(made, bool) or not isinstance(made, int | str) or not str(made).isdigit():
        return None
    return str(made)
