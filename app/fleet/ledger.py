"""What a lease costs. Pure, exact.

Invariant: splitting an interval changes nothing: the carry keeps what was less than a micro-dollar, so the sum of all
entries is the true amount rounded down once.
"""

from __future__ import annotations

from dataclasses import dataclass

HOURS_PER_MONTH = 720
"""vast.ai's month for storage."""
_NS_PER_HOUR = 3_600 * 10**9
_BYTES_PER_GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Amount:
    """Whole micro-dollars, and what remains in units of the divisor."""

    micros: int
    carry: int


def _ns(seconds: float) -> int:
    """Time counts to the nanosecond: finer than the differences of two clock readings, so that nothing drifts."""
    return max(0, round(seconds * 1e9))


def rent(rate_micros_h: int, seconds: float, carry: int) -> Amount:
    """Time × rate. `carry` is in micro-dollars × ns/h left over from before."""
    numerator = rate_micros_h * _ns(seconds) + carry
    return Amount(*divmod(numerator, _NS_PER_HOUR))


def disk(micros_gb_month: int, gb: float, seconds: float, carry: int) -> Amount:
    """Size × time × price; a month has 720 hours. Sizes count to a thousandth of a GB."""
    numerator = micros_gb_month * round(gb * 1000) * _ns(seconds) + carry
    return Amount(*divmod(numerator, HOURS_PER_MONTH * _NS_PER_HOUR * 1000))


def traffic(micros_gb: int, size: int, carry: int) -> Amount:
    """Bytes × price per GB."""
    return Amount(*divmod(micros_gb * size + carry, _BYTES_PER_GB))
