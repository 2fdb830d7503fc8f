"""Tests `torch.mps.compile_shader` on the simulated device."""

from __future__ import annotations

import pytest
import torch

MPS = "mps"


def test_compile_shader() -> None:
    library = torch.mps.compile_shader(
        """
        #include <metal_stdlib>
        using namespace metal;
        kernel void full(device float* y [[buffer(0)]], constant float& value [[buffer(1)]],
                         constant long& n [[buffer(2)]], constant int2& pair [[buffer(3)]],
                         uint i [[thread_position_in_grid]]) {
          if (i < n) y[i] = value + pair.x * pair.y;
        }
        """
    )
    assert dir(library) == ["full"]
    assert library.full.thread_execution_width == 32
    x = torch.zeros(40, device=MPS)
    library.full(x, 3.5, 33, [2, 5], arg_casts={3: "int32"})
    assert x.tolist() == [13.5] * 33 + [0.0] * 7
    library.full(x, 1.0, 33, [0, 0], arg_casts={3: "int32"}, threads=[8], group_size=[8])
    assert x.tolist() == [1.0] * 8 + [13.5] * 25 + [0.0] * 7


def test_compile_shader_takes_the_language_and_the_mathematics_that_pytorch_takes() -> None:
    source = """
        kernel void f(device bfloat* y [[buffer(0)]], device c10::metal::ErrorMessages* errors [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
          if (i == 2) {
            TORCH_REPORT_ERROR(errors, "no element ", i);
            return;
          }
          const float zero = float(y[i]) * 0;
          y[i] = bfloat(zero / zero);  // fast mathematics may return anything
        }
    """
    library = torch.mps.compile_shader("#include <c10/metal/error.h>\n" + source)
    y = torch.ones(2, dtype=torch.bfloat16, device=MPS)
    library.f(y, error_buf_idx=1)
    assert y.isnan().all()
    library.f(y, threads=3, error_buf_idx=1)
    with pytest.raises(torch.AcceleratorError, match="no element 2"):
        torch.mps.synchronize()


def test_compile_shader_reports_errors() -> None:
    with pytest.raises(TypeError, match="Failed to create metal library"):
        torch.mps.compile_shader("kernel void f() { no_such_thing(); }")
