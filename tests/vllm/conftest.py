"""Tests against a real vLLM: `make test-vllm`. Where there is none, there is nothing to collect; whole agents need the
control service as well, which vLLM's own environment doesn't have."""

from __future__ import annotations

import importlib.util
import os

if "ECHO2_VLLM_PYTHON" not in os.environ and importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
elif importlib.util.find_spec("sqlalchemy") is None:
    collect_ignore = ["test_agents.py"]
