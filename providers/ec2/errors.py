"""What a failed call of boto3 means.

Invariant: pure; EC2's error code decides, the HTTP status only where the code is unknown, because EC2 answers "no
capacity" with a 500 and throttling with a 503.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProxyConnectionError,
)
from botocore.parsers import ResponseParserError

from providers.base import (
    AuthError,
    BadRequest,
    BidTooLow,
    InstanceNotFound,
    MalformedAnswer,
    NoCapacity,
    ProviderError,
    QuotaError,
    RateLimited,
    Transient,
)

Failed = (ClientError, BotoCoreError, ResponseParserError)
"""All that a call of boto3 raises."""
_KEYLESS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_NOT_SENT = (
    *_KEYLESS, NoRegionError, ParamValidationError, EndpointConnectionError, ConnectTimeoutError, ProxyConnectionError,
)  # fmt: skip
THROTTLE_WAIT_S = 5.0
MISMATCH = "IdempotentParameterMismatch"
_TOKEN = re.compile(r"(x-amz-security-token\s*[:=]\s*)\S+", re.IGNORECASE)

_GROUPS: Mapping[type[ProviderError], Sequence[str]] = {
    AuthError: (
        "AuthFailure", "UnauthorizedOperation", "InvalidClientTokenId", "UnrecognizedClientException", "Blocked",
        "SignatureDoesNotMatch", "IncompleteSignature", "MissingAuthenticationToken", "ExpiredToken", "RequestExpired",
        "ExpiredTokenException", "AccessDenied", "AccessDeniedException", "OptInRequired", "PendingVerification",
    ),
    QuotaError: (
        "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded", "VolumeLimitExceeded",
        "MaxConfigLimitExceeded",
    ),
    NoCapacity: (
        "InsufficientInstanceCapacity", "InsufficientCapacity", "InsufficientHostCapacity", "UnfulfillableCapacity",
        "InsufficientAddressCapacity", "InsufficientFreeAddressesInSubnet", "Unsupported", "SpotInstancesNotSupported",
    ),
    BidTooLow: ("SpotMaxPriceTooLow",),
    RateLimited: ("RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"),
    InstanceNotFound: ("InvalidInstanceID.NotFound",),
    Transient: ("InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable", "RequestTimeout"),
    BadRequest: (MISMATCH,),
}  # fmt: skip
_BY_CODE = {code: kind for kind, codes in _GROUPS.items() for code in codes}


def code_of(error: Exception) -> str:
    """EC2's error code; "" when the error has none."""
    if not isinstance(error, ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status if isinstance(status, int) else 0


def redact(text: str, secrets: Sequence[str]) -> str:
    """The text without keys."""
    for secret in secrets:
        text = text.replace(secret, "…")
    return _TOKEN.sub(r"\1…", text)


def _kind(error: Exception) -> type[ProviderError]:
    if isinstance(error, ResponseParserError):
        return MalformedAnswer
    if isinstance(error, ClientError):
        known = _BY_CODE.get(code_of(error))
        if known is not None:
            return known
        return BadRequest if 400 <= _status(error) < 500 else Transient
    if isinstance(error, _KEYLESS):
        return AuthError
    if isinstance(error, NoRegionError | ParamValidationError):
        return BadRequest
    return Transient


def classify(call: str, error: Exception, *, provider: str, secrets: Sequence[str] = ()) -> ProviderError:
    """The typed error of a failed call."""
    raw = redact(str(error), secrets)
    message = f"{call}: {code_of(error) or type(error).__name__}: {raw}"[:300]
    kind = _kind(error)
    if kind is RateLimited:
        return RateLimited(message, wait_s=THROTTLE_WAIT_S, provider=provider, raw=raw)
    return kind(message, provider=provider, raw=raw)


def leaves_nothing(error: Exception) -> bool:
    """Whether a failed create positively made nothing: never sent, or refused with a reason.

    A token that was used with another request is no such proof: that request may have made an instance.
    """
    if isinstance(error, _NOT_SENT):
        return True
    if not isinstance(error, ClientError) or code_of(error) == MISMATCH:
        return False
    return _kind(error) is not Transient
