"""A taskset that brings the program its agent is."""

import verifiers.v1 as vf
from echo2_rows import RowsTaskset
from verifiers.v1.harnesses.null import NullHarness

__all__ = ["Program", "RowsTaskset"]


class Program(NullHarness):
    """A chat of its own kind."""


assert issubclass(Program, vf.Harness)
