"""Tests Metal that others wrote: PyTorch's headers (c10/metal), from its wheel, compile and run in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._cpp_embed_headers import _embed_headers

import mps_simulator
import mps_simulator.metal
from metal_programs import dispatch
from mps_simulator import settings

INCLUDE = Path(torch.__file__).parent / "include"
HEADERS = sorted(path.name for path in (INCLUDE / "c10/metal").glob("*.h"))
USE = """
using namespace c10::metal;
struct twice_functor { template <typename T> T operator()(const T x) { return x + x; } };
REGISTER_UNARY_OP(twice, float, float);
REGISTER_UNARY_OP(twice, bfloat, bfloat);
kernel void special(device float* x [[buffer(0)]], device AtomicType_t<float>* total [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  AtomicType<float>::atomic_add(total, 0, x[i]);
  x[i] = c10::metal::erf(x[i]);
}
"""


def library(headers: list[str], source: str) -> Any:
    """Inserts the headers' text as PyTorch does, because run-time compilation has no include path."""
    text = "".join(f"#include <c10/metal/{name}>\n" for name in headers) + source
    text = _embed_headers(text.splitlines(keepends=True), [INCLUDE], set())
    with settings(strict=False):
        return mps_simulator.metal.Library("#include <metal_stdlib>\nusing namespace metal;\n" + text)


@pytest.mark.parametrize("header", HEADERS)
def test_headers_compile(header: str) -> None:
    source = "kernel void probe(device float* x [[buffer(0)]]) { x[0] = 1; }"
    assert library([header], source).functions == ["probe"]


def call(name: str, arguments: list[torch.Tensor], threads: int) -> None:
    dispatch(library(["indexing.h", "special_math.h", "atomic.h"], USE).pipeline(name), arguments, threads)


def test_elementwise_kernels_of_pytorch() -> None:
    x = torch.randn(64).bfloat16()
    out = torch.zeros(64, dtype=torch.bfloat16).to("mps")
    call("twice_dense_bfloat_bfloat", [out, x.to("mps"), torch.tensor([64], dtype=torch.int32).to("mps")], 64)
    assert torch.equal(out.cpu(), x + x)


def test_atomics_and_special_functions_of_pytorch() -> None:
    x = torch.linspace(-3, 3, 100)
    argument, total = x.to("mps"), torch.zeros(1, device="mps")
    call("special", [argument, total], 100)
    assert (argument.cpu().double() - torch.special.erf(x.double())).abs().max() < 2e-7
    assert abs(total.item() - x.double().sum().item()) < 1e-5
