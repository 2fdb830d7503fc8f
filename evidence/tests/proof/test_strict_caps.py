"""Tests that each kernel's caps are recorded, and that a variant above them is a problem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evidence.proof.metal import caps as strict_caps
from evidence.proof.metal.facts import ISA_REGISTERS, Facts
from tests.helpers.shaders import shaders_of_ops

pytestmark = pytest.mark.xdist_group("strict")

SMALL = Facts("probe_1", 64, 3, 0, 0, 32, registers=40, bank_passes=1, bank_file="-")
LARGE = Facts("probe_2", 128, 3, 0, 0, 96, registers=ISA_REGISTERS + 1, bank_passes=2, bank_file="probe.metal")
KERNELS = {"probe_1": "probe", "probe_2": "probe"}


def test_caps_are_the_most_of_a_kernels_variants() -> None:
    caps = strict_caps.by_kernel([SMALL, LARGE], KERNELS, {"probe_1"})
    in_models = strict_caps.Taken(64, 32, 40, 1)
    assert caps == {"probe": strict_caps.Caps(2, 128, 96, ISA_REGISTERS + 1, 2, 1, "probe_2", in_models)}


@pytest.mark.parametrize("name", strict_caps.CAPPED)
def test_a_variant_above_its_cap_is_named(name: str) -> None:
    caps = strict_caps.by_kernel([SMALL, LARGE], KERNELS, KERNELS)
    limit = getattr(caps["probe"], name)
    assert strict_caps.over_cap([SMALL, LARGE], KERNELS, caps) == []
    (problem,) = strict_caps.over_cap([replace(SMALL, **{name: limit + 1})], KERNELS, caps)
    assert problem == f"probe_1: {limit + 1} {name.replace('_', ' ')}, the cap of its kernel is {limit}"


def test_a_kernel_without_a_cap_stays_below_the_limit() -> None:
    at_limit = replace(SMALL, registers=strict_caps.ISA_REGISTERS)
    above = replace(SMALL, registers=strict_caps.ISA_REGISTERS + 1)
    assert strict_caps.over_cap([at_limit], KERNELS, {}) == []
    (problem,) = strict_caps.over_cap([above], KERNELS, {})
    assert problem == "probe_1: 129 registers, more than 128; caps.tsv has no kernel probe"


def test_kernels_at_the_limit_are_recorded_in_the_tables_own_form() -> None:
    recorded = strict_caps.recorded()
    assert {*recorded} < {Path(file).stem for file in shaders_of_ops()}
    assert all(cap.over_isa for cap in recorded.values())
    assert strict_caps.text(recorded) == strict_caps.TABLE.read_text()
