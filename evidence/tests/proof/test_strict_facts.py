"""Tests a kernel's facts: exact bytes, and the model's figures for kernels small enough to compute by hand."""

from __future__ import annotations

import subprocess

import pytest

from evidence.proof.metal.facts import Facts
from evidence.proof.metal.front_end import CLANG, LANGUAGE, compile_strictly, tools
from evidence.proof.metal.kernels import check_source
from evidence.proof.metal.tree import Layout, read_tree
from evidence.proof.metal.values import EXACT, OFFSET, Lanes, bank_passes, combine
from evidence.tests.proof.needs import needs_clang

pytestmark = [needs_clang, pytest.mark.xdist_group("strict")]

HEADER = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
BEFORE = """
struct Small {
  char a;
  int64_t b;
  char c;
};
struct Large {
  Small small[3];
  packed_float3 packed;
  half4 halves;
};
template <typename T, int N>
struct Pair {
  T one[N];
  T other;
};
struct Pairs {
  Pair<half, 3> halves;
  Pair<float, 1> floats;
};
"""


def facts(body: str, before: str = "", buffers: str = "") -> Facts:
    source = f"""{HEADER}{before}
kernel void probe(device float* x [[buffer(0)]], {buffers} uint index [[thread_index_in_threadgroup]]) {{
{body}
}}
"""
    outcome = check_source(source)
    assert outcome.problems == []
    (result,) = outcome.facts
    return result


def test_sizes_are_clangs() -> None:
    scalars = [
        "bool",
        "char",
        "unsigned char",
        "short",
        "unsigned short",
        "int",
        "unsigned int",
        "long",
        "half",
        "bfloat",
    ]
    types = [*scalars, "float", *(f"metal::vec<{scalar}, {n}>" for scalar in scalars for n in (2, 3, 4))]
    types += [
        "metal::vec<float, 3>[5]",
        "float[3][7]",
        *(f"metal::simdgroup_matrix<{t}, 8, 8>" for t in ("half", "float")),
    ]
    types += ["Small", "Small[3]", "Pair<half, 3>", "Pair<float, 1>"]
    tree = read_tree(*compile_strictly(HEADER + BEFORE))
    layout = Layout(tree)
    checks = ""
    for number, text in enumerate(types):
        element, bracket, bounds = text.partition("[")
        size, alignment = layout.size_and_alignment(text)
        checks += f"typedef {element} T{number}{bracket}{bounds};\n"
        checks += f'static_assert(sizeof(T{number}) == {size} && alignof(T{number}) == {alignment}, "{text}");\n'
    command = [CLANG, "-x", "cl", *LANGUAGE, "-w", "-fsyntax-only", "-include-pch", str(tools().prelude), "-"]
    source = f"using namespace metal; {BEFORE}{checks}"
    result = subprocess.run(command, input=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_threadgroup_bytes_count_each_array_from_a_multiple_of_16() -> None:
    body = (
        "threadgroup float a[33]; threadgroup half b[8]; a[index] = x[index]; b[0] = 1.0h; x[0] = a[0] + float(b[0]);"
    )
    assert facts(body).threadgroup_bytes == 144 + 16


def test_buffers_are_counted_and_positions_are_not() -> None:
    buffers = "constant int& n [[buffer(1)]], device const half* y [[buffer(2)]],"
    assert facts("x[index] = float(y[n]);", buffers=buffers).buffers == 3


@pytest.mark.parametrize(
    ("access", "width"),
    [
        ("x[0] = x[1];", 0),
        ("*(device float2*)x = float2(0.0f);", 8),
        ("*(device float4*)x = float4(0.0f);", 16),
        ("*(device half4*)x = half4(0.0h);", 8),
        ("x[0] = ((device float4*)x)[index].x;", 16),
    ],
)
def test_the_widest_device_vector(access: str, width: int) -> None:
    result = facts(f"{access} x[index] = 1.0f;")
    assert (result.device_vector, result.threadgroup_vector) == (width, 0)


UNROLL = '_Pragma("clang loop unroll(full)") '


def filled(name: str, count: int) -> str:
    return f"float {name}[{count}]; {UNROLL}for (int i = 0; i < {count}; ++i) {name}[i] = x[i]; x[0] = {name}[1];\n"


def test_arrays_that_live_together_add_up() -> None:
    assert facts(filled("a", 10) + filled("b", 6) + "x[index] = 0.0f;").thread_bytes == 64


def test_arrays_of_scopes_that_follow_each_other_do_not_add_up() -> None:
    assert facts(f"{{ {filled('a', 10)} }} {{ {filled('b', 6)} }} x[index] = 0.0f;").thread_bytes == 40


def test_arrays_of_called_functions_add_to_the_callers() -> None:
    before = f"void inner(device float* x) {{ {filled('c', 4)} }}\n"
    assert facts(filled("a", 10) + "inner(x); inner(x); x[index] = 0.0f;", before).thread_bytes == 56


def test_arrays_of_dead_branches_do_not_count() -> None:
    assert facts(f"if (sizeof(float) == 8) {{ {filled('a', 10)} }} x[index] = 0.0f;").thread_bytes == 0


def test_a_fragment_is_two_elements_a_lane() -> None:
    body = "simdgroup_float8x8 f; simdgroup_half8x8 h; simdgroup_load(f, x, 8); simdgroup_store(f, x, 8);"
    body += "h.thread_elements()[0] = 1.0h; x[index] = float(h.thread_elements()[0]);"
    assert facts(body).thread_bytes == 8 + 4


def test_registers_of_the_model() -> None:
    # x takes 2, index 1, y 2, a 1, b 4, and the constant none
    body = "constexpr int kTwo = 2; device float* y = x + kTwo; const float a = y[0]; const float4 b = float4(a);\n"
    assert facts(f"{body} x[index] = b.x;").registers == 2 + 1 + 2 + 1 + 4


@pytest.mark.parametrize(
    ("place", "passes"),
    [
        ("index", 1),
        ("2 * index", 2),
        ("32 * index", 32),
        ("33 * index", 1),
        ("index / 4", 1),
        ("index % 4 * 32 + index / 4", 4),
        ("7", 1),
        ("x[0] > 0.0f ? 32 * index : 0", 1),  # the model does not include an unknown place
    ],
)
def test_bank_passes_of_the_model(place: str, passes: int) -> None:
    result = facts(f"threadgroup float a[1056]; a[{place}] = 1.0f; x[index] = 0.0f;")
    assert result.bank_passes == passes


def test_wide_accesses_are_served_128_bytes_at_a_time() -> None:
    def rows(stride: int) -> Lanes:
        return Lanes(tuple(lane * stride for lane in range(32)), OFFSET)

    assert bank_passes(rows(16), 16) == 1
    assert bank_passes(rows(128), 16) == 8
    assert bank_passes(rows(128 + 16), 16) == 1
    assert bank_passes(rows(8), 8) == 1
    assert bank_passes(rows(2), 2) == 1  # two lanes share a word


def test_an_unknown_base_keeps_the_distances_between_lanes() -> None:
    lanes = Lanes(tuple(range(32)), EXACT)
    base = Lanes((0,) * 32, OFFSET)
    four = Lanes((4,) * 32, EXACT)
    assert combine("+", base, combine("*", lanes, four)) == Lanes(tuple(range(0, 128, 4)), OFFSET)
    assert combine("/", combine("+", base, lanes), four) is None


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [("thread_bytes", 513, 512), ("threadgroup_bytes", 32784, 32768), ("buffers", 32, 31)],
)
def test_what_is_over_a_limit_is_named(field: str, value: int, limit: int) -> None:
    values = {"threadgroup_bytes": 0, "buffers": 1, "thread_bytes": 0} | {field: value}
    result = Facts("probe", device_vector=0, threadgroup_vector=0, registers=9, bank_passes=1, bank_file="-", **values)
    (problem,) = result.over_limit()
    assert problem.startswith(f"probe: {value} ") and problem.endswith(f"the limit is {limit}")
