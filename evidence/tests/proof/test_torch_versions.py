"""Tests that the Objective-C++ compiles with the headers of newer torch wheels, whose libraries have what it calls."""

from __future__ import annotations

import pytest

from evidence.proof.checks import Silent
from evidence.proof.mac import torch_versions, wheels

pytestmark = pytest.mark.xdist_group("proof")


@pytest.mark.parametrize("version", wheels.NEWER_TORCH_VERSIONS)
def test_newer_torch(version: str) -> None:
    """Here time allows csrc/metal. `make proof` compiles all of csrc, and links it."""
    verdict = torch_versions.judge(version, torch_versions.mac_only_sources(), Silent())
    if verdict.unavailable:
        pytest.skip(verdict.unavailable)
    assert verdict.problems == ()
    assert verdict.compiled == verdict.sources > 0
