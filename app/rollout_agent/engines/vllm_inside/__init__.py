"""Runs inside vLLM's own processes: modules that are loaded by their bare names there and import nothing of ours."""
