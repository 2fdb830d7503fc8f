"""Tests that shaders of 16 bits compile and load for processors that have less than this one."""

from __future__ import annotations

import platform

import pytest

from evidence.proof.metal.launches import model_launches
from evidence.tests.proof.needs import (
    needs_clang,
    needs_simulated_device,
)
from tests.sweeps import share_of
from torch_gdn import _C
from torch_gdn._recorder import KernelVariant

pytestmark = [
    needs_clang,
    needs_simulated_device,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="clang's names of x86-64 need such a processor"),
    pytest.mark.xdist_group("strict"),
]

TYPES = ("half", "bfloat")


def first_of_each_type(variants: list[KernelVariant]) -> list[KernelVariant]:
    result: dict[tuple[str, str], KernelVariant] = {}
    for variant in variants:
        for name in {*TYPES} & {*variant.arguments}:
            result.setdefault((variant.kernel, name), variant)
    return list(result.values())


@pytest.mark.sweep(1, seeds=3)
@pytest.mark.parametrize("march", ["x86-64-v2", "x86-64-v3", "native"])
def test_every_symbol_is_there(march: str) -> None:
    """Loading resolves the symbols that clang calls, and needs no such processor. A run takes one kernel in eight."""
    import mps_simulator

    mps_simulator.activate()
    variants = [launch.variant for launch in model_launches()]
    kernels = set(share_of(sorted({each.kernel for each in first_of_each_type(variants)}), 8))
    chosen = [each for each in first_of_each_type(variants) if each.kernel in kernels]
    assert {name for each in chosen for name in each.arguments} >= {*TYPES}
    with mps_simulator.settings(march=march):
        for each in chosen:
            source = _C.shader_source(each.kernel, each.file, list(each.arguments))
            assert each.name in mps_simulator.metal.Library(source).functions
