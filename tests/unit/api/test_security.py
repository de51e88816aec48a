"""Keys, bearer tokens and Standard Webhooks signatures."""

from __future__ import annotations

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta

import pytest
from starlette.requests import Request

from app.api.security import bearer, hash_key, key_matches, new_key, verify_webhook
from app.protocol.errors import EchoError, Malformed, Unauthorized

RAW = b"0123456789abcdef01234567"
SECRET = "whsec_" + base64.b64encode(RAW).decode()
NOW = datetime(2026, 12, 1, 10, 0, 0, tzinfo=UTC)
BODY = '{"provider": "vastai", "é": 1}'.encode()


def test_keys_are_long_random_and_tell_their_kind() -> None:
    made = {new_key("ek_") for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("ek_") and len(key) == 3 + 43 for key in made)


def test_only_the_key_itself_matches_its_hash() -> None:
    key = new_key("nt_")
    assert hash_key(key) == hashlib.sha256(key.encode()).hexdigest()
    assert key_matches(key, hash_key(key))
    assert not key_matches(key[:-1], hash_key(key))
    assert not key_matches(hash_key(key), hash_key(key))
    assert not key_matches("é", "é")


def request(authorization: str | None) -> Request:
    headers = [(b"authorization", authorization.encode("latin-1"))] if authorization is not None else []
    return Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": headers})


@pytest.mark.parametrize("header", ["Bearer ek_abc", "bearer ek_abc", "BEARER   ek_abc", " Bearer ek_abc "])
def test_a_bearer_token_is_read(header: str) -> None:
    assert bearer(request(header)) == "ek_abc"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "ek_abc", "Basic ek_abc", "Bearer a b", "Bearer é", "Bearer " + "x" * 513]
)
def test_anything_else_is_unauthorized_and_not_repeated(header: str | None) -> None:
    with pytest.raises(Unauthorized) as caught:
        bearer(request(header))
    assert "Bearer" in caught.value.detail
    assert "ek_abc" not in caught.value.detail


def signature(raw: bytes, message_id: str, stamp: str, body: bytes) -> str:
    mac = hmac.new(raw, f"{message_id}.{stamp}.".encode() + body, hashlib.sha256)
    return "v1," + base64.b64encode(mac.digest()).decode()


def signed(age: timedelta = timedelta(0), *, raw: bytes = RAW, message_id: str = "msg_1") -> dict[str, str]:
    stamp = str(int((NOW - age).timestamp()))
    return {
        "webhook-id": message_id,
        "webhook-timestamp": stamp,
        "webhook-signature": signature(raw, message_id, stamp, BODY),
    }


def test_the_vector_of_the_specifications_libraries() -> None:
    headers = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    at = datetime.fromtimestamp(1614265330, UTC)
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    assert verify_webhook(secret, headers, b'{"test": 2432232314}', at) == "msg_p5jXN8AQM9LWM0D4loKWxJek"


@pytest.mark.parametrize("minutes", [-5, -1, 0, 5])
def test_a_signed_message_within_five_minutes_is_accepted(minutes: int) -> None:
    assert verify_webhook(SECRET, signed(timedelta(minutes=minutes)), BODY, NOW) == "msg_1"


@pytest.mark.parametrize("seconds", [301, 3600, 10**8, -301, -3600])
def test_a_well_signed_message_from_another_time_is_malformed(seconds: int) -> None:
    with pytest.raises(Malformed, match="more than 5 minutes"):
        verify_webhook(SECRET, signed(timedelta(seconds=seconds)), BODY, NOW)


@pytest.mark.parametrize("age", [0, 3600])
def test_another_secret_is_unauthorized_whatever_the_time(age: int) -> None:
    with pytest.raises(Unauthorized, match="no signature"):
        verify_webhook(SECRET, signed(timedelta(seconds=age), raw=b"x" * 24), BODY, NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"webhook-id": "msg_2"},
        {"webhook-timestamp": str(int(NOW.timestamp()) + 1)},
        {"webhook-signature": "v1,"},
        {"webhook-signature": "v1"},
        {"webhook-signature": "v1,!!!"},
        {"webhook-signature": "v1,é"},
        {"webhook-signature": "v1a,AAAA"},
        {"webhook-signature": signed()["webhook-signature"].replace("v1,", "v2,")},
        {"webhook-signature": signed()["webhook-signature"] + "x"},
    ],
)
def test_a_changed_header_is_unauthorized(change: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        verify_webhook(SECRET, signed() | change, BODY, NOW)


def test_a_changed_body_is_unauthorized() -> None:
    with pytest.raises(Unauthorized):
        verify_webhook(SECRET, signed(), BODY + b" ", NOW)


def test_one_good_signature_among_others_is_enough() -> None:
    headers = signed()
    headers["webhook-signature"] = f"v1a,AAAA v1,!!! v1,AAAA {headers['webhook-signature']} nonsense"
    assert verify_webhook(SECRET, headers, BODY, NOW) == "msg_1"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"webhook-id": ""}, "needs the headers"),
        ({"webhook-timestamp": ""}, "needs the headers"),
        ({"webhook-signature": ""}, "needs the headers"),
        ({"webhook-timestamp": "soon"}, "whole seconds"),
        ({"webhook-timestamp": "1.5"}, "whole seconds"),
        ({"webhook-timestamp": "-1"}, "whole seconds"),
        ({"webhook-timestamp": "9" * 30}, "whole seconds"),
        ({"webhook-id": "x" * 257}, "webhook-id"),
        ({"webhook-id": "a b"}, "webhook-id"),
    ],
)
def test_headers_that_are_missing_or_unreadable_are_malformed(change: dict[str, str], error: str) -> None:
    headers = {name: value for name, value in (signed() | change).items() if value}
    with pytest.raises(Malformed, match=error):
        verify_webhook(SECRET, headers, BODY, NOW)


def test_a_body_that_is_not_text_is_malformed() -> None:
    with pytest.raises(EchoError) as caught:
        verify_webhook(SECRET, signed(), b"\xff", NOW)
    assert isinstance(caught.value, Malformed)
