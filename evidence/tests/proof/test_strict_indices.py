"""Tests that indices into device memory have 64 bits, unless 32 are certain to suffice. The kernels are small, and each
shader gets a fault.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evidence.proof.metal import kernels as strict_kernels
from evidence.proof.metal.kernels import check_source
from evidence.proof.metal.launches import model_launches
from evidence.tests.proof.needs import needs_clang
from tests.helpers.shaders import shaders_of_ops
from torch_gdn._recorder import KernelVariant

pytestmark = [needs_clang, pytest.mark.xdist_group("strict")]

NARROW = "may not fit into 32 bits, and is an index into device memory"


def problems(body: str) -> list[str]:
    """Returns the problems of a kernel with these statements. n and m are read at run time, and wide has 64 bits."""
    return check_source(f"""#include <metal_stdlib>
using namespace metal;
kernel void probe(device float* x [[buffer(0)]], constant int& n [[buffer(1)]], constant int& m [[buffer(2)]],
                  constant long& wide [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
                  uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {{
  if (n == 1 || m == 1 || wide == 1 || group.x == 1 || thread_index == 1 || lane == 1) x[0] = 1.0f;
{body}
}}
""").problems


@pytest.mark.parametrize(
    "body",
    [
        "x[n * m] = 0.0f;",
        "x[uint(n) * uint(m)] = 0.0f;",
        "x[n * m + int(lane)] = 0.0f;",
        "x[n << m] = 0.0f;",
        "x[n * 2] = 0.0f;",
        "*(x + n * m) = 0.0f;",
        "x[long(n * m)] = 0.0f;",
        "x[n * m % 7 * 3] = 0.0f;",
        "x[max(n * m, 5)] = 0.0f;",
        "x[n < m ? n * m : 0] = 0.0f;",
        "x[group.x * group.y] = 0.0f;",
        "x[group.x * 32 * 128] = 0.0f;",
        "x[group.x * uint(n)] = 0.0f;",
        "x[int(wide * n)] = 0.0f;",
        "x[int((x + wide) - x)] = 0.0f;",
        "int index = 0; if (n > 0) index = n * m; x[index] = 0.0f;",
        "for (int i = 0; i < n; ++i) x[i * 128] = 0.0f;",
        "for (int i = int(group.x); i < m; i += n) x[i * m] = 0.0f;",
        "device float4* vectors = (device float4*)(x + n * m); vectors[0] = float4(0.0f);",
    ],
)
def test_a_product_that_32_bits_may_not_hold_is_refused(body: str) -> None:
    result = problems(body)
    assert result and all(NARROW in problem for problem in result), result


@pytest.mark.parametrize(
    "body",
    [
        "x[long(n) * m] = 0.0f;",
        "x[wide * n] = 0.0f;",
        "x[n] = 0.0f;",
        "x[n * 1] = 0.0f;",
        "x[n / 8 % 4 * 3] = 0.0f;",
        "x[thread_index * 64 + lane * lane] = 0.0f;",
        "x[group.x * 128 + thread_index] = 0.0f;",
        "x[group.x / uint(n) * 32] = 0.0f;",
        "x[min(n, 8) * 64] = 0.0f;",
        "x[int(min(wide * n, long(m)))] = 0.0f;",
        "for (int i = int(thread_index); i < 64 * 64; i += 128) x[i / 64 * 128 + i % 64] = 0.0f;",
        "threadgroup float y[4096]; y[n * 4] = 0.0f;",
        "if (n * m > 5) x[lane] = 0.0f;",
    ],
)
def test_what_32_bits_hold_is_taken(body: str) -> None:
    assert problems(body) == []


def variant_of(file: str) -> KernelVariant:
    return next(launch.variant for launch in model_launches() if launch.variant.file == file)


PLANTED = """  const int planted = int(group.x) * int(group.y) + 1;
  if (((device const uchar*)BUFFER)[planted] == 1) return;
  if (((device const uchar*)BUFFER)[group.x * group.y] == 1) return;
"""


@pytest.mark.sweep(8)
@pytest.mark.parametrize("file", shaders_of_ops())
def test_narrow_indices_planted_in_a_shader_are_found(file: str, shaders: Path) -> None:
    text = (shaders / file).read_text()
    (buffer,) = re.findall(r"(\w+) \[\[buffer\(0\)\]\]", text)
    head, body = text.rsplit("]]) {\n", 1)
    (shaders / file).write_text(f"{head}]]) {{\n{PLANTED.replace('BUFFER', buffer)}{body}")
    first = head.count("\n") + 2
    problems = strict_kernels.check_batch([variant_of(file)]).problems
    places = [f"{file}:{line}: {NARROW}" for line in (first, first + 2)]
    assert all(any(problem.startswith(place) for problem in problems) for place in places), problems
