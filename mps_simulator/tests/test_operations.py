"""Tests profile(detailed=True): scalar operations by kind, in small kernels counted by hand."""

from __future__ import annotations

import pytest
import torch

import mps_simulator
import mps_simulator.metal
from metal_programs import Argument, dispatch, figures, run
from mps_simulator import settings

FLOATS = ("fma", "add", "mul", "div", "minmax", "round", "exp", "log", "sqrt", "rsqrt", "other")
SOURCE = """
kernel void compute(device const TYPE* x [[buffer(0)]], device TYPE* out [[buffer(1)]],
                    constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  TYPE a = x[i], b = x[i + 1], c = x[i + 2];
  out[i] = VALUE;
}
"""


def floats(operations: dict[str, int]) -> dict[str, float]:
    """Returns each thread's operations on floats."""
    return {kind: count / 32 for kind, count in operations.items() if kind in FLOATS}


def counted_in(value: str, element: str = "float") -> dict[str, float]:
    width = 4 if element == "float4" else 1
    x, out = torch.rand(34 * width) + 1, torch.zeros(32 * width)
    kernel = figures(SOURCE.replace("TYPE", element).replace("VALUE", value), [x.to("mps"), out.to("mps"), 5])
    assert kernel.operations == kernel.operations_issued  # no lane diverges
    return floats(kernel.operations)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a + b", {"add": 1}),
        ("a - b + c", {"add": 2}),
        ("a * b * c", {"mul": 2}),
        ("a * b + c", {"fma": 1}),
        ("c - a * b", {"fma": 1}),
        ("a * b + b * c", {"fma": 1, "mul": 1}),
        ("fma(a, b, c)", {"fma": 1}),
        ("a / b", {"div": 1}),
        ("max(a, b)", {"minmax": 1}),
        ("precise::exp(a)", {"exp": 1}),
        ("precise::exp2(a) * b", {"exp": 1, "mul": 1}),
        ("precise::log(a) + b", {"log": 1, "add": 1}),
        ("precise::sqrt(a)", {"sqrt": 1}),
        ("precise::rsqrt(a) + precise::rsqrt(b)", {"rsqrt": 2, "add": 1}),
        ("precise::tanh(a)", {"other": 1}),
        ("floor(a)", {"round": 1}),
    ],
)
def test_each_kind(value: str, expected: dict[str, float]) -> None:
    assert counted_in(value) == expected


def test_a_product_that_is_used_twice_is_no_fma() -> None:
    source = SOURCE.replace("out[i] = VALUE;", "const float p = a * b; out[i] = p + c; out[i + 32] = p;")
    kernel = figures(source.replace("TYPE", "float"), [torch.ones(34).to("mps"), torch.zeros(64).to("mps"), 1])
    assert floats(kernel.operations) == {"mul": 1, "add": 1}


def test_vectors_count_each_element() -> None:
    assert counted_in("a * b + c", "float4") == {"fma": 4}


@pytest.mark.parametrize("turns", [1, 7])
def test_a_loop_counts_its_turns(turns: int) -> None:
    source = SOURCE.replace("out[i] = VALUE;", "for (uint t = 0; t < n; ++t) a = a * b + x[t]; out[i] = a;")
    arguments: list[Argument] = [torch.rand(34).to("mps"), torch.zeros(32).to("mps"), turns]
    kernel = figures(source.replace("TYPE", "float"), arguments)
    assert floats(kernel.operations) == {"fma": turns}


def test_lanes_that_stand_by_are_issued_too() -> None:
    """One lane of a simdgroup computes, so 1 of 32 operations is its own. The second of two simdgroups has 8 lanes."""
    source = SOURCE.replace(
        "out[i] = VALUE;", "if (i % 32 == 3) for (uint t = 0; t < n; ++t) a = a / x[t]; out[i] = a;"
    )
    arguments: list[Argument] = [torch.rand(42).to("mps"), torch.zeros(40).to("mps"), 10]
    kernel = figures(source.replace("TYPE", "float"), arguments, threads=40)
    assert kernel.operations["div"] == 2 * 10
    assert kernel.operations_issued["div"] == 2 * 10 * 32


@pytest.mark.parametrize("seed", [0, 5])
def test_lanes_with_fewer_turns(seed: int) -> None:
    """Lane i makes i % 4 turns between two points at which all lanes meet, so the GPU issues 3."""
    source = """
    kernel void compute(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                        constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      float a = x[i];
      for (uint round = 0; round < n; ++round) {
        for (uint t = 0; t < (i + round) % 4; ++t) a = a / x[t];
        a = simd_sum(a);
      }
      out[i] = a;
    }
    """
    arguments: list[Argument] = [torch.rand(34).to("mps"), torch.zeros(32).to("mps"), 5]
    with settings(seed=seed):
        kernel = figures(source, arguments)
    assert kernel.operations["div"] == 5 * 8 * (0 + 1 + 2 + 3)
    assert kernel.operations_issued["div"] == 5 * 3 * 32


def test_collectives_and_matrix_products_are_not_the_shaders() -> None:
    source = """
    kernel void compute(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) {
      simdgroup_float8x8 a;
      simdgroup_load(a, x, 8);
      simdgroup_multiply_accumulate(a, a, a, a);
      simdgroup_store(a, out, 8);
      out[64 + i] = simd_sum(x[i]) + simd_max(x[i]);
    }
    """
    kernel = figures(source, [torch.rand(64).to("mps"), torch.zeros(96).to("mps")])
    assert floats(kernel.operations) == {"add": 1} and kernel.matrix_multiplies == 1


def test_dispatches_and_nested_profiles() -> None:
    source = SOURCE.replace("TYPE", "float").replace("VALUE", "a * b + c")
    arguments: list[Argument] = [torch.rand(34).to("mps"), torch.zeros(32).to("mps"), 1]
    with mps_simulator.profile(detailed=True) as outer:
        run(source, arguments, threads=32)
        inner = figures(source, arguments)
    assert inner.operations["fma"] == 32 and outer.kernels["compute"].operations["fma"] == 64
    with mps_simulator.profile() as plain:
        run(source, arguments, threads=32)
    assert plain.kernels["compute"].operations == {}


def test_the_counted_twin_computes_the_same() -> None:
    source = SOURCE.replace("TYPE", "float").replace("VALUE", "precise::exp(-a) * b + c / a")
    x = torch.rand(34).to("mps")
    plain, counted = torch.zeros(32).to("mps"), torch.zeros(32).to("mps")
    run(source, [x, plain, 1], threads=32)
    figures(source, [x, counted, 1])
    assert torch.equal(plain.cpu(), counted.cpu()) and plain.cpu().count_nonzero() == 32


def test_function_constants_reach_the_twin() -> None:
    library = mps_simulator.metal.Library(
        """
        #include <metal_stdlib>
        using namespace metal;
        constant int turns [[function_constant(0)]];
        kernel void compute(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
          float a = out[i];
          for (int t = 0; t < turns; ++t) a = a / 3.0f + out[32];
          out[i] = a;
        }
        """
    )
    out = torch.ones(33).to("mps")
    with mps_simulator.profile(detailed=True) as profile:
        dispatch(library.pipeline("compute", {0: 6}), [out], threads=32)
    assert profile.kernels["compute"].operations["div"] == 6 * 32
