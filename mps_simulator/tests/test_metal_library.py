"""Compares the engine's Metal library with numpy and PyTorch: rounding, vectors, functions, simdgroups, matrices,
atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mps_simulator
import mps_simulator.metal
from metal_programs import HEADER, dispatch, run
from mps_simulator import settings

np = pytest.importorskip("numpy")
DTYPES = {"bfloat": torch.bfloat16, "half": torch.float16, "float": torch.float32}


def map_elements(statement: str, inputs: dict[str, torch.Tensor], out_type: str, before: str = "") -> torch.Tensor:
    """Returns the `y` that `statement` computes from one element of each input."""
    types = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float", torch.int32: "int"}
    (count,) = {x.numel() for x in inputs.values()}
    out = torch.zeros(count, dtype=next(k for k, v in types.items() if v == out_type)).to("mps")
    declared = "".join(
        f"device const {types[x.dtype]}* {name}s [[buffer({i + 1})]], " for i, (name, x) in enumerate(inputs.items())
    )
    loads = "".join(f"{types[x.dtype]} {name} = {name}s[i]; " for name, x in inputs.items())
    run(
        f"{before}\nkernel void f(device {out_type}* out [[buffer(0)]], {declared}"
        f" uint i [[thread_position_in_grid]]) {{ {loads} {out_type} y; {statement} out[i] = y; }}",
        [out, *(x.to("mps") for x in inputs.values())],
        grid=count,
        threads=256,
    )
    return out.cpu()


def random_bits(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Returns every kind of number: normal, subnormal, zero, infinite, NaN."""
    generator = np.random.default_rng(seed)
    integer = np.int32 if dtype == torch.float32 else np.int16
    limits = np.iinfo(integer)
    bits = generator.integers(limits.min, limits.max, count, dtype=integer, endpoint=True)
    return torch.from_numpy(bits).view(dtype)


def assert_same_numbers(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    got, expected = got[~nan].view(integer), expected[~nan].view(integer)
    assert torch.equal(got, expected), f"{int((got != expected).sum())} of {got.numel()} differ"


# ---- rounding --------------------------------------------------------------------------------------------------------


def floats_around(dtype: torch.dtype) -> torch.Tensor:
    """Returns floats at, halfway between and one ULP off the numbers of a 16-bit type, and then any floats."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    halfway = ((numbers[1:].double() + numbers[:-1].double()) / 2).float()
    near = [torch.nextafter(halfway, torch.tensor(end)) for end in (-np.inf, np.inf)]
    special = torch.tensor([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 65519.9, 65520.0, 1e-45, -0.0])
    return torch.cat([numbers, halfway, *near, special, random_bits(torch.float32, 100_000, seed=1)])


@pytest.mark.parametrize("name", ["bfloat", "half"])
def test_conversion_from_float_rounds_to_nearest_even(name: str) -> None:
    x = floats_around(DTYPES[name])
    assert_same_numbers(map_elements(f"y = {name}(x);", {"x": x}, name), x.to(DTYPES[name]))


@pytest.mark.parametrize("name", ["bfloat", "half"])
def test_conversion_to_float_is_exact(name: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[name])
    assert_same_numbers(map_elements("y = x;", {"x": x}, "float"), x.float())


@pytest.mark.parametrize("operator", ["+", "-", "*", "/"])
@pytest.mark.parametrize("name", ["bfloat", "half", "float"])
def test_arithmetic_rounds_after_each_operation(name: str, operator: str) -> None:
    a, b = (random_bits(DTYPES[name], 200_000, seed) for seed in (2, 3))
    with np.errstate(all="ignore"):
        exact = eval(f"p {operator} q", {"p": a.double().numpy(), "q": b.double().numpy()})
    # A double quotient, sum or product of two such numbers is exact when it is rounded again.
    assert_same_numbers(
        map_elements(f"y = a {operator} b;", {"a": a, "b": b}, name), torch.from_numpy(exact).to(DTYPES[name])
    )


@pytest.mark.parametrize("name", ["bfloat", "half"])
def test_a_sum_of_three_rounds_twice(name: str) -> None:
    a, b, c = (torch.randn(10_000).to(DTYPES[name]) for _ in range(3))
    assert_same_numbers(map_elements("y = a + b + c;", {"a": a, "b": b, "c": c}, name), a + b + c)


def test_bfloat_with_float_is_float_and_with_an_integer_is_bfloat() -> None:
    x = torch.randn(1000).bfloat16()
    before = "template <typename T> struct Size { static constant constexpr int n = sizeof(T); };"
    sizes = map_elements("y = Size<decltype(x * 1.0f)>::n + 10 * Size<decltype(x * 2)>::n;", {"x": x}, "int", before)
    assert sizes.unique().tolist() == [24]
    assert_same_numbers(map_elements("y = x * 0.3f;", {"x": x}, "float"), x.float() * 0.3)


def test_compound_assignment_and_comparison_of_bfloat() -> None:
    a, b = (torch.randn(1000).bfloat16() for _ in range(2))
    got = map_elements("y = a; y += b; y *= b; y -= a; if (a < b) y = -y;", {"a": a, "b": b}, "bfloat")
    expected = (a + b) * b - a
    assert_same_numbers(got, torch.where(a < b, -expected, expected))


# ---- types -----------------------------------------------------------------------------------------------------------

SCALAR_SIZES = {"bool": 1, "char": 1, "uchar": 1, "short": 2, "ushort": 2, "half": 2, "bfloat": 2, "int": 4, "uint": 4}
SCALAR_SIZES |= {"float": 4, "long": 8, "ulong": 8, "size_t": 8}


def layout(type_name: str) -> tuple[int, int]:
    out = torch.zeros(2, dtype=torch.int32).to("mps")
    run(
        f"kernel void f(device int* out [[buffer(0)]]) {{ out[0] = sizeof({type_name});"
        f" out[1] = alignof({type_name}); }}",
        [out],
        threads=1,
    )
    size, alignment = out.tolist()
    return size, alignment


@pytest.mark.parametrize("scalar", SCALAR_SIZES)
def test_sizes_and_alignments(scalar: str) -> None:
    size = SCALAR_SIZES[scalar]
    assert layout(scalar) == (size, size)
    if scalar == "size_t":
        return
    for width, slots in ((2, 2), (3, 4), (4, 4)):
        assert layout(f"{scalar}{width}") == (slots * size, slots * size)
        assert layout(f"packed_{scalar}{width}") == (width * size, size)


# ---- vectors ---------------------------------------------------------------------------------------------------------


def vector(statement: str, out: str = "y") -> list[float]:
    """Returns the four floats that `statement` puts into `y`, from v = (1, 2, 3, 4) and w = (10, 20, 30, 40)."""
    y = torch.zeros(4, device="mps")
    run(
        "kernel void f(device float4* out [[buffer(0)]]) {"
        f" float4 v(1, 2, 3, 4), w = float4(10, 20, 30, 40), y = 0; {statement} out[0] = float4({out}); }}",
        [y],
        threads=1,
    )
    return y.tolist()


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("y = v.wzyx;", [4, 3, 2, 1]),
        ("y = v.xxyy + w.rgba;", [11, 21, 32, 42]),
        ("y.zw = v.xy; y.x = w.a;", [40, 0, 1, 2]),
        ("y = v; y.xz += w.yw; y.yw *= 2;", [21, 4, 43, 8]),
        ("y = float4(v.xy, w.zw);", [1, 2, 30, 40]),
        ("y = float4(7, v.yzw);", [7, 2, 3, 4]),
        ("y = float4(v.xy * 2.0f, 5, w.x);", [2, 4, 5, 10]),
        ("y = 3;", [3, 3, 3, 3]),
        ("y = v; y[2] = v[0] + v[3];", [1, 2, 5, 4]),
        ("for (int i = 0; i < 4; ++i) y[i] = v[3 - i];", [4, 3, 2, 1]),
        ("y = 2 * v - w / 10 + 1;", [2, 3, 4, 5]),
        ("y = -v; y += w; y -= 1.0f;", [8, 17, 26, 35]),
        ("y = float4(v > float4(2.5f));", [0, 0, 1, 1]),
        ("y = select(v, w, v < 3.0f);", [10, 20, 3, 4]),
        ("y = float4(int4(v) % 2 << 2);", [4, 0, 4, 0]),
        ("y = float4(half4(w));", [10, 20, 30, 40]),
        ("y = float4(bfloat4(v));", [1, 2, 3, 4]),
        ("packed_float3 p = packed_float3(v.xyz); y.xyz = float3(p) * 2; y.w = p[1];", [2, 4, 6, 2]),
        ("y = as_type<float4>(as_type<uint4>(v));", [1, 2, 3, 4]),
        ("y.xy = as_type<float2>(as_type<ulong>(v.zw));", [3, 4, 0, 0]),
        ("y = max(v, 2.5f) + min(w, 25.0f);", [12.5, 22.5, 28, 29]),
        ("y = clamp(v, 1.5f, 3.5f);", [1.5, 2, 3, 3.5]),
        ("y = fma(v, w, 1.0f);", [11, 41, 91, 161]),
        ("y = mix(v, w, 0.5f);", [5.5, 11, 16.5, 22]),
        ("y.x = dot(v, w); y.y = length(float2(3, 4)); y.zw = normalize(float2(0, 2));", [300, 5, 0, 1]),
        ("y.xyz = cross(v.xyz, w.zyx);", [20 - 60, 90 - 10, 20 - 60]),
        ("y.x = all(v > 0); y.y = any(v > 3.5f); y.z = all(v > 3.5f); y.w = any(isnan(v));", [1, 1, 0, 0]),
        ("vec<float, 4> x{5, 6, 7, 8}; y = x;", [5, 6, 7, 8]),
        ("thread float4& r = y; r.x = 1; thread float4* p = &y; p->y = 2; p->zw = v.zw;", [1, 2, 3, 4]),
    ],
)
def test_vectors(statement: str, expected: list[float]) -> None:
    assert vector(statement)[: len(expected)] == expected


def test_user_names_that_look_like_swizzles_are_left_alone() -> None:
    out = torch.zeros(1, device="mps")
    source = """
    struct Box { float ab; float2 xy; };
    kernel void f(device float* out [[buffer(0)]]) {
      Box box;
      box.ab = 2;
      box.xy = float2(3, 4);
      out[0] = box.ab + box.xy.y;
    }"""
    run(source, [out], threads=1)
    assert out.item() == 6


# ---- functions -------------------------------------------------------------------------------------------------------

# Each has numpy's double function, arguments, and the bound in ULPs of the specification's table for metal::precise.
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[float, float], float]] = {
    "exp": (np.exp, (-80, 80), 4),
    "exp2": (np.exp2, (-120, 120), 4),
    "exp10": (lambda x: np.power(10.0, x), (-37, 38), 4),
    "log": (np.log, (1e-30, 1e30), 4),
    "log2": (np.log2, (1e-30, 1e30), 4),
    "log10": (np.log10, (1e-30, 1e30), 4),
    "sqrt": (np.sqrt, (0, 1e30), 0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), (1e-30, 1e30), 0),
    "sin": (np.sin, (-100, 100), 4),
    "cos": (np.cos, (-100, 100), 4),
    "tan": (np.tan, (-1.5, 1.5), 6),
    "sinpi": (lambda x: np.sin(np.pi * x), (-0.9, 0.9), 4),
    "cospi": (lambda x: np.cos(np.pi * x), (-0.4, 0.4), 4),
    "asin": (np.arcsin, (-1, 1), 4),
    "acos": (np.arccos, (-1, 1), 4),
    "atan": (np.arctan, (-100, 100), 5),
    "sinh": (np.sinh, (-80, 80), 4),
    "cosh": (np.cosh, (-80, 80), 4),
    "tanh": (np.tanh, (-10, 10), 5),
    "asinh": (np.arcsinh, (-1e6, 1e6), 4),
    "acosh": (np.arccosh, (1, 1e6), 4),
    "atanh": (np.arctanh, (-0.99, 0.99), 5),
}


def ulps_off(got: torch.Tensor, exact: np.ndarray) -> float:
    """Uses ULPs of the larger number: below a power of two, one may move beyond it, where ULPs are twice as large."""
    ulp = np.spacing(np.maximum(np.abs(got.numpy()), np.abs(exact.astype(np.float32))))
    return float(np.max(np.abs(got.double().numpy() - exact) / ulp.astype(np.float64)))


@pytest.mark.parametrize("perturb", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_the_specified_bounds(name: str, perturb: bool) -> None:
    function, (low, high), bound = FUNCTIONS[name]
    if low > 0 and high / low > 1e6:
        x = torch.exp(torch.linspace(np.log(low), np.log(high), 20_001, dtype=torch.float64)).float()
    else:
        x = torch.linspace(low, high, 20_001)
    with settings(perturb=perturb, seed=1):
        got = map_elements(f"y = metal::precise::{name}(x);", {"x": x}, "float")
    off = ulps_off(got, function(x.double().numpy()))
    assert off <= (max(bound, 0.5) if perturb else 0.5 + 1e-6)
    if perturb and bound:
        assert off > 1.5, "the perturbing mode moved nothing"


def test_the_default_functions_follow_fast_math() -> None:
    x = torch.full((1,), 20.0)
    source = "kernel void f(device float* out [[buffer(0)]], device float* x [[buffer(1)]]) { out[0] = exp(x[0]); }"
    moved: dict[bool, set[float]] = {}
    for fast in (False, True):
        moved[fast] = set()
        pipeline = mps_simulator.metal.Library(HEADER + source, fast_math=fast).pipeline("f")
        for seed in range(1, 40):
            out = torch.zeros(1, device="mps")
            with settings(perturb=True, seed=seed):
                dispatch(pipeline, [out, x.to("mps")])
            moved[fast].add(abs(ulps_off(out.cpu(), np.exp(x.double().numpy()))))
    assert max(moved[False]) <= 4
    assert 4 < max(moved[True]) <= 3 + 40


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("clz(1)", 31), ("clz(0u)", 32), ("clz(ushort(1))", 15), ("ctz(8)", 3), ("ctz(0)", 32), ("popcount(255)", 8),
        ("popcount(short(-1))", 16), ("popcount(-1l)", 64), ("reverse_bits(1u) >> 31", 1),
        ("rotate(0x80000001u, 1u)", 3),
        ("extract_bits(0xabcdu, 4u, 8u)", 0xBC), ("extract_bits(int(0xf0), 4u, 4u)", -1),
        ("extract_bits(7u, 3u, 0u)", 0),
        ("insert_bits(0u, 0xffu, 4u, 4u)", 0xF0), ("insert_bits(0xffffu, 0u, 0u, 32u)", 0), ("abs(-7)", 7),
        ("absdiff(-5, 7)", 12), ("addsat(2147483647, 1) - 2147483647", 0), ("addsat(uchar(200), uchar(100))", 255),
        ("subsat(3u, 5u)", 0), ("subsat(-2147483647, 5) + 2147483647", -1), ("hadd(3, 6)", 4), ("rhadd(3, 6)", 5),
        ("mulhi(0x80000000u, 6u)", 3), ("mulhi(-1, 2)", -1), ("mad24(3, 4, 5)", 17), ("max(3, -4)", 3),
        ("min(3u, 4u)", 3), ("clamp(9, 1, 5)", 5), ("max3(1, 7, 3)", 7), ("median3(5, 1, 3)", 3),
        ("int(sign(-2.5f))", -1), ("int(round(2.5f)) * 10 + int(rint(2.5f))", 32), ("int(fmod(7.5f, 2.0f) * 2)", 3),
        ("int(floor(-1.5f)) * 10 + int(trunc(-1.5f))", -21), ("int(fract(2.75f) * 100)", 75), ("isnan(NAN)", 1),
        ("int(ldexp(3.0f, 4))", 48), ("ilogb(9.0f)", 3), ("int(step(2.0f, 3.0f))", 1), ("signbit(-0.0f)", 1),
        ("int(copysign(3.0f, -0.0f))", -3), ("int(max(NAN, 2.0f))", 2), ("int(saturate(3.5f))", 1),
        ("int(numeric_limits<half>::max())", 65504), ("numeric_limits<short>::lowest()", -32768),
        ("isinf(float(numeric_limits<bfloat>::infinity()))", 1), ("int(smoothstep(0.0f, 2.0f, 1.0f) * 4)", 2),
    ],
)  # fmt: skip
def test_integer_and_exact_functions(expression: str, expected: int) -> None:
    out = torch.zeros(1, dtype=torch.int32).to("mps")
    run(f"kernel void f(device int* out [[buffer(0)]]) {{ out[0] = int({expression}); }}", [out], threads=1)
    assert out.item() == expected


def test_functions_with_two_results() -> None:
    got = vector("int e; y.x = frexp(12.0f, e); y.y = e; float whole; y.z = modf(-2.75f, whole); y.w = whole;", "y")
    assert got == [0.75, 4, -0.75, -2]


# ---- simdgroups ------------------------------------------------------------------------------------------------------

LANES = 32


def lanes(expression: str, data: np.ndarray, type_name: str = "float") -> np.ndarray:
    """Returns the value of the expression of x in each lane."""
    out = torch.zeros(LANES, dtype=torch.from_numpy(data).dtype).to("mps")
    run(
        f"kernel void f(device {type_name}* out [[buffer(0)]], device const {type_name}* in [[buffer(1)]],"
        f" uint lane [[thread_index_in_simdgroup]], uint i [[thread_position_in_grid]]) {{"
        f" {type_name} x = in[i]; out[i] = {expression}; }}",
        [out, torch.from_numpy(data).to("mps")],
        threads=LANES,
    )
    return out.cpu().numpy()


INTEGERS = np.random.default_rng(5).integers(-1000, 1000, LANES).astype(np.int32)
EXCLUSIVE = np.concatenate([[0], np.cumsum(INTEGERS)[:-1]])
OWN = np.arange(LANES)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_sum(x)", INTEGERS.sum()),
        ("simd_min(x)", INTEGERS.min()),
        ("simd_max(x)", INTEGERS.max()),
        ("simd_and(x)", np.bitwise_and.reduce(INTEGERS)),
        ("simd_or(x)", np.bitwise_or.reduce(INTEGERS)),
        ("simd_xor(x)", np.bitwise_xor.reduce(INTEGERS)),
        ("simd_product(x % 3 == 0 ? 1 : -1)", np.where(np.fmod(INTEGERS, 3) == 0, 1, -1).prod()),
        ("simd_prefix_inclusive_sum(x)", np.cumsum(INTEGERS)),
        ("simd_prefix_exclusive_sum(x)", EXCLUSIVE),
        ("simd_prefix_inclusive_product(x < 0 ? -1 : 1)", np.cumprod(np.where(INTEGERS < 0, -1, 1))),
        ("simd_prefix_exclusive_product(lane < 20 ? 2 : 1)", 2 ** np.minimum(OWN, 20)),
        ("simd_broadcast(x, 7)", INTEGERS[7]),
        ("simd_broadcast_first(x)", INTEGERS[0]),
        ("simd_shuffle(x, ushort(lane * 5 % 32))", INTEGERS[OWN * 5 % 32]),
        ("simd_shuffle_xor(x, 9)", INTEGERS[OWN ^ 9]),
        ("simd_shuffle_up(x, 5)", np.where(OWN >= 5, INTEGERS[OWN - 5], INTEGERS)),
        ("simd_shuffle_down(x, 5)", np.where(OWN < 27, INTEGERS[(OWN + 5) % 32], INTEGERS)),
        ("simd_shuffle_rotate_up(x, 5)", INTEGERS[(OWN - 5) % 32]),
        ("simd_shuffle_rotate_down(x, 5)", INTEGERS[(OWN + 5) % 32]),
        # as if the filling's last lanes came before the data, or its first lanes after it
        ("simd_shuffle_and_fill_up(x, -x, 5)", np.where(OWN >= 5, INTEGERS[OWN - 5], -INTEGERS[(OWN - 5) % 32])),
        ("simd_shuffle_and_fill_down(x, -x, 5)", np.where(OWN < 27, 1, -1) * INTEGERS[(OWN + 5) % 32]),
        ("simd_shuffle_and_fill_up(x, -x, 3, 8)",
         np.where(OWN % 8 >= 3, INTEGERS[OWN - 3], -INTEGERS[OWN // 8 * 8 + (OWN - 3) % 8])),
        ("int(ulong(simd_ballot(x < 0)) & 0xffffffff)", (np.where(INTEGERS < 0, 1, 0) << OWN).sum().astype(np.int32)),
        ("simd_all(x < 1000) * 10 + simd_all(x < 0) + simd_any(x < 0) * 100", 110),
        ("simd_is_first()", np.where(OWN == 0, 1, 0)),
        ("quad_sum(x)", INTEGERS.reshape(8, 4).sum(1).repeat(4)),
        ("quad_broadcast(x, 2)", INTEGERS.reshape(8, 4)[:, 2].repeat(4)),
        ("quad_shuffle_xor(x, 1)", INTEGERS[OWN ^ 1]),
        ("simd_sum(int2(x, lane)).y", 496),
    ],
)  # fmt: skip
def test_simdgroup_functions(expression: str, expected: np.ndarray | int) -> None:
    assert np.array_equal(lanes(expression, INTEGERS, "int"), np.broadcast_to(expected, LANES))


def test_a_shuffle_from_no_lane_gives_no_plausible_value() -> None:
    assert (lanes("simd_shuffle(x, ushort(lane + 1))", INTEGERS, "int")[31:] == -1).all()


# ---- simdgroup matrices ----------------------------------------------------------------------------------------------

MATRIX = """
kernel void f(device {d}* out [[buffer(0)]], device const {a}* as [[buffer(1)]], device const {b}* bs [[buffer(2)]],
              device const {c}* cs [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]) {{
  simdgroup_matrix<{a}, 8, 8> a;
  simdgroup_matrix<{b}, 8, 8> b;
  simdgroup_matrix<{c}, 8, 8> c;
  simdgroup_matrix<{d}, 8, 8> d;
  simdgroup_load(a, as, 8);
  simdgroup_load(b, bs, 8);
  simdgroup_load(c, cs, 8);
  {statement}
  simdgroup_store(d, out, 8);
}}"""


def matrices(statement: str, types: str = "float float float float") -> tuple[torch.Tensor, ...]:
    d, a, b, c = types.split()
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(8, 8, generator=generator).to(DTYPES[name]) for name in (a, b, c)]
    out = torch.zeros(8, 8, dtype=DTYPES[d]).to("mps")
    run(MATRIX.format(statement=statement, a=a, b=b, c=c, d=d), [out, *(x.to("mps") for x in inputs)], threads=32)
    return (out.cpu(), *(x.double() for x in inputs))


def assert_close(got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Allows the errors of eight fused multiply-adds in float, and of one rounding to the result's type."""
    rounding = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[got.dtype]
    assert ((got.double() - exact).abs() <= 8 * 2.0**-24 * magnitude + rounding * exact.abs()).all()


@pytest.mark.parametrize(
    "types",
    ["float float float float", "float half half float", "float bfloat bfloat float", "half half half half",
     "bfloat bfloat bfloat bfloat", "float float half bfloat"],
)  # fmt: skip
def test_simdgroup_multiply_accumulate(types: str) -> None:
    got, a, b, c = matrices("simdgroup_multiply_accumulate(d, a, b, c);", types)
    assert_close(got, a @ b + c, a.abs() @ b.abs() + c.abs())


def test_simdgroup_multiply() -> None:
    got, a, b, _ = matrices("simdgroup_multiply(d, a, b);")
    assert_close(got, a @ b, a.abs() @ b.abs())
    got, a, b, _ = matrices("d = a * b;")
    assert_close(got, a @ b, a.abs() @ b.abs())


def test_operands_may_be_the_result() -> None:
    got, a, b, c = matrices("d = c; simdgroup_multiply_accumulate(d, a, b, d); simdgroup_multiply(d, d, d);")
    exact = a @ b + c
    magnitude = a.abs() @ b.abs() + c.abs()
    assert_close(got, exact @ exact, 3 * magnitude @ magnitude)


def test_diagonal_and_filled_matrices() -> None:
    assert torch.equal(matrices("d = simdgroup_float8x8(2.5f);")[0], 2.5 * torch.eye(8))
    assert torch.equal(matrices("d = make_filled_simdgroup_matrix<float, 8>(1.5f);")[0], torch.full((8, 8), 1.5))


def test_thread_elements_have_apples_layout() -> None:
    statement = "d = c; d.thread_elements()[0] = lane; thread auto& e = d.thread_elements(); e.y = lane + 0.5f;"
    got = matrices(statement)[0]
    for lane in range(32):
        row = (lane >> 4 & 1) * 4 + (lane >> 1 & 3)
        column = (lane >> 3 & 1) * 4 + (lane & 1) * 2
        assert got[row, column : column + 2].tolist() == [lane, lane + 0.5], f"lane {lane}"


@pytest.mark.parametrize("space", ["device", "threadgroup"])
@pytest.mark.parametrize("transpose", [False, True])
def test_loads_and_stores_with_stride_origin_and_transposition(space: str, transpose: bool) -> None:
    source = f"""
    kernel void f(device half* out [[buffer(0)]], device const half* in [[buffer(1)]],
                  uint lane [[thread_index_in_simdgroup]]) {{
      threadgroup half from[20 * 24], to[20 * 24];
      for (int i = lane; i < 20 * 24; i += 32) {{ from[i] = in[i]; to[i] = 0; out[i] = 0; }}
      simdgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
      simdgroup_half8x8 m;
      simdgroup_load(m, {"in" if space == "device" else "from"}, 24, ulong2(5, 3), {str(transpose).lower()});
      simdgroup_store(m, {"out" if space == "device" else "to"}, 24, ulong2(9, 11));
      simdgroup_barrier(mem_flags::mem_threadgroup);
      if ({int(space == "threadgroup")}) for (int i = lane; i < 20 * 24; i += 32) out[i] = to[i];
    }}"""
    data = torch.arange(480.0).half().view(20, 24)
    out = torch.zeros(20, 24, dtype=torch.float16).to("mps")
    run(source, [out, data.to("mps")], threads=32)
    expected = torch.zeros(20, 24).half()
    block = data[3:11, 5:13]
    expected[11:19, 9:17] = block.T if transpose else block
    assert torch.equal(out.cpu(), expected)


# ---- atomics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["device", "threadgroup"])
@pytest.mark.parametrize(
    ("operation", "start", "expected"),
    [
        ("atomic_fetch_add_explicit(a, value, memory_order_relaxed)", 5, 5 + sum(range(64))),
        ("atomic_fetch_sub_explicit(a, value, memory_order_relaxed)", 5, 5 - sum(range(64))),
        ("atomic_fetch_min_explicit(a, value - 20, memory_order_relaxed)", 5, -20),
        ("atomic_fetch_max_explicit(a, value, memory_order_relaxed)", 5, 63),
        ("atomic_fetch_and_explicit(a, ~value, memory_order_relaxed)", 255, 255 & ~63),
        ("atomic_fetch_or_explicit(a, value, memory_order_relaxed)", 64, 127),
        ("atomic_fetch_xor_explicit(a, value, memory_order_relaxed)", 1, 1),
        ("int old = atomic_load_explicit(a, memory_order_relaxed);"
         " while (!atomic_compare_exchange_weak_explicit(a, &old, old + 2, memory_order_relaxed,"
         " memory_order_relaxed)) {}", 7, 7 + 128),
    ],
)  # fmt: skip
def test_atomics(space: str, operation: str, start: int, expected: int) -> None:
    target = "device atomic_int* a = out;" if space == "device" else "threadgroup atomic_int* a = &shared;"
    source = f"""
    kernel void f(device atomic_int* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {{
      threadgroup atomic_int shared;
      {target}
      if (i == 0) atomic_store_explicit(a, {start}, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
      int value = int(i);
      {operation};
      threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
      if (i == 0) atomic_store_explicit(out, atomic_load_explicit(a, memory_order_relaxed), memory_order_relaxed);
    }}"""
    out = torch.zeros(1, dtype=torch.int32).to("mps")
    run(source, [out], threads=64)
    assert out.item() == expected


def test_float_atomics_and_exchange() -> None:
    source = """
    kernel void f(device atomic_float* sum [[buffer(0)]], device atomic_uint* last [[buffer(1)]],
                  device uint* seen [[buffer(2)]], uint i [[thread_position_in_grid]]) {
      atomic_fetch_add_explicit(sum, 0.25f * i, memory_order_relaxed);
      seen[i] = atomic_exchange_explicit(last, i + 1, memory_order_relaxed);
    }"""
    total = torch.zeros(1, device="mps")
    last, seen = torch.zeros(1, dtype=torch.int32).to("mps"), torch.zeros(128, dtype=torch.int32).to("mps")
    run(source, [total, last, seen], threadgroups=2, threads=64)
    assert total.item() == 0.25 * sum(range(128))
    assert sorted([*seen.tolist(), last.item()]) == list(range(129))
