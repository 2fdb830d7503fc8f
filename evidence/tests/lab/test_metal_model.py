"""Tests evidence.lab.studies.metal_model with bounds of made-up counts, computed by hand, and with a workload on the
simulated device.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.metal_workloads import WORKLOADS, Shape
from bench.shapes import Layer
from evidence.lab.agx import issue
from evidence.lab.agx.compiler import Figures
from evidence.lab.studies import metal_model
from evidence.lab.studies.metal_model import CHIPS, Chip, Code, predict
from evidence.tests.proof.needs import needs_clang
from tests.helpers.devices import on_a_mac
from torch_gdn._recorder import KernelVariant

NORM = "layers/rms_norm_gated.metal"
CHIP = Chip(7, 8, 100.0, 2.048, "made up: 1 GHz, 8 cores of 128 lanes")


def figures(**counts: Any) -> Any:
    """Returns figures of one dispatch of 64 threadgroups of 128 threads, which only do `counts`."""
    names = ["bank_cycles", "barriers", "collectives", "load_rounds", "matrix_multiplies", "threadgroup_memory"]
    names += ["device_accesses", "threadgroup_accesses"]
    names += [f"device_bytes_{kind}_{way}" for kind in ("issued", "distinct") for way in ("read", "written")]
    nothing = dict.fromkeys(names, 0)
    return SimpleNamespace(
        **{**nothing, "dispatches": 1, "threadgroups": 64, "threads": 64 * 128, "operations_issued": {}, **counts}
    )


@pytest.mark.parametrize(
    ("counts", "binds", "seconds"),
    [
        # the memory moves 100 GB/s
        ({"device_bytes_distinct_read": 30_000, "device_bytes_distinct_written": 20_000}, "memory", 0.5e-6),
        # each of 8 cores takes 32 bytes per nanosecond
        ({"device_bytes_issued_read": 200_000, "device_bytes_issued_written": 56_000}, "cache", 1e-6),
        # 8 cores have 128 lanes each; matrix products use the equivalent of 102 lanes
        ({"operations_issued": {"fma": 1_024_000}}, "arithmetic", 1e-6),
        ({"operations_issued": {"fma": 512_000, "exp": 128_000, "integer": 9_000_000}}, "arithmetic", 1e-6),
        ({"matrix_multiplies": 1632, "collectives": 1632}, "arithmetic", 1.024e-6),
        ({"bank_cycles": 8_000}, "threadgroup", 1e-6),
        # one simdgroup can use a quarter of a core
        ({"threadgroups": 1, "threads": 32, "operations_issued": {"fma": 32_000}}, "latency", 1e-6),
        # each core runs its 8 groups at once: 100 barriers of 20 cycles
        ({"barriers": 6_400}, "latency", 2e-6),
        # a group has 4 simdgroups: 10 rounds of loads of 200 cycles
        ({"load_rounds": 64 * 4 * 10}, "latency", 2e-6),
    ],
)
def test_each_bound_by_hand(counts: dict[str, Any], binds: str, seconds: float) -> None:
    prediction = predict(figures(**counts), CHIP)
    assert prediction.binds == binds
    assert prediction.seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("counts", "price"),
    [
        # there are 32,000 instructions; each of 8 cores starts four per nanosecond
        ({}, {"start": 12_500}),  # 256 simdgroups start
        ({"operations_issued": {"fma": 256_000, "add": 128_000, "mul": 128_000, "integer": 9_000_000}}, {"float": 200}),
        ({"device_accesses": 3_200}, {"device": 1_000}),
        ({"threadgroup_accesses": 6_400}, {"threadgroup": 500}),
        ({"barriers": 640}, {"barrier": 1_250}),  # 4 simdgroups meet at each
        ({"matrix_multiplies": 320, "collectives": 320}, {"matrix": 10_000}),
    ],
    ids=lambda of: next(iter(of), "none"),
)
def test_instructions_by_hand(counts: dict[str, Any], price: dict[str, int]) -> None:
    code = Code(prices=dict.fromkeys(issue.KINDS, 0) | price)
    prediction = predict(figures(**counts), CHIP, code)
    assert prediction.binds == "issue"
    assert prediction.seconds == pytest.approx(1e-6, rel=1e-12)


def test_a_simdgroup_issues_an_instruction_a_cycle() -> None:
    alone = predict(figures(threadgroups=1, threads=32, barriers=10), CHIP, Code(prices={"start": 80_000}))
    assert alone.bounds["issue"] == pytest.approx(0.2e-6)
    assert alone.bounds["latency"] == pytest.approx(1e-6)  # 800 and 10 waits of 20 cycles


def test_the_busiest_core_decides() -> None:
    """With 9 threadgroups on 8 cores, one core has two of them. With one threadgroup, one core has all."""
    nine = predict(figures(threadgroups=9, threads=9 * 128, bank_cycles=9_000), CHIP)
    assert nine.seconds == pytest.approx(2e-6) and nine.cores == 8
    one = predict(figures(threadgroups=1, threads=128, bank_cycles=9_000), CHIP)
    assert one.seconds == pytest.approx(9e-6) and one.cores == 1


@pytest.mark.parametrize(
    ("counts", "registers", "threads", "seconds"),
    [
        ({}, 0, 8 * 128, 2e-6),
        ({"threadgroup_memory": 32_768}, 0, 128, 16e-6),  # a core runs one group at a time
        ({"threadgroup_memory": 16_384}, 0, 3 * 128, 6e-6),  # three groups at a time, so three rounds
        ({}, 208, 2 * 128, 8e-6),  # 208 KB hold 256 such threads
    ],
)
def test_what_a_core_holds_hides_latency(counts: dict[str, Any], registers: int, threads: int, seconds: float) -> None:
    prediction = predict(figures(barriers=6_400, **counts), CHIP, Code(registers))
    assert prediction.threads == threads
    assert prediction.bounds["latency"] == pytest.approx(seconds)


def test_dispatches_follow_each_other() -> None:
    """Two dispatches of one threadgroup each cannot share the chip."""
    two = predict(figures(dispatches=2, threadgroups=2, threads=256, bank_cycles=2_000, barriers=100), CHIP)
    assert two.bounds["threadgroup"] == pytest.approx(2e-6)
    assert two.bounds["latency"] == pytest.approx(2e-6)


FEW, MANY = (
    Figures(registers, 1024, 0, 0, 0, 200, 150, 90, 40, 1, *range(registers, registers + 6)) for registers in (40, 70)
)


@pytest.fixture
def no_code_known() -> Iterator[None]:
    metal_model.estimated_code.cache_clear()
    yield
    metal_model.estimated_code.cache_clear()


@pytest.mark.parametrize(
    ("of", "registers"),
    [
        ({"O2": MANY, "lean": FEW}, 40),
        ({"O2": FEW, "lean": MANY}, 70),
        ({"O2": MANY, "lean": "no registers left"}, 70),
    ],
)
def test_the_code_of_a_recorded_kernel_is_that_of_the_nearer_compiler(
    monkeypatch: pytest.MonkeyPatch, no_code_known: None, of: dict[str, Figures | str], registers: int
) -> None:
    monkeypatch.setattr(metal_model, "recorded_figures", lambda: {"probe_1": of})
    code = metal_model.estimated_code(KernelVariant("probe", "probe.metal", ("1",)))
    assert code == Code(registers, dict(zip(issue.KINDS, range(registers, registers + 6), strict=True)))


@needs_clang
def test_registers_of_other_kernels_are_those_of_the_strict_check(
    monkeypatch: pytest.MonkeyPatch, no_code_known: None
) -> None:
    monkeypatch.setattr(metal_model, "recorded_figures", dict)
    arguments = ("bfloat", "bfloat", "bfloat", "128", "4")
    assert metal_model.estimated_code(KernelVariant("rms_norm_gated", NORM, arguments)) == Code(48)


def test_a_kernel_whose_code_is_not_known_takes_no_registers() -> None:
    busy = figures(threadgroups=640, threads=640 * 1024, barriers=640)
    ours, unknown = metal_model.predict_all({"ours": busy, "torch's": busy}, {"ours": Code(52)}, CHIP)
    assert ours == predict(busy, CHIP, Code(52)) and unknown == predict(busy, CHIP)
    assert ours.threads < unknown.threads


def test_kernels_add_up_and_the_longest_part_binds() -> None:
    kernels = {"a": figures(bank_cycles=8_000), "b": figures(device_bytes_distinct_read=300_000)}
    seconds, binds = metal_model.total(kernels, {}, CHIP)
    assert seconds == pytest.approx(4e-6) and binds == "memory"


def test_chips_agree_with_each_other() -> None:
    """Clocks belong to a GPU family, a larger chip of a family has more of everything, and a name matches its chip."""
    for name, chip in CHIPS.items():
        assert 1.1e9 < chip.hertz < 1.9e9, name
        assert chip.sources, name
    for small, large in (("M1", "M1 Max"), ("M2", "M2 Pro"), ("M4", "M4 Max"), ("M5", "M5 Pro")):
        assert CHIPS[small].family == CHIPS[large].family
        assert CHIPS[small].bandwidth < CHIPS[large].bandwidth and CHIPS[small].cores < CHIPS[large].cores
    busy = figures(bank_cycles=8_000)
    assert predict(busy, "M1") == predict(busy, CHIPS["M1"])


@pytest.mark.skipif(on_a_mac(), reason="this machine has a Metal device of its own")
@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_are_counted(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import mps_simulator

    mps_simulator.activate()
    work = WORKLOADS[workload](Shape(Layer("small", 1, 2, 64, 64), 64, 1, torch.float32))
    with mps_simulator.profile(detailed=True) as profile:
        work.call()
    assert profile.kernels and not profile.fallbacks
    distinct = sum(k.device_bytes_distinct_read + k.device_bytes_distinct_written for k in profile.kernels.values())
    assert distinct >= 0.98 * work.compulsory_bytes  # the rest is what a convolution's first columns need not read
    seconds, _ = metal_model.total(profile.kernels, {}, "M1")
    assert seconds >= distinct / 68.2e9


@pytest.mark.skipif(on_a_mac(), reason="this machine has a Metal device of its own")
def test_the_program_prints_bounds_as_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    metal_model.main(["rms_norm_gated", "--tokens", "8", "--chips", "M1", "M4 Max"])
    text = capsys.readouterr().out
    assert "not a measurement" in text and "| M1 |" in text.replace("  ", " ") and "M4 Max" in text


LOADS = """
#include <metal_stdlib>
using namespace metal;
kernel void loads(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[32];
  FIRST
  float sum = 0.0f;
  for (int part = 0; part < 4; ++part) {
    tile[i] = VALUE;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += tile[31 - i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  y[i] = sum;
}
"""


@pytest.mark.skipif(on_a_mac(), reason="a real device does not count")
@pytest.mark.parametrize(
    ("first", "value", "rounds", "width"),
    [
        ("const float4 all = ((device const float4*)x)[i];", "all[part]", "1.00", "10.00"),  # reads 16 bytes, writes 4
        ("", "x[part * 32 + i]", "4.00", "4.00"),
    ],
    ids=["at once", "between barriers"],
)
def test_the_counts_show_narrow_loads_between_barriers(first: str, value: str, rounds: str, width: str) -> None:
    """Narrow loads made decoding with [K, V] states slow on another maker's GPU, and no other count had shown that."""
    import mps_simulator

    mps_simulator.activate()
    library = torch.mps.compile_shader(LOADS.replace("FIRST", first).replace("VALUE", value))
    with mps_simulator.profile(detailed=True) as profile:
        library.loads(torch.rand(128).to("mps"), torch.empty(32, device="mps"), threads=32, group_size=32)
    titles, _, row = (line.split(" | ") for line in metal_model.counts_table(profile.kernels, {}).splitlines()[-3:])
    shown = dict(zip(titles, row, strict=True))
    assert (shown["load rounds"], shown["bytes a lane's access"]) == (rounds, width)
