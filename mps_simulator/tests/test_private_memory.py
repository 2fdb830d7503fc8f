"""Tests faults in private memory and in a program's constants, which are in registers and never reach the watch."""

from __future__ import annotations

import pytest
import torch

import mps_simulator
from metal_programs import run
from mps_simulator import settings
from twins import THREAD, N, Twin, both_tests, each, ramp, thread, unwritten


def indices(*last: int) -> torch.Tensor:
    """Returns [N] of int32: 0, 1, 2, 3, 0, ... that end with `last`."""
    values = torch.arange(N, dtype=torch.int32) % 4
    if last:
        values[-len(last) :] = torch.tensor(last, dtype=torch.int32)
    return values.to("mps")


def kernel(body: str, functions: str = "") -> str:
    """Returns a kernel in which `body` computes out[i] from source[i], at[i] and COUNT: 8, or 9 in a faulty twin."""
    return f"""
#define COUNT @
{functions}
kernel void private_memory(device const float* source [[buffer(0)]], device const int* at [[buffer(1)]],
                           device float* out [[buffer(2)]], uint i [[thread_position_in_grid]]) {{
  {body}
}}
"""


def twin(name: str, source: str, *words: str, last: int | None = None) -> Twin:
    """Returns a twin that copies its source. `last` is the last thread's index, if only that thread is at fault."""
    result = [*words, THREAD if last is None else thread(63)]
    last_index = [] if last is None else [last]
    return Twin(name, source, ("9", "8"), result, arguments=lambda: [ramp(), indices(*last_index), unwritten()])


FILL = "float x[8]; for (int n = 0; n < 8; ++n) x[n] = source[i];"
OVERRUNS = [
    twin(
        "a register array's overrun",
        kernel("float x[8]; for (int n = 0; n < COUNT; ++n) x[n] = source[i]; out[i] = x[3];"),
        r"index 8 is out of bounds of float\[8\] at program_source:\d+:\d+",
    ),
    twin(
        "a write past a register array through a pointer",
        kernel(
            "float x[8]; fill(x, source[i]); out[i] = x[3];",
            "METAL_FUNC void fill(thread float* x, float value) { for (int n = 0; n < COUNT; ++n) x[n] = value; }",
        ),
        r"out of bounds (write|use) of a float in a private variable",
    ),
    twin(
        "a read past a register array through a pointer",
        kernel(
            f"{FILL} out[i] = sum(x) / COUNT;",
            "METAL_FUNC float sum(thread const float* x) { float s = 0; for (int n = 0; n < COUNT; ++n) s += x[n];"
            " return s; }",
        ),
        r"out of bounds (read|use) of a float in a private variable",
    ),
    twin(
        "an index past a row of a threadgroup array",
        kernel("threadgroup float x[64][8]; x[i][0] = 0; x[i][3] = source[i]; x[i][COUNT - 1] = 0; out[i] = x[i][3];"),
        r"index 8 is out of bounds of float\[8\]",
    ),
    twin(
        "a pointer that is moved past a long register array",
        kernel(
            """
            float x[400];
            for (int n = 0; n < 400; ++n) x[n] = source[i] + n;
            thread const float* p = x;
            float last = 0;
            for (int n = 0; n < 392 + COUNT; ++n) last = *p++ - n;
            out[i] = last;
            """
        ),
        r"out of bounds access to a private variable",
    ),
]
RUN_TIME = [
    twin(
        "an index of a register array",
        kernel(f"{FILL} out[i] = x[at[i]];"),
        r"index 8 is out of bounds of float\[8\] at program_source",
        last=8,
    ),
    twin(
        "a negative index of a register array",
        kernel(f"{FILL} out[i] = x[at[i]];"),
        r"index -1 is out of bounds of float\[8\]",
        last=-1,
    ),
    twin(
        "an index of a register array through a pointer",
        kernel(
            f"{FILL} out[i] = one(x, at[i]);",
            "METAL_FUNC float one(thread const float* x, int n) { return x[n]; }",
        ),
        r"out of bounds access to a private variable",
        last=8,
    ),
    twin(
        "an index past a constant table",
        kernel("out[i] = source[i] * table[at[i]];", "constant float table[4] = {1, 1, 1, 1};"),
        r"index 4 is out of bounds of float\[4\]",
        last=4,
    ),
    twin(
        "an index of a vector",
        kernel("float4 x = source[i]; out[i] = x[at[i]];"),
        r"index 4 is out of bounds of a vector of 4",
        last=4,
    ),
    twin(
        "an index of a matrix's elements",
        kernel(
            """
            simdgroup_float8x8 x = make_filled_simdgroup_matrix<float, 8, 8>(source[i]);
            out[i] = x.thread_elements()[at[i] == 2 ? 2 : at[i] & 1];
            """
        ).replace("at[i] == 2 ?", "i == 63 && at[i] == 2 ?"),
        r"index 2 is out of bounds of a vector of 2",
        last=2,
    ),
]


test_an_overrun_is_reported, test_its_mended_twin_passes_and_is_right = both_tests(OVERRUNS)


@each(RUN_TIME)
def test_an_index_that_only_the_run_knows_is_reported(twin: Twin, seed: int) -> None:
    twin.must_fault(seed)


@each(RUN_TIME)
def test_indices_within_bounds_pass_and_are_right(twin: Twin, seed: int) -> None:
    output = unwritten()
    with settings(seed=seed):
        run(twin.source(False), [ramp(), indices(), output])
    assert torch.equal(output.cpu(), torch.arange(N, dtype=torch.float32))


@pytest.mark.parametrize("watch", [True, False])
def test_private_memory_is_checked_without_the_watch_too(watch: bool) -> None:
    with (
        settings(watch=watch),
        pytest.raises(mps_simulator.Fault, match=r"kernel 'private_memory': .*thread \(0, 0, 0\)"),
    ):
        OVERRUNS[0].run(faulty=True)


UNWRITTEN = {
    "float": "float x; if (at[i] != 3) x = source[i];",
    "half": "half x; if (at[i] != 3) x = half(source[i]);",
    "bfloat": "bfloat x; if (at[i] != 3) x = bfloat(source[i]);",
    "float4": "float4 v; if (at[i] != 3) v = source[i]; float x = v.z;",
    "bfloat4": "bfloat4 v; if (at[i] != 3) v = bfloat4(float4(source[i])); bfloat x = v.z;",
    "array": "float v[6]; for (int n = 0; n < 6; ++n) if (at[i] != 3 || n != 5) v[n] = source[i]; float x = v[5];",
    "member": "struct { float a; half b[3]; } v; if (at[i] != 3) v.b[2] = half(source[i]); half x = v.b[2];",
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_a_private_variable_that_nothing_wrote_is_nan(name: str) -> None:
    output = unwritten()
    run(kernel(f"{UNWRITTEN[name]} out[i] = float(x);"), [ramp(), indices(), output])
    expected = torch.where(torch.arange(N) % 4 == 3, torch.nan, torch.arange(N, dtype=torch.float32))
    torch.testing.assert_close(output.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", ["max", "min", "fmax", "clamp", "simd_max"])
@pytest.mark.parametrize("name", ["float", "half"])
def test_a_maximum_of_a_variable_that_nothing_wrote_is_reported(name: str, function: str) -> None:
    arguments = {"clamp": "x, T(0), T(1)", "simd_max": "x"}.get(function, "x, T(0)")
    source = kernel(f"typedef {name} T; {UNWRITTEN[name]} out[i] = {function}({arguments});")
    with pytest.raises(mps_simulator.Fault, match=f"private variable that nothing has written; {THREAD}"):
        run(source, [ramp(), indices(), unwritten()])
