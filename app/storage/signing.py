"""Signed URLs of the folder store: what S3 does for its own presigned URLs, for a store that is only a folder.

Invariant: a grant that `check_signature` returns was written by the holder of the key, for exactly this method, this
object, this limit and this time; nothing in a URL is believed before its signature holds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, urlencode

from app.protocol.errors import Forbidden, Gone, TooLarge
from app.storage.objects import validate_key

Method = Literal["GET", "PUT"]

_NUMBER = re.compile(r"[0-9]{1,15}")
_SIGNATURE = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Grant:
    """What a signed URL allows. `expires` is seconds since the epoch; `max_bytes` is set for PUT only."""

    key: str
    method: Method
    expires: int
    max_bytes: int | None


def signature(signing_key: bytes, grant: Grant) -> str:
    """Hex HMAC-SHA256 of a grant. The object key comes last, so that no name can imitate another field."""
    limit = "" if grant.max_bytes is None else str(grant.max_bytes)
    text = "\n".join(["echo2-object-v1", grant.method, str(grant.expires), limit, grant.key])
    return hmac.new(signing_key, text.encode(), hashlib.sha256).hexdigest()


def signed_url(public_url: str, signing_key: bytes, grant: Grant) -> str:
    """`{public_url}/v1/objects/{key}?expires=…&method=…[&max_bytes=…]&signature=…`."""
    query = {"expires": str(grant.expires), "method": str(grant.method)}
    if grant.max_bytes is not None:
        query["max_bytes"] = str(grant.max_bytes)
    query["signature"] = signature(signing_key, grant)
    return f"{public_url.rstrip('/')}/v1/objects/{quote(grant.key, safe='/')}?{urlencode(query)}"


def check_signature(
    signing_key: bytes, key: str, query: Mapping[str, str], *, method: str, now: float, size: int | None = None
) -> Grant:
    """The grant behind a request for `key`, whose query is `query`.

    `method` is the request's own (a HEAD needs a grant for GET), `now` seconds since the epoch, `size` the bytes of the
    body so far as they are known; whoever reads a body of unknown size stops at the grant's `max_bytes`.

    Raises Forbidden (not signed by us, or for another method), Gone (expired), TooLarge, BadInput (an unsafe key).
    """
    grant = _claimed(validate_key(key), query)
    found = query.get("signature", "")
    if not _SIGNATURE.fullmatch(found) or not hmac.compare_digest(found, signature(signing_key, grant)):
        raise Forbidden("the signature of this URL is not valid: use it exactly as it was given, or ask for a new one")
    if ("GET" if method == "HEAD" else method) != grant.method:
        raise Forbidden(f"this URL was signed for {grant.method}, not for {method}")
    if now >= grant.expires:
        raise Gone("this URL has expired: ask for a new one")
    if size is not None and grant.max_bytes is not None and size > grant.max_bytes:
        raise TooLarge(f"{size} bytes are more than the {grant.max_bytes} that this URL allows")
    return grant


def _claimed(key: str, query: Mapping[str, str]) -> Grant:
    method, expires, limit = query.get("method", ""), query.get("expires", ""), query.get("max_bytes")
    if not _NUMBER.fullmatch(expires):
        raise Forbidden("this URL is not signed: it needs expires, method and signature")
    if method == "GET" and limit is None:
        return Grant(key, "GET", int(expires), None)
    if method == "PUT" and limit is not None and _NUMBER.fullmatch(limit):
        return Grant(key, "PUT", int(expires), int(limit))
    raise Forbidden("this URL is not signed for GET, nor for PUT with max_bytes")
