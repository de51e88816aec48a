"""Machines that the user already has, reached over SSH. Invariant: only processes that were started here are ended."""

from .adapter import Static
from .machines import Machine, read_machines

__all__ = ["Machine", "Static", "read_machines"]
