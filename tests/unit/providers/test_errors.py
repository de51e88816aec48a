"""What a refusal means: the body's words first, the status second."""

from __future__ import annotations

import json
from typing import Any

import pytest

from providers import base
from providers.vastai.errors import classify

DELETED = {"success": False, "error": "no_such_instance", "msg": "Instance 1 not found."}
BAD_KEY = {"success": False, "error": "auth_error", "msg": "Invalid user key"}
HTML = "<html>502 Bad Gateway</html>"


def error(call: str, status: int, body: Any, headers: dict[str, str] | None = None) -> base.ProviderError:
    text = body if isinstance(body, str) else json.dumps(body)
    return classify(call, status, headers or {}, text, now=1_000_000.0, provider="vastai")


@pytest.mark.parametrize(
    ("call", "status", "body", "kind"),
    [
        ("destroy", 404, BAD_KEY, base.AuthError),
        ("list", 401, BAD_KEY, base.AuthError),
        ("list", 404, {"msg": "Session expired. Please log in again."}, base.AuthError),
        ("list", 401, {"msg": "This needs Two Factor Authentication"}, base.AuthError),
        ("list", 403, "forbidden", base.AuthError),
        ("destroy", 404, DELETED, base.InstanceNotFound),
        ("destroy", 404, {"error": "not_found"}, base.InstanceNotFound),
        ("destroy", 404, HTML, base.MalformedAnswer),
        ("destroy", 404, {"detail": "Not Found"}, base.MalformedAnswer),
        ("create", 404, {"error": "not_found"}, base.OfferGone),
        ("create", 404, {"error": "invalid_args", "msg": "error 404/3603: no_such_ask Instance"}, base.OfferGone),
        ("create", 410, {"error": "no_such_ask", "msg": "gone"}, base.OfferGone),
        ("list", 410, {"error": "deprecated_endpoint", "msg": "gone"}, base.EndpointDeprecated),
        ("create", 410, {"error": "deprecated_endpoint", "msg": "gone"}, base.EndpointDeprecated),
        ("create", 410, HTML, base.MalformedAnswer),
        ("create", 400, {"error": "invalid_price", "msg": "low"}, base.BidTooLow),
        ("bid", 400, {"error": "invalid_price", "msg": "low"}, base.BadRequest),
        ("create", 400, {"error": "invalid_args", "msg": "env must be a dict"}, base.BadRequest),
        ("create", 400, {"error": "no_ssh_key_for_vm", "msg": "x"}, base.BadRequest),
        ("create", 400, {"error": "something_new", "msg": "x"}, base.BadRequest),
        ("create", 400, {"error": "insufficient_credit", "msg": "x"}, base.CreditError),
        ("create", 400, {"error": "invalid_args", "msg": "Your account lacks credit"}, base.CreditError),
        ("create", 402, "pay", base.CreditError),
        ("create", 400, {"error": "quota_exceeded", "msg": "x"}, base.QuotaError),
        ("list", 500, {"detail": "boom"}, base.Transient),
        ("list", 502, HTML, base.Transient),
        ("list", 418, "teapot", base.MalformedAnswer),
    ],
)
def test_kind(call: str, status: int, body: Any, kind: type[base.ProviderError]) -> None:
    found = error(call, status, body)
    assert type(found) is kind
    assert found.provider == "vastai"


@pytest.mark.parametrize(
    ("body", "headers", "wait"),
    [
        ("API requests too frequent: endpoint threshold=4.5", {}, 4.5),
        ({"detail": "API requests too frequent endpoint threshold=12"}, {}, 12.0),
        ({"success": False, "error": "rate_limit_exceeded", "msg": "slow down"}, {}, 4.5),
        ("", {"retry-after": "30"}, 30.0),
        ("threshold=1.0", {"retry-after": "7"}, 7.0),
        ("", {"retry-after": "soon"}, 4.5),
    ],
)
def test_how_long_to_wait(body: Any, headers: dict[str, str], wait: float) -> None:
    found = error("create", 429, body, headers)
    assert isinstance(found, base.RateLimited)
    assert (found.wait_s, found.daily) == (wait, False)


def test_the_daily_quota_waits_for_its_reset() -> None:
    found = error("search", 429, {"error": "search_quota_exceeded"}, {"x-ratelimit-reset": "1003600"})
    assert isinstance(found, base.RateLimited)
    assert (found.daily, found.wait_s) == (True, 3600.0)
    midnight = error("search", 429, {"error": "search_quota_exceeded"})
    assert isinstance(midnight, base.RateLimited)
    assert midnight.wait_s == 86_400 - 1_000_000 % 86_400


def test_keys_do_not_reach_messages() -> None:
    found = error("user", 400, {"error": "odd", "msg": "x", "api_key": "s3cret", "instance_api_key": "s3cret"})
    assert "s3cret" not in found.raw + str(found)
