"""Which leased work is where, and how often things went wrong in a row.

Invariant: every leased item is in exactly one place: in flight (not settled), settled (the control service took or
refused it, or it is lost), or given up (handed back when the node leaves, if its lease still runs and nobody has taken
it over). Token counts only grow.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from app.protocol.errors import EchoError
from app.protocol.node import WasteReason

log = logging.getLogger(__name__)

MAX_FAULTS = 5
"""So many faults in a row, with nothing accepted in between, end the node."""


REFUSED = ("refused", "too_large")
"""Faults of files: from who makes them nobody should go on."""


class WorkerFault(EchoError):
    """The node does more harm than good and must end. `kind`: the error that was one too many."""

    code = "worker_fault"
    title = "Worker fault"

    def __init__(self, detail: str, *, kind: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


class WorkLedger:
    """Work items by id with their deadlines (monotonic seconds), and counted errors."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_flight: dict[str, float] = {}
        self._given_up: dict[str, float] = {}
        self._faults = 0
        self.errors: Counter[str] = Counter()
        self.tokens_generated = 0
        self.tokens_wasted: Counter[WasteReason] = Counter()

    @property
    def in_flight(self) -> int:
        """Number of items leased and not settled."""
        return len(self._in_flight)

    @property
    def faults_in_a_row(self) -> int:
        """Faults since the last accepted work."""
        return self._faults

    def unfinished(self) -> list[str]:
        """Items to hand back: still leased to this node, and not settled."""
        now = self._clock()
        return [item for item, deadline in {**self._given_up, **self._in_flight}.items() if deadline > now]

    def deadline(self, items: Iterable[str]) -> float | None:
        """The last deadline of those of these items that are in flight: a lease that was over may have come back."""
        return max((self._in_flight[item] for item in items if item in self._in_flight), default=None)

    def leased(self, deadlines: Mapping[str, float]) -> None:
        """These items are now ours, each until its deadline."""
        self._in_flight.update(deadlines)
        for item in deadlines:
            self._given_up.pop(item, None)

    def settled(self, items: Iterable[str]) -> None:
        """These items are answered, whatever the answer was worth."""
        for item in items:
            self._in_flight.pop(item, None)

    def give_up(self, items: Iterable[str]) -> None:
        """These items will not be answered by this node."""
        now = self._clock()
        self._given_up = {item: deadline for item, deadline in self._given_up.items() if deadline > now}
        for item in items:
            deadline = self._in_flight.pop(item, None)
            if deadline is not None:
                self._given_up[item] = deadline

    def passed_on(self, items: Iterable[str]) -> None:
        """The control service has taken these given-up items over, for somebody else to finish."""
        for item in items:
            self._given_up.pop(item, None)

    def sampled(self, tokens: int) -> None:
        """So many tokens were sampled here."""
        self.tokens_generated += tokens

    def waste(self, reason: WasteReason, tokens: int) -> None:
        """So many sampled tokens are of no use."""
        if tokens:
            self.tokens_wasted[reason] += tokens

    def accepted(self, late: int) -> None:
        """A file was accepted; `late` of its items came too late to count."""
        self._faults = 0
        if late:
            self.errors["late"] += late

    def fault(self, kind: str, detail: str) -> None:
        """Count a fault. Raises WorkerFault when it is one too many in a row."""
        self.errors[kind] += 1
        self._faults += 1
        log.warning("%s (%d in a row): %s", kind, self._faults, detail)
        if self._faults >= MAX_FAULTS:
            raise WorkerFault(f"{self._faults} faults in a row, the last: {kind}: {detail}"[:400], kind=kind)
