"""How a written answer is held against the right one.

Invariant: a scorer says 1.0 or 0.0, depends on the two texts alone, and keeps no state. `math` may take as long as it
likes: whoever calls it bounds that from outside, since the package's own timeouts need the main thread's signals.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from app.tasks.names import wrong_params

Scorer = Callable[[str, str], float]
"""The right answer, the text written → 1.0 or 0.0. `math` raises ValueError for a right answer that is no formula."""
_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact(answer: str, text: str) -> float:
    """The same text, white space around it left out."""
    return float(text.strip() == answer.strip())


def contains(answer: str, text: str) -> float:
    """The answer stands in the text, whatever the case, with runs of white space as one space."""
    return float(" ".join(answer.lower().split()) in " ".join(text.lower().split()))


def number(answer: str, text: str) -> float:
    """The last number in the text is the answer's last number; 1,000 and 1e3 are 1000."""
    right, written = last_number(answer), last_number(text)
    return float(right is not None and right == written)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text; None without one."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def scorer_of(name: object) -> Scorer:
    """The scorer of this name. Raises BadInput for an unknown one, or one whose package is not installed."""
    if name == "math":
        return _math()
    found = SCORERS.get(name) if isinstance(name, str) else None
    if found is None:
        raise wrong_params("/scorer", f"scorer {name!r} is not known; known: {', '.join(sorted([*SCORERS, 'math']))}")
    return found


SCORERS: Mapping[str, Scorer] = {"exact": exact, "contains": contains, "number": number}


def _math() -> Scorer:
    try:
        package: Any = importlib.import_module("math_verify")
    except ImportError as error:
        detail = "scorer math needs the package math-verify on the service, the learner and the nodes: echo2[math]"
        raise wrong_params("/scorer", detail) from error

    # None switches off the package's own limits, which rest on a signal and so fail outside the main thread. The limit
    # is the sandbox's: it ends the process, which a hanging formula needs.
    parse, verify = package.parse, package.verify

    def score(answer: str, text: str) -> float:
        # A bare formula is only read as one between dollars.
        bare = "$" not in answer and "\\boxed" not in answer
        right = parse(f"${answer}$" if bare else answer, parsing_timeout=None)
        if not right:
            raise ValueError(f"the right answer {answer[:100]!r} is no formula that math-verify can read")
        return float(verify(right, parse(text, parsing_timeout=None), timeout_seconds=None))

    return score
