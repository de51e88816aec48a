"""For all tests: a slow machine fails no property test, and the same tree gives the same result each time.

`--hypothesis-profile=explore` draws new examples, and more: to look for faults, not to judge a change by.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("echo2", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None, max_examples=300)
settings.load_profile("echo2")
