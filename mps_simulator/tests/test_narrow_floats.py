"""Tests the conversions of half and bfloat, for each instruction set that shaders may be compiled for."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import mps_simulator
from metal_programs import HEADER, dispatch
from mps_simulator import settings

FEATURES: dict[str, set[str]] = {"x86-64": set(), "x86-64-v2": {"ssse3", "sse4_2", "popcnt"}}
FEATURES["x86-64-v3"] = FEATURES["x86-64-v2"] | {"avx2", "bmi2", "f16c", "fma", "movbe"}
FEATURES["x86-64-v4"] = FEATURES["x86-64-v3"] | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
FEATURES["native"] = set()


def processor() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


needs_x86 = pytest.mark.skipif("sse2" not in processor(), reason="clang's names of x86-64 need such a processor")
instruction_set = pytest.mark.parametrize(
    "march", [each if each == "native" else pytest.param(each, marks=needs_x86) for each in FEATURES]
)

# A bfloat or half that a condition decides is one of which clang narrows a float, although its bits are those of x.
CONVERSIONS = """
template <typename T> kernel void convert(device T* narrow [[buffer(0)]], device float* wide [[buffer(1)]],
    device int* whole [[buffer(2)]], device T* chosen [[buffer(3)]], device vec<T, 4>* vectors [[buffer(4)]],
    device const float* x [[buffer(5)]], uint i [[thread_position_in_grid]]) {
  narrow[i] = T(x[i]);
  wide[i] = float(T(x[i]));
  whole[i] = int(float(T(i)));
  T value = T(0.0f);
  if (x[i] > 0.5f) value = narrow[i];
  chosen[i] = value;
  vec<T, 4> four = vec<T, 4>(T(0.0f));
  if (x[i] > 0.5f) four = vec<T, 4>(float4(x[i]) * 2.0f);
  vectors[i] = four + four;
}
template [[host_name("convert_half")]] kernel decltype(convert<half>) convert<half>;
template [[host_name("convert_bfloat")]] kernel decltype(convert<bfloat>) convert<bfloat>;
"""
TYPES = {"half": torch.float16, "bfloat": torch.bfloat16}


@instruction_set
def test_a_program_of_16_bits_loads(march: str) -> None:
    """Loading resolves each symbol that the compiler calls, and needs no processor of that kind."""
    with settings(march=march):
        library = mps_simulator.metal.Library(HEADER + CONVERSIONS)
    assert sorted(library.functions) == ["convert_bfloat", "convert_half"]


@instruction_set
@pytest.mark.parametrize("name", TYPES)
def test_values_are_rounded_to_nearest(march: str, name: str) -> None:
    if lacking := FEATURES[march] - processor():
        pytest.skip(f"this processor cannot run {march}: it lacks {', '.join(sorted(lacking))}")
    dtype = TYPES[name]
    x = torch.cat([torch.randn(200), torch.logspace(-45, 38, 56)])
    with settings(march=march):
        pipeline = mps_simulator.metal.Library(HEADER + CONVERSIONS).pipeline(f"convert_{name}")
    narrow, chosen = (torch.zeros(256, dtype=dtype, device="mps") for _ in range(2))
    wide, whole = torch.zeros(256, device="mps"), torch.zeros(256, dtype=torch.int32, device="mps")
    vectors = torch.zeros(256, 4, dtype=dtype, device="mps")
    dispatch(pipeline, [narrow, wide, whole, chosen, vectors, x.to("mps")], threads=64, grid=256)
    zero = torch.zeros((), dtype=dtype)
    assert torch.equal(narrow.cpu(), x.to(dtype))
    assert torch.equal(wide.cpu(), x.to(dtype).float())
    assert torch.equal(whole.cpu(), torch.arange(256).to(dtype).int())
    assert torch.equal(chosen.cpu(), torch.where(x > 0.5, x.to(dtype), zero))
    doubled = (2 * x).to(dtype)
    assert torch.equal(vectors.cpu(), torch.where(x > 0.5, doubled + doubled, zero)[:, None].expand(256, 4))


def test_another_instruction_set_compiles_anew() -> None:
    """The cache keeps the programs apart, and each setting finds its own again."""
    source = (
        f"{HEADER}kernel void widen(device float* y [[buffer(0)]], device const half* x [[buffer(1)]]) {{ *y = *x; }}"
    )
    for _ in range(2):
        assert mps_simulator.metal.Library(source).functions == ["widen"]
        with settings(march="no-such-processor"), pytest.raises(RuntimeError, match="CPU 'no-such-processor'"):
            mps_simulator.metal.Library(source)


# ---- the functions that the engine exports ---------------------------------------------------------------------------

BFLOAT, HALF = (7, 8), (10, 5)  # bits of the mantissa and of the exponent
CALLED = {
    "__truncsfhf2": (HALF, "f"),
    "__truncdfhf2": (HALF, "d"),
    "__truncsfbf2": (BFLOAT, "f"),
    "__truncdfbf2": (BFLOAT, "d"),
}


def bits_of_result(name: str, argument: type) -> Callable[[float], int]:
    """Returns a function of clang's run-time library. A register holds its result, of which ctypes reads 64 bits."""
    function = getattr(ctypes.CDLL(None), name)
    function.argtypes, function.restype = [argument], ctypes.c_double
    return lambda x: int.from_bytes(struct.pack("<d", function(x)), "little")


def value(bits: int, kind: tuple[int, int]) -> float:
    """Returns the number of a 16-bit pattern, and the next power of two for infinity."""
    mantissa, exponent = kind
    bias = (1 << (exponent - 1)) - 1
    field, fraction = bits >> mantissa, bits & ((1 << mantissa) - 1)
    return float((fraction + (field > 0) * 2.0**mantissa) * 2.0 ** (max(field, 1) - bias - mantissa))


@pytest.mark.parametrize("name", CALLED)
def test_each_number_and_each_boundary_is_rounded_right(name: str) -> None:
    """Between two neighbours, numbers go to the nearer one, and the middle to the even one. Infinity is a neighbour."""
    kind, letter = CALLED[name]
    narrow = bits_of_result(name, ctypes.c_float if letter == "f" else ctypes.c_double)
    infinity = ((1 << kind[1]) - 1) << kind[0]
    for bits in [*range(0, infinity, 7), *range(0x10), *range(infinity - 0x10, infinity)]:
        low, high = value(bits, kind), value(bits + 1, kind)
        middle = np.dtype(letter).type((low + high) / 2)
        even = bits + (bits & 1)
        sides = {np.nextafter(middle, -np.inf): bits, middle: even, np.nextafter(middle, np.inf): bits + 1}
        for x, expected in {np.dtype(letter).type(low): bits, **sides}.items():
            assert narrow(float(x)) & 0xFFFF == expected, (bits, x)
            assert narrow(-float(x)) & 0xFFFF == expected | 0x8000, (bits, -x)
    assert narrow(float("inf")) & 0xFFFF == infinity and narrow(float("nan")) & 0x7FFF > infinity


def test_each_half_is_widened() -> None:
    widen = ctypes.CDLL(None)["__extendhfsf2"]
    widen.argtypes, widen.restype = [ctypes.c_double], ctypes.c_float
    result = [widen(struct.unpack("<d", struct.pack("<HHHH", bits, 0, 0, 0))[0]) for bits in range(0x10000)]
    expected = np.arange(0x10000, dtype=np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(np.array(result, dtype=np.float32), expected)


def test_a_nan_stays_one() -> None:
    """The bits of a signalling NaN that a 16-bit type drops may not leave infinity behind."""
    function = ctypes.CDLL(None)["__truncsfbf2"]
    function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double  # a double carries all bits
    for bits in (0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF):
        result = struct.pack("<d", function(struct.unpack("<d", struct.pack("<II", bits, 0))[0]))
        assert int.from_bytes(result[:2], "little") == (bits >> 16) | 0x40
