"""Harnesses are found, and excuse themselves only from what there is."""

from __future__ import annotations

import pytest

from . import test_conformance, test_conformance_reads
from .harness import Registered, registered


def test_every_harness_is_found_once() -> None:
    names = [one.name for one in registered()]
    assert {"vastai", "ec2"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("one", registered(), ids=lambda one: one.name)
def test_a_harness_excuses_itself_only_from_scenarios_that_exist(one: Registered) -> None:
    scenarios = {name for module in (test_conformance, test_conformance_reads) for name in vars(module)}
    assert set(one.not_applicable) <= scenarios
    assert all(one.not_applicable.values())
