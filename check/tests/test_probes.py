"""Tests the check's probes: each holds on the simulated device, and fails if what it measures changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from tests.helpers.devices import ready
from tests.helpers.files import copied_shaders, replace_once
from torch_gdn import _C
from torch_gdn_check import probes
from torch_gdn_check.probes import PROBES, check_probe

pytestmark = pytest.mark.xdist_group("check")
INCREMENT = ("memory", "float(x[i]) + 1.0f", "float(x[i]) + 1.5f")
# For each probe, the shader to change, and the change.
PLANTED = {
    "matrix layout": (
        "matrix",
        "simdgroup_load(loaded, matrix, 8)",
        "simdgroup_load(loaded, matrix, 8, ulong2(0), true)",
    ),
    "matrix product": ("matrix", "float2(0.0f)", "float2(1.0f)"),
    "simdgroup width": ("simdgroup", "simd_sum(1)", "simd_sum(2)"),
    "shuffles": ("simdgroup", "simd_shuffle_xor(value, ushort(5))", "simd_shuffle_xor(value, ushort(4))"),
    "functions": ("arithmetic", "= log(size)", "= 1.000001f * log(size)"),
    "contraction": (
        "arithmetic",
        "x[lane] * y[lane] + z[lane]",
        "fma(x[lane], y[lane], 0.0f) + z[lane]",
    ),
    "safe math": ("arithmetic", "(value + other) - other", "value"),
    "denormals": (
        "arithmetic",
        "float(stored[lane]) * factor",
        "(fabs(float(stored[lane])) < 1e-4f ? 0.0f : float(stored[lane])) * factor",
    ),
    "rounding": ("arithmetic", "T(wide[lane] * (1.0f / factor))", "T(wide[lane] * (0.999f / factor))"),
    "31 buffers": ("memory", "COPY(29)", "row[29] = x28[lane]"),
    "parameter block": ("memory", "copy[i] = block.words[i]", "copy[i] = block.words[i] & 1023"),
    "host array": INCREMENT,
    "buffer offsets": INCREMENT,
    "two views of a buffer": INCREMENT,
    "order": INCREMENT,
    "wide grid": INCREMENT,
    "buffer above 4 GB": ("memory", "bytes[index] =", "bytes[index & 4294967295] ="),
    "threadgroup memory": ("memory", "words[Words - 1 - i]", "words[i]"),
    "error log": ("memory", "if (lane == 0) report_error", "if (lane == 99) report_error"),
}


@pytest.fixture(scope="module")
def mps() -> torch.device:
    return ready("mps")


@pytest.fixture(scope="module")
def with_planted_faults(mps: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("planted")
    probed = shutil.copytree(probes.SHADERS, folder / "probes")
    for file, old, new in dict.fromkeys(PLANTED.values()):
        replace_once(probed / f"{file}.metal", old, new)
    # Another folder of shaders forgets the pipelines that were compiled.
    with copied_shaders(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "SHADERS", probed)
        yield


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_holds(mps: torch.device, name: str) -> None:
    outcome = check_probe(mps, name)
    assert not outcome.problem
    assert outcome.figures.keys() == {"assumption", "needed_for", "measured"}


@pytest.mark.parametrize("name", PLANTED)
def test_a_probe_fails_on_a_planted_fault(mps: torch.device, with_planted_faults: None, name: str) -> None:
    problem = check_probe(mps, name).problem
    assert problem.startswith(f"{PROBES[name].assumption}: does not hold: ")


def test_every_probe_of_a_kernel_has_a_planted_fault() -> None:
    assert PROBES.keys() - PLANTED.keys() == {"GPU clock"}


@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_a_clock_that_stands_still_or_is_too_fast_is_found(
    mps: torch.device, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(_C, "wait_and_time", lambda: seconds)
    assert f"does not hold: {seconds} s of work were done after" in check_probe(mps, "GPU clock").problem


def test_a_launch_refuses_what_would_not_be_bound(mps: torch.device) -> None:
    x = torch.zeros(32, device=mps)
    for bindings, words in (
        ([x] * 32, "at most 31 bindings, got 32"),
        ([x, bytes(4097)], "at most 4096 bytes in a parameter block, got 4097"),
        ([x, b"1", b"2"], "at most one block of bytes"),
        ([x.cpu()], "tensors on mps, got cpu"),
    ):
        with pytest.raises(ValueError, match=words):
            probes.run("memory/increment", ["float"], bindings)
    with pytest.raises(ValueError, match="a number as a template argument, got 'double'"):
        probes.run("memory/increment", ["double"], [x, x])
