"""The errors that adapters may raise: one tree, with stable codes and what the caller may do next.

Invariant: an error says what is known, never what is likely; `raw` holds no secret.
"""

from __future__ import annotations

from enum import StrEnum


class Retry(StrEnum):
    """What the caller may do after an error."""

    NEVER = "never"
    BACKOFF = "backoff"
    NEXT_OFFER = "next_offer"
    NEXT_POOL = "next_pool"


class ProviderError(Exception):
    """Root of everything an adapter raises. `code` is stable; `raw` is the provider's text without secrets."""

    code = "provider_error"
    retry = Retry.NEVER

    def __init__(self, message: str, *, provider: str = "", raw: str = "") -> None:
        super().__init__(message)
        self.provider = provider
        self.raw = raw[:500]


class AuthError(ProviderError):
    """The key is missing, wrong, or may not do this."""

    code = "provider_auth"


class CreditError(ProviderError):
    """The account has no money left."""

    code = "provider_credit"


class QuotaError(ProviderError):
    """The account's quota forbids this kind of machine."""

    code = "provider_quota"
    retry = Retry.NEXT_POOL


class RateLimited(ProviderError):
    """Asked too often; wait `wait_s` seconds."""

    code = "provider_rate_limited"
    retry = Retry.BACKOFF

    def __init__(self, message: str, *, wait_s: float, daily: bool = False, provider: str = "", raw: str = "") -> None:
        super().__init__(message, provider=provider, raw=raw)
        self.wait_s = wait_s
        self.daily = daily


class OfferGone(ProviderError):
    """Somebody else took the offer, or it was withdrawn."""

    code = "offer_gone"
    retry = Retry.NEXT_OFFER


class NoCapacity(ProviderError):
    """The pool has nothing left."""

    code = "no_capacity"
    retry = Retry.NEXT_POOL


class BidTooLow(ProviderError):
    """The bid does not win now."""

    code = "bid_too_low"
    retry = Retry.NEXT_OFFER


class BadRequest(ProviderError):
    """The provider says that our request is wrong."""

    code = "provider_bad_request"


class InstanceNotFound(ProviderError):
    """The provider positively says that there is no such instance."""

    code = "instance_not_found"


class EndpointDeprecated(ProviderError):
    """The provider retired the call: proves nothing about instances or keys."""

    code = "provider_endpoint_deprecated"


class MalformedAnswer(ProviderError):
    """The answer can't be read; it never counts as empty."""

    code = "provider_malformed_answer"
    retry = Retry.BACKOFF


class Transient(ProviderError):
    """Connection, timeout or 5xx on a call that changes nothing."""

    code = "provider_transient"
    retry = Retry.BACKOFF


class CapabilityError(ProviderError):
    """The provider can't do this at all; raised before any call."""

    code = "provider_capability"
