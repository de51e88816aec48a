"""For all tests: a slow machine fails no property test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("echo2", deadline=None)
settings.load_profile("echo2")
