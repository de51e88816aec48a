"""Adapters for places that rent machines. Invariant: nothing here imports `app`."""
