"""The vast.ai adapter. Invariant: it speaks plain HTTP through httpx and sends each create exactly once."""

from .adapter import VastAI

__all__ = ["VastAI"]
