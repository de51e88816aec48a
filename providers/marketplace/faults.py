"""Faults that a test asks for: the n next calls of a kind go wrong in a chosen way.

Invariant: a fault is used up exactly once per call; without an order for it nothing goes wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .refusals import invalid_args

CALLS = ("create", "list", "destroy", "search", "show", "state", "bid", "logs", "user", "charges", "any")
BEFORE = ("429", "500", "502_html", "drop_before", "auth_error", "list_410")
"""Answered or cut without doing anything."""
AFTER = ("drop_after_process", "500_after_process")
"""Done, then hidden from the client."""
INSIDE = ("never_starts", "success_false_with_id", "outbid_loading", "list_truncated")
"""Change what the call does."""
KINDS = (*BEFORE, *AFTER, *INSIDE)
_ONLY = {
    "never_starts": "create", "success_false_with_id": "create", "outbid_loading": "create", "list_truncated": "list",
    "list_410": "list",
}  # fmt: skip


@dataclass(slots=True)
class Fault:
    """An order for faults."""

    call: str
    kind: str
    count: int


class Faults:
    """The orders not yet used up, oldest first."""

    def __init__(self) -> None:
        self.orders: list[Fault] = []
        self.taken: Counter[str] = Counter()
        """How many calls suffered which kind."""

    def add(self, body: dict[str, Any]) -> Fault:
        """Take an order {call, kind, count}. Refused when it names no such thing."""
        call, kind, count = str(body.get("call", "any")), str(body.get("kind")), body.get("count", 1)
        if call not in CALLS:
            raise invalid_args(f"call is {call!r}: use one of {', '.join(CALLS)}")
        if kind not in KINDS:
            raise invalid_args(f"kind is {kind!r}: use one of {', '.join(KINDS)}")
        if kind in _ONLY and call != _ONLY[kind]:
            raise invalid_args(f"{kind} needs call {_ONLY[kind]!r}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise invalid_args("count must be a whole number of 1 or more")
        fault = Fault(call, kind, count)
        self.orders.append(fault)
        return fault

    def take(self, call: str) -> str | None:
        """The kind that the present call must suffer, used up by this."""
        for fault in self.orders:
            if fault.call in (call, "any"):
                fault.count -= 1
                if fault.count == 0:
                    self.orders.remove(fault)
                self.taken[fault.kind] += 1
                return fault.kind
        return None

    def clear(self) -> None:
        """Forget all orders."""
        self.orders.clear()
