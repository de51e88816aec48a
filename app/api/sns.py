"""Messages of Amazon SNS: who signed them, and what they say.

Invariant: nothing of a message is believed before its signature fits a certificate that was fetched over TLS from
SNS itself; no other address is ever asked, however the message is made.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal
from urllib.parse import urlsplit

import httpx
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.protocol.errors import Malformed, Unauthorized, Unavailable

Fetch = Callable[[str], Awaitable[bytes]]
"""GET of an https URL, without redirects. Raises httpx.HTTPError, OSError or ValueError unless it was answered 200."""

_HOST = re.compile(r"sns\.[a-z]{2}(-[a-z]+)+-[0-9]{1,2}\.amazonaws\.com(\.cn)?")
_HASHES: dict[str, type[hashes.SHA1] | type[hashes.SHA256]] = {"1": hashes.SHA1, "2": hashes.SHA256}
_SIGNED = {
    "Notification": ("Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type"),
    "SubscriptionConfirmation": ("Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type"),
    "UnsubscribeConfirmation": ("Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type"),
}
MOST_BYTES = 64 << 10
FETCH_S = 10.0
TOLERANCE = timedelta(hours=1)
"""SNS tries again for an hour at most; ids of messages are remembered for longer."""
CERTIFICATES_KEPT = 32


class Message(BaseModel):
    """An SNS message as it is posted. Fields that SNS may add are passed over: they are not signed."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    Type: Literal["Notification", "SubscriptionConfirmation", "UnsubscribeConfirmation"]
    MessageId: str = Field(min_length=1, max_length=200)
    TopicArn: str = Field(min_length=1, max_length=500)
    Message: str
    Timestamp: str
    SignatureVersion: Literal["1", "2"]
    Signature: str
    SigningCertURL: str
    Subject: str | None = None
    SubscribeURL: str | None = None
    Token: str | None = None

    @property
    def signed_text(self) -> bytes:
        """What SNS signs: names and values of the fields that are there, each on a line of its own."""
        pairs = ((name, getattr(self, name)) for name in _SIGNED[self.Type])
        return "".join(f"{name}\n{value}\n" for name, value in pairs if value is not None).encode()


def parse(body: bytes) -> Message:
    """Read a message. Raises Malformed."""
    try:
        return Message.model_validate(json.loads(body))
    except (ValueError, RecursionError, ValidationError) as error:
        raise Malformed("this is not an SNS message; raw message delivery must be off") from error


def is_sns(url: str) -> bool:
    """Whether a URL leads to SNS: https, a host of SNS, no port, no user."""
    try:
        parts = urlsplit(url)
        plain = parts.port is None and parts.username is None and parts.password is None
    except ValueError:
        return False
    return parts.scheme == "https" and plain and _HOST.fullmatch(parts.netloc) is not None


@dataclass(frozen=True, slots=True)
class _Signer:
    key: rsa.RSAPublicKey
    not_before: datetime
    not_after: datetime


class Verifier:
    """Checks signatures; keeps the certificates that it fetched."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._signers: dict[str, _Signer] = {}

    async def verify(self, message: Message, now: datetime) -> None:
        """Raises Unauthorized for a signature that is not SNS's, Malformed for one that is too old, Unavailable when
        the certificate can't be had."""
        if not is_sns(message.SigningCertURL):
            raise Unauthorized("SigningCertURL does not lead to SNS")
        signer = await self._signer(message.SigningCertURL)
        if not signer.not_before <= now <= signer.not_after:
            self._signers.pop(message.SigningCertURL, None)
            raise Unauthorized("the certificate of the signature is not valid now")
        try:
            signature = base64.b64decode(message.Signature, validate=True)
            algorithm = _HASHES[message.SignatureVersion]()
            signer.key.verify(signature, message.signed_text, padding.PKCS1v15(), algorithm)
        except (InvalidSignature, binascii.Error, ValueError) as error:
            raise Unauthorized("the signature does not fit this message") from error
        if abs(now - _moment(message.Timestamp)) > TOLERANCE:
            raise Malformed("the message is more than an hour old")

    async def confirm(self, message: Message) -> None:
        """Say to SNS that we want the topic's messages. Raises Unauthorized for another's URL, Unavailable."""
        if message.SubscribeURL is None or not is_sns(message.SubscribeURL):
            raise Unauthorized("SubscribeURL does not lead to SNS")
        await self._get(message.SubscribeURL, "the subscription can't be confirmed")

    async def _signer(self, url: str) -> _Signer:
        found = self._signers.get(url)
        if found is None:
            found = _read(await self._get(url, "the certificate of SNS can't be fetched"))
            if len(self._signers) >= CERTIFICATES_KEPT:
                self._signers.clear()
            self._signers[url] = found
        return found

    async def _get(self, url: str, trouble: str) -> bytes:
        try:
            return await self._fetch(url)
        except (httpx.HTTPError, OSError, ValueError) as error:
            # The URL may hold a token: only the kind of trouble is told.
            raise Unavailable(f"{trouble} now ({type(error).__name__})") from error


def _read(pem: bytes) -> _Signer:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        key = certificate.public_key()
    except ValueError as error:
        raise Unauthorized("SigningCertURL holds no certificate") from error
    if not isinstance(key, rsa.RSAPublicKey):
        raise Unauthorized("the certificate of the signature has no RSA key")
    return _Signer(key, certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def _moment(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise Malformed("Timestamp can't be read") from error
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


async def fetch(url: str) -> bytes:
    """GET without redirects, at most MOST_BYTES. Raises httpx.HTTPError, OSError, ValueError."""
    client = httpx.AsyncClient(timeout=FETCH_S, follow_redirects=False)
    async with client, client.stream("GET", url) as answer:
        if answer.status_code != 200:
            raise ValueError(f"answered {answer.status_code}")
        data = b""
        async for part in answer.aiter_bytes():
            data += part
            if len(data) > MOST_BYTES:
                raise ValueError("the answer is too large")
    return data
