"""Keys and signatures at the HTTP boundary.

Invariant: of a key only its hash is stored, every comparison takes constant time, and no error repeats what was sent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from standardwebhooks import Webhook
from starlette.requests import HTTPConnection

from app.protocol.errors import Malformed, Unauthorized

API_KEY = "ek_"
NODE_TOKEN = "nt_"
JOIN_TOKEN = "jt_"
LEARNER_TOKEN = "lt_"
WEBHOOK_TOLERANCE = timedelta(minutes=5)

_BEARER = re.compile(r"bearer +([!-~]{1,512})", re.IGNORECASE)
_WEBHOOK_ID = re.compile(r"[!-~]{1,256}")
_TIMESTAMP = re.compile(r"[0-9]{1,11}")


def new_key(prefix: str) -> str:
    """A new secret: the prefix that tells its kind, and 32 random bytes as URL-safe text."""
    return prefix + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """SHA-256, hex: what is stored of a key. Fast hashing is enough for 32 random bytes (not for a password)."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_matches(key: str, key_hash: str) -> bool:
    """Whether `key` is the one of this hash, in constant time."""
    return hmac.compare_digest(hash_key(key).encode(), key_hash.encode())


def bearer(request: HTTPConnection) -> str:
    """The token of `Authorization: Bearer TOKEN`. Raises Unauthorized; the answer carries `WWW-Authenticate`."""
    header = request.headers.get("authorization")
    if header is None:
        raise Unauthorized("this call needs a key: send the header Authorization: Bearer KEY")
    match = _BEARER.fullmatch(header.strip())
    if match is None:
        raise Unauthorized("the Authorization header can't be read: it must be Bearer, a space, and the key")
    return match[1]


def verify_webhook(secret: str, headers: Mapping[str, str], body: bytes, now: datetime) -> str:
    """The id of a message signed as Standard Webhooks; the caller accepts each id once.

    `secret` is `whsec_…`; the header names are in small letters (or the mapping ignores case). Raises Unauthorized for
    a signature that is not ours, Malformed for missing or unreadable headers, or a well-signed message that is more
    than 5 minutes from `now`. The library's own `verify` looks at the clock first and gives all of these one error, so
    the signature is made by the library and compared here.
    """
    message_id, stamp, signatures = (headers.get(f"webhook-{name}", "") for name in ("id", "timestamp", "signature"))
    if not message_id or not stamp or not signatures:
        raise Malformed("a webhook needs the headers webhook-id, webhook-timestamp and webhook-signature")
    if not _WEBHOOK_ID.fullmatch(message_id):
        raise Malformed("webhook-id must be 1…256 printable ASCII characters")
    if not _TIMESTAMP.fullmatch(stamp):
        raise Malformed("webhook-timestamp must be whole seconds since 1970")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise Malformed("the body of a webhook must be UTF-8") from error
    sent = datetime.fromtimestamp(int(stamp), UTC)
    expected: str = Webhook(secret).sign(msg_id=message_id, timestamp=sent, data=text)
    if not _any_matches(expected, signatures):
        raise Unauthorized("no signature of webhook-signature fits this message and the webhook secret")
    if abs(now - sent) > WEBHOOK_TOLERANCE:
        raise Malformed("webhook-timestamp is more than 5 minutes from now: sign the message anew when you send it")
    return message_id


def _any_matches(expected: str, signatures: str) -> bool:
    """Whether one of the space-separated `v1,BASE64` is the expected one; other versions are passed over."""
    wanted = base64.b64decode(expected.removeprefix("v1,"))
    found = False
    for signature in signatures.split():
        version, _, text = signature.partition(",")
        if version == "v1":
            try:
                found |= hmac.compare_digest(wanted, base64.b64decode(text, validate=True))
            except (binascii.Error, ValueError):
                continue
    return found
