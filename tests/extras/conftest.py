"""Tests against packages that only extras bring: `make test-extras`. Where one is not, its tests are not collected."""

from __future__ import annotations

import importlib.util

collect_ignore = [f"test_{name}.py" for name in ("toploc", "verifiers") if importlib.util.find_spec(name) is None]
