"""What links carry, by the providers' word and by what was measured. Pure.

Invariant: a link counts as slower than advertised only if a hop was limited and its other end doesn't explain that
better; what it is taken for changes by more than BAND or not at all, so that noise moves nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

PACKETS = 1500 / 1448
"""Bytes on the link per byte of payload: TCP/IP headers with timestamps, packets of 1500 bytes."""
BAND = 0.2
"""What a link is taken for is kept while the measurements stay within this share of it."""
SURE = 1.3
"""An end that was seen to carry so many times the rate of a hop isn't what limits the hop."""
BELIEVED = 4.0
"""A node may say that its link carried so many times what is advertised: more is not told, but made up."""
BURST_S = 60.0
UNKNOWN_MBPS = 10_000.0
WEIGHT = 0.5
"""Share of a new measurement. The sender has averaged it over its windows already."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a machine's link, Mbit/s on the wire."""

    advertised: float
    """0: the provider doesn't tell."""
    measured: float | None = None
    """Smoothed limit, or the most that was seen to pass."""
    used: float | None = None
    """What it is taken for instead of the advertised rate, once measurements differ from that."""

    @property
    def mbps(self) -> float:
        """What to reckon with."""
        return self.advertised if self.used is None else self.used


def believed_bytes(said: int, counted: int, advertised_mbps: float, seconds: float) -> int:
    """Bytes that a machine is charged for, of those that its node says it has moved since it began.

    Traffic is money, and a node's word: what no such link can have carried in that time is left out until the
    provider's own bill tells. Never less than `counted`, what it was charged for before.
    """
    most = BELIEVED * (advertised_mbps or UNKNOWN_MBPS) * 1e6 / 8 * (max(0.0, seconds) + BURST_S)
    return max(counted, min(said, int(most)))


def wire_mbps(payload_bytes_per_s: float) -> float:
    """Mbit/s on the link, packet headers included."""
    return payload_bytes_per_s * PACKETS * 8e-6


def learn(link: Link, rate: float, *, limited: bool) -> Link:
    """The link after a measurement of `rate` Mbit/s. Only one that is `limited` by this link can lower it."""
    if not limited:
        measured = rate if link.measured is None else max(link.measured, rate)
        if rate <= link.mbps:
            return replace(link, measured=measured)
        return _held(replace(link, measured=measured), rate)
    measured = rate if link.measured is None else link.measured + WEIGHT * (rate - link.measured)
    return _held(replace(link, measured=measured), measured)


def _held(link: Link, now: float) -> Link:
    if link.mbps > 0 and abs(now - link.mbps) <= BAND * link.mbps:
        return link
    return replace(link, used=now)


def culprit(rate: float, sender: Link, receiver: Link) -> Literal["sender", "receiver"]:
    """Which end of a hop limits it to `rate` Mbit/s.

    The end that is known to be about so slow; if none is, one that was never seen to carry more, the sender before the
    receiver: a sender that is wrongly blamed stands at a chain's end, where its uplink isn't needed, and the next one
    that has the same receiver shows who it was.
    """
    slow_sender, slow_receiver = _about(sender, rate), _about(receiver, rate)
    if slow_sender != slow_receiver:
        return "sender" if slow_sender else "receiver"
    if slow_sender:
        return "sender" if sender.mbps <= receiver.mbps else "receiver"
    proven_sender, proven_receiver = ((end.measured or 0.0) >= rate * SURE for end in (sender, receiver))
    return "receiver" if proven_sender and not proven_receiver else "sender"


def hop(rate: float, limited: bool, sender: Link, receiver: Link) -> tuple[Link, Link]:
    """Both ends after a sender has measured a hop of its own."""
    guilty = culprit(rate, sender, receiver) if limited else None
    after = learn(receiver, rate, limited=guilty == "receiver")
    if guilty == "receiver" and not _about(receiver, rate) and sender.measured is not None:
        # Only what it carried earlier speaks for the sender: it doesn't do so for ever.
        return replace(sender, measured=sender.measured + WEIGHT * (rate - sender.measured)), after
    return learn(sender, rate, limited=guilty == "sender"), after


def _about(link: Link, rate: float) -> bool:
    """Whether the link is known to carry hardly more than `rate`."""
    return 0 < link.mbps <= rate * SURE
