"""The RunPod adapter. Invariant: it rents on demand only and sends each create exactly once."""

from .adapter import RunPod

__all__ = ["RunPod"]
