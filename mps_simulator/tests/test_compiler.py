"""Tests the engine's Metal language: what it accepts, what it refuses, and the words of its errors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import mps_simulator
import mps_simulator.metal
from metal_programs import HEADER, dispatch, run
from mps_simulator import settings
from mps_simulator.build import cache_directory


def library(source: str, **options: Any) -> Any:
    return mps_simulator.metal.Library(HEADER + source, **options)


def value_of(expression: str, before: str = "", type_name: str = "float") -> float:
    """Returns the expression's value, computed by a kernel of one thread."""
    out = torch.zeros(1, device="mps")
    run(
        f"{before}\nkernel void value(device float* out [[buffer(0)]]) {{ {type_name} x = {expression}; out[0] = x; }}",
        [out],
        threads=1,
    )
    return out.item()


# ---- entry points ----------------------------------------------------------------------------------------------------

POSITIONS = """
kernel void positions(device uint* out [[buffer(0)]], {type} value [[{attribute}]],
                      uint3 thread_position [[thread_position_in_threadgroup]],
                      uint3 group [[threadgroup_position_in_grid]], uint3 size [[threads_per_threadgroup]],
                      uint3 groups [[threadgroups_per_grid]]) {{
  const uint3 at = group * size + thread_position;
  const uint index = (at.z * size.y * groups.y + at.y) * size.x * groups.x + at.x;
  {stores}
}}
"""
STORES = {1: "out[index * 3] = value;", 2: "out[index * 3] = value.x; out[index * 3 + 1] = value.y;"}
STORES[3] = STORES[2] + " out[index * 3 + 2] = value.z;"


def positions(attribute: str, type_name: str) -> torch.Tensor:
    """Returns [z, y, x, component] for 2 x 1 x 2 threadgroups of 20 x 2 x 2 threads."""
    width = int(type_name[-1]) if type_name[-1].isdigit() else 1
    out = torch.zeros(4, 2, 40, 3, dtype=torch.int32).to("mps")
    source = POSITIONS.format(type=type_name, attribute=attribute, stores=STORES[width])
    run(source, [out], threadgroups=(2, 1, 2), threads=(20, 2, 2))
    return out.cpu()[..., :width]


def grid_positions() -> torch.Tensor:
    z, y, x = torch.meshgrid(torch.arange(4), torch.arange(2), torch.arange(40), indexing="ij")
    return torch.stack([x, y, z], dim=-1)


def constant_grid(*values: int) -> torch.Tensor:
    return torch.tensor(values).expand(4, 2, 40, len(values))


def in_threadgroup() -> torch.Tensor:
    return grid_positions() % torch.tensor([20, 2, 2])


def index_in_threadgroup() -> torch.Tensor:
    at = in_threadgroup()
    return (at[..., :1] + 20 * at[..., 1:2] + 40 * at[..., 2:]).contiguous()


EXPECTED_POSITIONS = {
    "thread_position_in_grid": grid_positions,
    "thread_position_in_threadgroup": in_threadgroup,
    "threadgroup_position_in_grid": lambda: grid_positions() // torch.tensor([20, 2, 2]),
    "threads_per_threadgroup": lambda: constant_grid(20, 2, 2),
    "dispatch_threads_per_threadgroup": lambda: constant_grid(20, 2, 2),
    "threadgroups_per_grid": lambda: constant_grid(2, 1, 2),
    "threads_per_grid": lambda: constant_grid(40, 2, 4),
    "thread_index_in_threadgroup": index_in_threadgroup,
    "thread_index_in_simdgroup": lambda: index_in_threadgroup() % 32,
    "simdgroup_index_in_threadgroup": lambda: index_in_threadgroup() // 32,
    "simdgroups_per_threadgroup": lambda: constant_grid(3),
    "threads_per_simdgroup": lambda: constant_grid(32),
    "thread_execution_width": lambda: constant_grid(32),
    "thread_index_in_quadgroup": lambda: index_in_threadgroup() % 4,
    "quadgroup_index_in_threadgroup": lambda: index_in_threadgroup() // 4,
}


@pytest.mark.parametrize("attribute", EXPECTED_POSITIONS)
@pytest.mark.parametrize("scalar", ["uint", "ushort"])
def test_positions_and_indices(attribute: str, scalar: str) -> None:
    expected = EXPECTED_POSITIONS[attribute]()
    for width in range(1, expected.shape[-1] + 1):
        got = positions(attribute, scalar if width == 1 else f"{scalar}{width}")
        assert torch.equal(got, expected[..., :width].int()), f"{attribute} as {scalar}{width}"


ENTRIES = """
namespace outer {
namespace inner {
template <typename T> struct Twice { static T of(T x) { return x + x; } };
template <typename T, int N>
[[kernel]] void add(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = Twice<T>::of(x[i]) + T(N); }
template [[host_name("add_" "float_3")]] [[kernel]] decltype(add<float, 3>) add<float, 3>;
}
template [[host_name("add_int")]] kernel void inner::add<int, (2 > 1)>(device int* x [[buffer(0)]], uint i);
}
template <typename T> kernel void negate(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = -x[i];
}
template [[host_name("negate_half")]] kernel void negate(device half*, uint);
template [[host_name("add_outer")]] [[kernel]] decltype(::outer::inner::add<float, 7>) ::outer::inner::add<float, 7>;
[[host_name("renamed")]] kernel void plain(device float* x [[buffer(0)]]) { x[0] = 5; }
[[kernel]] void attribute_kernel(device float* x [[buffer(0)]]);
[[kernel]] void attribute_kernel(device float* x [[buffer(0)]]) { x[0] = 6; }
"""


def test_entry_points_are_listed_under_their_host_names() -> None:
    names = ["add_float_3", "add_int", "negate_half", "add_outer", "renamed", "attribute_kernel"]
    assert sorted(library(ENTRIES).functions) == sorted(names)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("add_float_3", torch.float32, 23),
        ("add_int", torch.int32, 21),
        ("negate_half", torch.float16, -10),
        ("add_outer", torch.float32, 27),
        ("renamed", torch.float32, 5),
        ("attribute_kernel", torch.float32, 6),
    ],
)
def test_entry_points_run(name: str, dtype: torch.dtype, expected: float) -> None:
    x = torch.full((1,), 10, dtype=dtype).to("mps")
    dispatch(library(ENTRIES).pipeline(name), [x])
    assert x.item() == expected


def test_buffers_without_an_index_take_the_free_ones_in_turn() -> None:
    arguments = [torch.full((1,), float(i), device="mps") for i in range(4)]
    source = """
    kernel void numbered(device float* first, device float* second [[buffer(0)]], constant float& third,
                         device const float* fourth [[buffer(3)]]) {
      first[0] += 10 * third + 100 * fourth[0];
      second[0] = -1;
    }"""
    run(source, arguments, threads=1)
    assert [a.item() for a in arguments] == [-1, 1 + 20 + 300, 2, 3]


def test_max_total_threads_may_depend_on_template_parameters() -> None:
    source = """
    namespace inner {
    template <int M, int N>
    [[kernel, max_total_threads_per_threadgroup(M * N * 32)]]
    void limited(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1; }
    }
    template [[host_name("limited")]] [[kernel]] decltype(inner::limited<2, 2>) inner::limited<2, 2>;"""
    with pytest.raises(mps_simulator.Fault, match="128"):
        dispatch(library(source).pipeline("limited"), [torch.zeros(129, device="mps")], threads=129)
    dispatch(library(source).pipeline("limited"), [torch.zeros(128, device="mps")], threads=128)


# ---- function constants ----------------------------------------------------------------------------------------------

CONSTANTS = """
constant bool has_extra [[function_constant(0)]];
constant int count [[function_constant(3)]];
constant float scale [[function_constant(4)]];
constant int optional [[function_constant(5)]];
constant int total = count * 2 + (is_function_constant_defined(optional) ? optional : 100);
float scaled(float x) { return x * scale; }
kernel void use(device float* out [[buffer(0)]],
                device const float* extra [[buffer(1), function_constant(has_extra)]]) {
  out[0] = scaled(total);
  if (has_extra) out[0] += extra[0];
}
kernel void unrelated(device float* out [[buffer(0)]]) { out[0] = 1; }
"""


@pytest.mark.parametrize(
    ("constants", "expected"),
    [
        ({0: False, 3: 4, 4: 2.0}, 2 * (8 + 100)),
        ({0: False, 3: 4, 4: 2.0, 5: 7}, 2 * (8 + 7)),
        ({0: True, 3: -1, 4: 0.5, 5: 7}, 0.5 * (-2 + 7) + 1000),
    ],
)
def test_function_constants(constants: Mapping[int, object], expected: float) -> None:
    out, extra = torch.zeros(1, device="mps"), torch.full((1,), 1000.0, device="mps")
    dispatch(library(CONSTANTS).pipeline("use", constants=constants), [out, extra if constants[0] else None])
    assert out.item() == expected


def test_pipelines_of_one_library_keep_their_own_constants() -> None:
    shared = library(CONSTANTS)
    first = shared.pipeline("use", constants={0: False, 3: 1, 4: 1.0})
    second = shared.pipeline("use", constants={0: False, 3: 2, 4: 1.0})
    a, b = torch.zeros(1, device="mps"), torch.zeros(1, device="mps")
    dispatch(first, [a])
    dispatch(second, [b])
    dispatch(first, [a])
    assert (a.item(), b.item()) == (102, 104)


def test_an_argument_whose_gate_is_open_must_be_set() -> None:
    pipeline = library(CONSTANTS).pipeline("use", constants={0: True, 3: 1, 4: 1.0})
    with pytest.raises(mps_simulator.Fault, match="'extra'"):
        dispatch(pipeline, [torch.zeros(1, device="mps")])


def test_a_function_constant_that_the_kernel_reaches_needs_a_value() -> None:
    with pytest.raises(RuntimeError, match=r"'use' needs a value for function constant 'scale' \(index 4\)"):
        library(CONSTANTS).pipeline("use", constants={0: False, 3: 1})
    assert library(CONSTANTS).pipeline("unrelated") is not None


def test_a_function_constant_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"'has_extra' \(index 0\): expected 1 bytes, got 4"):
        library(CONSTANTS).pipeline("use", constants={0: 1, 3: 1, 4: 1.0})


# ---- threadgroup memory ----------------------------------------------------------------------------------------------


def test_threadgroup_variables() -> None:
    """One declaration has several, one has a template's size, some are scalars, and two scopes have one of the same
    name.
    """
    source = """
    struct Pair { float a; float b; };
    template <typename T, int N>
    [[kernel]] void memory(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
      threadgroup T rows[N][2], total;
      threadgroup Pair pairs[N];
      if (i == 0) total = T(100);
      rows[i][0] = T(i);
      rows[i][1] = T(10 * i);
      pairs[i].a = 1000;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const uint other = N - 1 - i;
      float sum = float(rows[other][0] + rows[other][1] + total) + pairs[other].a;
      { threadgroup T rows[N]; rows[i] = T(1); threadgroup_barrier(mem_flags::mem_threadgroup); sum += rows[other]; }
      out[i] = sum + sizeof(rows);
    }
    template [[host_name("memory")]] [[kernel]] decltype(memory<half, 4>) memory<half, 4>;"""
    out = torch.zeros(4, device="mps")
    run(source, [out], threads=4)
    assert out.tolist() == [11 * (3 - i) + 100 + 1000 + 1 + 16 for i in range(4)]


def test_threadgroup_arguments_and_pointers_between_functions() -> None:
    source = """
    void fill(threadgroup float (&tile)[4], uint i) { tile[i] = float(i); }
    float read(threadgroup const float* tile, uint i) { return tile[i]; }
    kernel void arguments(device float* out [[buffer(0)]], threadgroup float* first [[threadgroup(0)]],
                          threadgroup float4* second [[threadgroup(1)]], uint i [[thread_index_in_threadgroup]]) {
      threadgroup float tile[4];
      fill(tile, i);
      first[i] = 10 * i;
      second[i] = float4(100 * i);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[i] = read(tile, 3 - i) + read(first, 3 - i) + second[3 - i].w;
    }"""
    out = torch.zeros(4, device="mps")
    run(source, [out], threads=4, threadgroup_memory={0: 16, 1: 64})
    assert out.tolist() == [333, 222, 111, 0]


# ---- the language ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "before", "expected"),
    [
        ("table[2] + four.z", "constant float table[] = {1, 2, 4}; constant float4 four = float4(1, 2, 8, 4);", 12),
        ("Limits<half>::max", "template <typename T> struct Limits { static constexpr constant float max = 3; };", 3),
        ("sum<4>()", "template <int N> int sum() { if constexpr (N > 0) return N + sum<N - 1>(); return 0; }", 10),
        ("0.1 * 3", "", 0.1 * 3),  # 0.3f; not the rounded double product
        ("is_same_v<decltype(1.0), float>", "", 1),
        ("float(1.5h) + 2.5bf", "", 4),
        ("global + local", "constant int global = 1; constant int local = 2;", 3),
        ("third(1, 2, 3)", "template <typename T> METAL_FUNC T third(T, T, T x) { return x; }", 3),
        ("INFINITY > MAXFLOAT", "", 1),
        ("INT_MAX", "", 2**31 - 1),
        ("apply(S(), 4.0f)", "struct S { float operator()(float x) const { return x * x; } };"
         " template <typename F> float apply(F f, float x) { return f(x); }", 16),
        ("int(E::b)", "enum class E : uchar { a = 1, b = 2 };", 2),
        ("as_type<uint>(1.0f) == 0x3f800000", "", 1),
        ("U().i", "struct U { union { int i; float f; }; U() : f(1) {} };", 0x3F800000),
        ("text()[2]", "constant char* text() { return \"abc\"; }", ord("c")),
    ],
)  # fmt: skip
def test_language(expression: str, before: str, expected: float) -> None:
    assert value_of(expression, before) == torch.tensor(expected, dtype=torch.float32).item()


def test_functions_and_members_are_overloaded_by_address_space() -> None:
    source = """
    float where(device const float*) { return 1; }
    float where(threadgroup const float*) { return 2; }
    float where(constant float*) { return 3; }
    float where(thread const float*) { return 4; }
    struct Place {
      float x;
      float where() const thread { return 10; }
      float where() const device { return 20; }
      float where() const constant { return 40; }
    };
    kernel void overloads(device float* out [[buffer(0)]], constant float* c [[buffer(1)]],
                          constant Place& p [[buffer(2)]], device const Place* q [[buffer(3)]]) {
      threadgroup float t[1];
      float local = 0;
      Place s = p;
      out[0] = where(out); out[1] = where(t); out[2] = where(c); out[3] = where(&local);
      out[4] = s.where(); out[5] = q->where(); out[6] = p.where();
    }"""
    out = torch.zeros(7, device="mps")
    run(source, [out, *torch.zeros(3, 1, device="mps")], threads=1)
    assert out.tolist() == [1, 2, 3, 4, 10, 20, 40]


def test_macros_and_predefined_names() -> None:
    source = "kernel void f(device float* x [[buffer(0)]]) { x[0] = VALUE + __METAL_VERSION__ + defined_twice; }"
    out = torch.zeros(1, device="mps")
    macros = {"VALUE": "0.5", "defined_twice": "(VALUE + VALUE)"}
    dispatch(library(source, macros=macros).pipeline("f"), [out])
    assert out.item() == 0.5 + 310 + 1


@pytest.mark.parametrize(("version", "number"), [("2.4", 240), ("3.1", 310), ("0.0", 200)])
def test_language_version(version: str, number: int) -> None:
    out = torch.zeros(1, device="mps")
    source = "kernel void f(device float* x [[buffer(0)]]) { x[0] = __METAL_VERSION__; }"
    dispatch(library(source, language_version=version).pipeline("f"), [out])
    assert out.item() == number


def test_a_host_that_sets_no_language_version_has_no_bfloat() -> None:
    source = "kernel void f(device bfloat* x [[buffer(0)]]) { x[0] = x[1]; }"
    assert library(source, language_version="3.1").functions == ["f"]
    with pytest.raises(RuntimeError, match=r"5:22: error: 'bfloat' needs language version 3.1.*compiled as 2.0"):
        library("\n" + source, language_version="0.0")


def test_fast_math_breaks_what_it_breaks_on_a_mac() -> None:
    source = "kernel void f(device float* x [[buffer(0)]]) { x[1] = isnan(x[0]) ? 1 : 2; }"
    for fast, expected in ((False, 1), (True, 2)):
        x = torch.tensor([float("nan"), 0.0]).to("mps")
        dispatch(library(source, fast_math=fast).pipeline("f"), [x])
        assert x[1].item() == expected, f"fast_math={fast}"


def test_products_are_contracted_to_fused_multiply_adds() -> None:
    a = 1 + 2.0**-12
    x = torch.tensor([a, -(a * a - 2.0**-24), 0.0], dtype=torch.float32).to("mps")  # a * a rounds to -x[1]
    run("kernel void f(device float* x [[buffer(0)]]) { x[2] = x[0] * x[0] + x[1]; }", [x], threads=1)
    assert x[2].item() == 2.0**-24


# ---- what is refused -------------------------------------------------------------------------------------------------

KERNEL = (
    "kernel void f(device float* x [[buffer(0)]], constant float* c [[buffer(1)]], uint i [[thread_position_in_grid]])"
)
BODY = f"{KERNEL} {{\n%s\n}}"
TWO_KERNELS = "kernel void f(device float* x [[buffer(0)]]) {}\n"

REFUSED = {
    # C++17 and what C++14 has but Metal lacks
    "structured binding": ("struct S { float a, b; };\n" + BODY % "S s; auto [a, b] = s;", 5, "decomposition"),
    "inline variable": ("struct S { static inline constant constexpr float q = 2; };", 3, "inline variables"),
    "fold expression": ("template <typename... T> float sum(T... t) { return (t + ...); }", 3, "fold expression"),
    "if with an initialiser": (BODY % "if (int z = 3; z) x[i] = z;", 4, "initialization statements"),
    "auto template parameter": ("template <auto N> struct Q {};", 3, "declared with 'auto'"),
    "nested namespace": ("namespace a::b { }", 3, "nested namespace"),
    "class template deduction": ("template <typename T> struct V { V(T) {} };\n" + BODY % "V v(3);", 5, "deduction"),
    "lambda": (BODY % "auto l = [](float a) { return a; }; x[i] = l(2);", 4, "lambda"),
    "lambda argument": ("template <typename F> void g(F) {}\n" + BODY % "g([=] { return 1; });", 5, "lambda"),
    "double": (BODY % "double d = 1; x[i] = d;", 4, "'double' is not supported"),
    "double parameter": ("float g(double d) { return d; }", 3, "'double' is not supported"),
    "throw": (BODY % "throw 1;", 4, "'throw' is not supported"),
    "new": (BODY % "x[i] = *new float;", 4, "'new' is not supported"),
    "virtual": ("struct S { virtual void f(); };", 3, "'virtual' is not supported"),
    "goto": (BODY % "goto end; end: x[i] = 1;", 4, "'goto' is not supported"),
    "static variable": (BODY % "static float s = 1; x[i] = s;", 4, "static variable must reside in constant"),
    "program-scope variable": ("constexpr int n = 3;", 3, "program scope variable must reside in constant"),
    "the standard library": (BODY % "x[i] = std::exp(1.0f);", 4, "'std'"),
    "printf": (BODY % 'printf("no");', 4, "'printf'"),
    "a 64-bit simd_sum": (BODY % "x[i] = simd_sum(1ul);", 4, "no matching function"),
    # address spaces
    "device to thread": (BODY % "thread float* p = x; p[0] = 1;", 4, "'thread float *' with"),
    "device to threadgroup": (BODY % "threadgroup float* p = x; p[0] = 1;", 4, "'threadgroup float *'"),
    "device to constant": (BODY % "constant float* p = x; x[i] = p[0];", 4, "'constant float *'"),
    "threadgroup to device": (BODY % "threadgroup float t[4]; device float* p = t; p[0] = 1;", 4, "'device float *'"),
    "threadgroup to thread": (BODY % "threadgroup float t[4]; thread float* p = t; p[0] = 1;", 4, "'thread float *'"),
    "thread to device": (BODY % "float t; device float* p = &t; p[0] = 1;", 4, "'device float *'"),
    "constant to device": (BODY % "device const float* p = c; x[i] = p[0];", 4, "'const device float *'"),
    "a cast between spaces": (BODY % "x[i] = *(threadgroup float*)x;", 4, "cast"),
    "an argument's space": ("float g(thread float* p) { return *p; }\n" + BODY % "x[i] = g(x);", 5, "no matching"),
    "constant written": (BODY % "c[0] = 1;", 4, "read-only"),
    "a table written": ("constant float t[2] = {1, 2};\n" + BODY % "t[0] = 1;", 5, "const-qualified"),
    "unqualified pointer in a kernel": ("kernel void f(float* x [[buffer(0)]]) {}", 3, "address space qualifier"),
    "unqualified reference in a kernel": ("struct S {};\nkernel void f(S& x [[buffer(0)]]) {}", 4, "address space"),
    "unqualified pointer variable": (BODY % "float* p = x; p[0] = 1;", 4, "pointer type must have explicit"),
    "unqualified pointer parameter": ("float g(const float* p) { return *p; }", 3, "pointer type must have explicit"),
    "unqualified reference parameter": ("template <typename T>\nT g(const T& x) { return x; }", 4, "reference type"),
    "unqualified cast": (BODY % "x[i] = *(float*)x;", 4, "pointer type must have explicit address space"),
    "a thread member function of constant data": (
        "struct S { float a; float f() const { return a; } };\n"
        "kernel void f(device float* x [[buffer(0)]], constant S& s [[buffer(1)]]) {\n x[0] = s.f();\n}",
        5, "of type 'constant S'"),
    "threadgroup variable in a function": ("void g() {\n threadgroup float t[3];\n}", 4, "can only be declared in"),
    # types
    "float to bfloat": (BODY % "bfloat b = x[i]; x[i] = b;", 4, "no viable conversion"),
    "half to bfloat": (BODY % "bfloat b = 1.0h; x[i] = b;", 4, "no viable conversion"),
    "vector to another vector": (BODY % "float4 a = half4(1); x[i] = a.x;", 4, "no viable conversion"),
    "too few components": (BODY % "x[i] = float4(1, 2, 3).x;", 4, "no matching con"),
    # kernels
    "no attribute": ("kernel void f(device float* x, uint i) {}", 3, "'i' is neither a pointer or reference"),
    "unknown attribute": ("kernel void f(uint i [[thread_position_in_nowhere]]) {}", 3, "does not know the attribute"),
    "index twice": ("kernel void f(device int* x [[buffer(0)]], device int* y [[buffer(0)]]) {}", 3, "already used"),
    "index above 30": ("kernel void f(device float* x [[buffer(31)]]) {}", 3, "out of bounds"),
    "[[buffer]] on threadgroup memory": ("kernel void f(threadgroup float* x [[buffer(0)]]) {}", 3, "does not fit"),
    "a position that is a float": ("kernel void f(float i [[thread_position_in_grid]]) {}", None, "uint or ushort"),
    "a result": ("kernel int f(device float* x [[buffer(0)]]) { return 1; }", 3, "must return void"),
    "one name twice": (
        TWO_KERNELS + "template <typename T> kernel void g(device T* x [[buffer(0)]]) {}\n"
        'template [[host_name("f")]] [[kernel]] decltype(g<float>) g<float>;', 5, "two kernels have the name 'f'"),
    "no such template": ('template [[host_name("g")]] [[kernel]] decltype(g<int>) g<int>;', 3, "no kernel template"),
    # text
    "a missing brace": ("kernel void f() {", 3, "unterminated '{'"),
    "a brace too many": ("kernel void f() { }\n}", 4, "extraneous"),
    "syntax": (BODY % "x[i] = ;", 4, "expected expression"),
    "an unknown name": (BODY % "x[i] = foo(1);", 4, "undeclared identifier 'foo'"),
    "a missing include": ('#include "nothing.h"', 3, "'nothing.h' file not found"),
    "#error": ("#error no luck", 3, "no luck"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    source, line, words = REFUSED[case]
    with pytest.raises(RuntimeError) as error:
        mps_simulator.metal.Library(
            "#include <metal_stdlib>\nusing namespace metal;\n" + source.replace(BODY[-2:], "\n}")
        )
    message = str(error.value)
    assert words in message
    if line is not None:
        # BODY starts a new line, so its statement is one line below the kernel's first
        assert f"program_source:{line}:" in message.splitlines()[0], message


def test_features_of_cpp17_pass_where_strict_is_off() -> None:
    source = REFUSED["nested namespace"][0] + KERNEL + " { x[i] = 1; }"
    with settings(strict=False):
        assert mps_simulator.metal.Library(source).functions == ["f"]
    with pytest.raises(RuntimeError, match="nested namespace"):
        mps_simulator.metal.Library(source)


def test_errors_name_the_files_of_line_directives() -> None:
    directives = '#include <metal_stdlib>\n#line 7 "core/tile.h"\nint ok;\n#line 40 "linalg/solve.metal"\n'
    source = f"{directives}{KERNEL} {{\n y = 1; }}"
    with pytest.raises(RuntimeError) as error:
        mps_simulator.metal.Library(source.replace("int ok;", ""))
    assert str(error.value).startswith("linalg/solve.metal:41:2: error:")
    with pytest.raises(RuntimeError, match=r"^core/tile\.h:7:5: error: program scope variable"):
        mps_simulator.metal.Library(source)


def test_a_program_without_a_metal_header_has_no_library() -> None:
    with pytest.raises(RuntimeError, match="no Metal header is included"):
        mps_simulator.metal.Library("kernel void f(device float* x [[buffer(0)]]) { x[0] = metal::exp(x[1]); }")


# ---- the cache -------------------------------------------------------------------------------------------------------

COMPILES = """
import mps_simulator, mps_simulator.metal
mps_simulator.activate()
print(mps_simulator.metal.Library({source!r}, macros={macros!r}).functions)
"""


def compile_in_another_process(folder: Path, source: str, macros: Mapping[str, int]) -> None:
    script = COMPILES.format(source=source, macros=dict(macros))
    subprocess.run([sys.executable, "-c", script], check=True, cwd=folder, stdout=subprocess.DEVNULL)


def test_programs_are_kept_by_content_and_macros(folder: Path) -> None:
    name = f"kept_{os.getpid()}_{time.monotonic_ns()}"
    source = f"{HEADER}\nkernel void {name}(device float* x [[buffer(0)]]) {{ x[0] = 1; }}"

    def programs() -> list[Path]:
        files = (cache_directory() / "shaders").glob("[0-9a-f]*.so")
        return [path for path in files if name.encode() in path.read_bytes()]

    compile_in_another_process(folder, source, {})
    (first,) = programs()
    made = first.stat().st_mtime_ns
    compile_in_another_process(folder, source, {})
    assert programs() == [first]
    assert first.stat().st_mtime_ns == made
    compile_in_another_process(folder, source, {"OTHER": 1})
    assert len(programs()) == 2
