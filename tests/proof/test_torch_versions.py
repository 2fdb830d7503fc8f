"""The Objective-C++ compiles against newer torch wheels' headers, and what it calls is in their libraries."""

from __future__ import annotations

import pytest

from proof.checks import Silent
from proof.mac import torch_versions, wheels

pytestmark = pytest.mark.xdist_group("proof")


@pytest.mark.parametrize("version", wheels.NEWER_TORCH_VERSIONS)
def test_newer_torch(version: str) -> None:
    """`make proof` takes all of csrc, and links it; here time allows csrc/metal."""
    verdict = torch_versions.judge(version, torch_versions.mac_only_sources(), Silent())
    if verdict.unavailable:
        pytest.skip(verdict.unavailable)
    assert verdict.problems == ()
    assert verdict.compiled == verdict.sources > 0
