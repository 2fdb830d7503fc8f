"""Tests the second machine's parts that need no GPU: the CUDA text, the recorded launches, the sanitizer's words."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import torch_gdn
from evidence.lab.cuda import (
    compiling,
    conflicts,
    dialect,
    page,
    peers,
    peers_experts,
    peers_linear,
    replay,
    running,
    sanitizer,
)
from evidence.lab.cuda.peers_linear import FUNCTIONS
from evidence.lab.cuda.record import (
    Binding,
    CaseRecord,
    Fill,
    LaunchRecord,
    Output,
    Reader,
    Writer,
    allowed,
    error,
    exact_numbers,
    numbers,
    packed_exact,
    runs_of,
    shortened,
)
from evidence.proof.dialects import find_kernel, without_comments
from evidence.proof.metal.front_end import shader_text
from evidence.tests.proof.needs import needs_simulated_device
from tests.helpers.devices import ready
from tests.helpers.shaders import shaders_of_ops
from torch_gdn_check.registry import REGISTRY

KERNELS = shaders_of_ops()
HEAD = """\
template <typename T, int D>
[[kernel]] void scaled(
    device T* y [[buffer(2)]],
    device const T* x [[buffer(0)]],
    constant Scale& scale [[buffer(1)]],
    uint lane [[thread_index_in_simdgroup]]) {
  alignas(16) threadgroup float tile[D];
  threadgroup const float* first = tile;
}
"""


@pytest.mark.parametrize("file", KERNELS)
def test_no_word_of_metals_is_left(file: str) -> None:
    text = without_comments(shader_text(file))
    cuda = dialect.translated(text)
    assert cuda.count("\n") == text.count("\n")
    code = re.sub(r'"[^"\n]*"', '""', cuda)
    assert re.findall(r"\b(?:device|threadgroup|thread|constant)\b[^\n]*|\[\[[^\n]*|clang[^\n]*|\buint3\(", code) == []
    arrays = re.findall(r"\bthreadgroup [\w<>:, ]+ \w+(?:\[[^;]*\])?;", text)
    assert cuda.count("__shared__ ") == len(arrays)


def test_threadgroup_arrays_keep_their_alignment() -> None:
    cuda = dialect.translated(HEAD)
    assert "__shared__ __align__(16) float tile[D];" in cuda and "  const float* first = tile;" in cuda


def test_the_entry_binds_by_index_and_calls_in_order() -> None:
    entry = dialect.entry("scaled_half_8", find_kernel(HEAD, "scaled"), ["half", "8"], 128)
    assert "scaled_half_8(void* __restrict__ b0, const __grid_constant__ Scale b1, void* __restrict__ b2)" in entry
    call = "called(metal::BoundBuffer{b2}, metal::BoundBuffer{b0}, b1, threadIdx.x % 32u);"
    assert "called = &scaled<half, 8>;" in entry and call in entry and "__launch_bounds__(128, 4)" in entry


def test_an_attribute_that_is_not_known_is_an_error() -> None:
    text = HEAD.replace("thread_index_in_simdgroup", "thread_position_in_grid")
    with pytest.raises(dialect.UnknownMetal, match=r"scaled: lane: expected .*, got thread_position_in_grid"):
        dialect.cuda_source(text, "scaled_half_8", "scaled", ["half", "8"], 128)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is missing: pip's nvidia-cuda-nvcc has it")
@pytest.mark.parametrize(
    ("file", "arguments"),
    [
        ("gdn/solve_tril.metal", ["16"]),
        ("aura/aura_flash_p2.metal", ["bfloat", "80"]),
        ("aura/aura_paged_attention.metal", ["4", "4", "64", "2"]),  # these leave arguments to their defaults
    ],
)
def test_nvcc_takes_a_kernel(tmp_path: Path, file: str, arguments: list[str]) -> None:
    kernel = Path(file).stem
    source = dialect.cuda_source(shader_text(file), kernel, kernel, arguments, 128)
    assert compiling.compile_cuda(source, tmp_path / "kernel.cubin", "sm_90") == ""
    wrong = source.replace("METAL_FUNC", "METAL_FUNK", 1)
    assert "error" in compiling.compile_cuda(wrong, tmp_path / "kernel.cubin", "sm_90")


# ---- records ---------------------------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "record.zip")
    block, content = writer.keep(b"parameters"), writer.keep(bytes(range(6)))
    launch = LaunchRecord(
        "l2norm",
        "layers/l2norm.metal",
        ["half", "8"],
        [3, 2, 1],
        128,
        [Binding(0, 4), Binding(block=block), Binding(is_error_log=True), Binding()],
    )
    output = Output("y", 1, 2, "half", [2, 2], [3, 1], content, 1e-4)
    case = CaseRecord("a case", [16, 32], [launch, launch], [Fill(0, 0, [[2, 6], [8, 10]], content)], [output], 7)
    writer.add(case)
    writer.close()
    reader = Reader(tmp_path / "record.zip")
    assert reader.cases == [case] and launch.name == "l2norm_half_8"
    assert reader.content(block) == b"parameters" and reader.content(content) == bytes(range(6))
    assert list(reader.launches()) == [launch]


def test_runs_of_bytes() -> None:
    assert runs_of(np.array([1, 1, 0, 0, 1, 0, 1], np.uint8)) == [[0, 2], [4, 5], [6, 7]]
    assert runs_of(np.zeros(3, np.uint8)) == []


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bfloat"), (torch.float16, "half"), (torch.float32, "float")]
)
def test_numbers_of_a_strided_output(dtype: torch.dtype, name: str) -> None:
    whole = torch.randn(40).to(dtype)
    part = whole.as_strided((3, 4), (10, 2), 5)
    size = whole.element_size()
    output = Output("y", 0, 5 * size, name, [3, 4], [10, 2], "", 0.0)
    result = numbers(whole.view(torch.uint8).numpy(), output)
    np.testing.assert_array_equal(result, part.double().numpy())


@pytest.mark.parametrize(("dtype", "lost"), [("bfloat", 1e-6), ("float", 4e-9), ("int32", 0.0)])
def test_exact_numbers_come_back_as_near_as_they_are_kept(dtype: str, lost: float) -> None:
    exact = np.array([[0.0, -1 / 3, np.inf], [1e-300, 1e20, 7.0]])
    exact = exact if dtype != "int32" else np.array([[0, -5, 2**31 - 1], [1, 2, 3]], np.int32)
    kept = shortened(exact, dtype)
    back = exact_numbers(packed_exact(kept), Output("y", 0, 0, dtype, [2, 3], [3, 1], "", 0.0))
    np.testing.assert_array_equal(back, kept)
    np.testing.assert_allclose(back, exact, rtol=lost, atol=0)


def test_errors() -> None:
    exact = np.array([3.0, 4.0])
    assert error(exact, exact) == 0 and error(np.zeros(2), exact) == 1
    assert error(np.array([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert error(np.array([3.0, np.nan]), exact) == float("inf") == error(np.zeros(3), exact)
    assert error(np.array([1, 2, 3, 5]), np.array([1, 2, 3, 4])) == 0.25
    assert allowed(Output("y", 0, 0, "bfloat", [], [], "", 2e-3)) < 2.6e-3


@needs_simulated_device
def test_a_call_is_recorded_with_what_its_buffers_held(tmp_path: Path) -> None:
    device = ready("mps")
    from evidence.lab.cuda.trace import Trace

    x = torch.randn(5, 64)
    moved = torch.full((400,), 9.0, device=device)[16:336].view(5, 64).copy_(x)
    writer = Writer(tmp_path / "record.zip")
    trace = Trace("two norms", writer)

    def twice() -> torch.Tensor:
        torch_gdn.l2norm(moved)
        moved.mul_(2.0)  # contents, not launches, record the work that PyTorch does in between
        return torch_gdn.l2norm(moved)

    y = trace.call(twice)
    exact = torch.nn.functional.normalize(x.double() * 2, dim=-1)
    trace.add_outputs({"y": y}, {"y": exact})
    writer.add(trace.case)
    writer.close()
    (case,) = Reader(tmp_path / "record.zip").cases
    first, second = case.launches
    assert first.name == second.name == "l2norm_float_64" and first.threadgroups == [2, 1, 1] and first.threads == 128
    source, target, _, block = first.bindings
    assert (
        source.offset == 64 and case.buffers[source.buffer] == 1600 and block.block and target.buffer != source.buffer
    )
    inputs = [fill for fill in case.fills if fill.buffer == source.buffer]
    assert [(fill.before, fill.runs) for fill in inputs] == [(0, [[0, 1600]]), (1, [[0, 1600]])]
    held = [np.frombuffer(Reader(tmp_path / "record.zip").content(fill.content), np.float32)[16:336] for fill in inputs]
    np.testing.assert_array_equal(held[0], x.flatten().numpy())
    np.testing.assert_array_equal(held[1], 2 * x.flatten().numpy())
    (before,) = (fill for fill in case.fills if fill.buffer == target.buffer and fill.before == 0)
    assert before.runs == []  # no recorded launch had written the output
    assert 0 < case.outputs[0].error < 3e-7


@needs_simulated_device
def test_a_wrong_result_is_not_recorded(tmp_path: Path) -> None:
    device = ready("mps")
    from evidence.lab.cuda.trace import Trace

    trace = Trace("a norm", Writer(tmp_path / "record.zip"))
    y = trace.call(lambda: torch_gdn.l2norm(torch.ones(3, 64, device=device)))
    with pytest.raises(ValueError, match="a norm: y: expected an error below"):
        trace.add_outputs({"y": y}, {"y": torch.ones(3, 64)})


# ---- compute-sanitizer, the check, the page --------------------------------------------------------------------------

RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kernel+0x70 in gdn/solve_tril.metal:39
=========     and Read access at kernel+0x90 in gdn/triangle.h:91 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
MEMORY = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at solve_tril_64+0x50 in gdn/solve_tril.metal:47
=========     by thread (127,0,0) in block (0,0,0)
=========     Address 0x7f12a is out of bounds
========= Invalid __global__ write of size 4 bytes
=========     at solve_tril_64+0x50 in gdn/solve_tril.metal:47
========= ERROR SUMMARY: 2 errors
"""


def test_what_the_sanitizer_says() -> None:
    clean = sanitizer.parsed("synccheck", "========= COMPUTE-SANITIZER\n0 errors\n========= ERROR SUMMARY: 0 errors\n")
    assert clean == sanitizer.Verdict("synccheck", 0, ())
    memory = sanitizer.parsed("memcheck", MEMORY)
    assert memory.errors == 2
    assert memory.places == ("Invalid __global__ write of size 4 bytes, gdn/solve_tril.metal:47, 2 times",)
    race = sanitizer.parsed("racecheck", RACE)
    assert race.errors == 1 and "gdn/solve_tril.metal:39" in race.places[0]
    with pytest.raises(ValueError, match="racecheck: expected a summary"):
        sanitizer.parsed("racecheck", RACE.split("========= RACECHECK")[0])


def test_parts_of_a_tools_work_are_one_verdict() -> None:
    parts = [sanitizer.Verdict("memcheck", 2, ("a write", "a read")), sanitizer.Verdict("memcheck", 1, ("a write",))]
    assert sanitizer.merged(parts) == sanitizer.Verdict("memcheck", 3, ("a write", "a read"))


COUNTERS = """\
==PROF== Disconnected
"ID","Kernel Name","{0}ld.sum","{0}st.sum","{1}ld.sum","{1}st.sum"
"","","","","",""
"0","solve_tril_64","10","0","20","10"
"1","solve_tril_64","1,000","30","4,000","60"
"2","l2norm","0","0","0","0"
""".format("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_")


def test_what_nsight_compute_counts() -> None:
    largest = conflicts.Conflicts("solve_tril_64", 0.25, 0.5)
    assert conflicts.parsed(COUNTERS) == [largest, conflicts.Conflicts("l2norm", 0.0, 0.0)]
    with pytest.raises(conflicts.NoCounters, match="expected counters, got 'no permission'"):
        conflicts.parsed("no permission")


def test_cases_for_counters_have_each_kernel_once() -> None:
    def case(name: str, *arguments: str, **marks: Any) -> CaseRecord:
        return CaseRecord(name, launches=[LaunchRecord(name[0], "", [*arguments], [], 0, [])], **marks)

    cases = [case("a wrong one", "half", is_wrong=True), case("a 1", "half"), case("a 2", "half"), case("a 3", "float")]
    cases += [case("b", floor_bytes=5), case("b 1"), case("b 2")]
    assert [each.name for each in conflicts.first_of_each_kernel(cases)] == ["a 1", "a 3", "b 1"]


THEIRS = """\
template <typename InT, int Dk, int Dv, int Hk, int Hv, int Ckpt>
[[kernel]] void gated_delta_seq(
    const device InT* q [[buffer(0)]],
    device float* cache [[buffer(9), function_constant(save_state)]],
    constant int& T [[buffer(8)]],
    uint3 at [[thread_position_in_grid]]) {
  threadgroup float tile[4];
}
template <typename InT>
[[kernel]] void another() {
}
"""


def test_a_peers_kernel_alone_is_taken_from_its_header() -> None:
    source = peers.mlx_source(THEIRS)
    assert "METAL_FUNC void gated_delta_seq(" in source and "another" not in source
    assert "__shared__ float tile[4];" in source and "[[" not in source.replace("[[kernel]]", "[[")
    assert "float* cache,\n" in source and "gated_delta_seq<InputFloat, 128, 128, 16, 32, 16>(" in source
    with pytest.raises(peers.NotInstalled, match="expected a kernel gated_delta_seq"):
        peers.mlx_source("")


def test_the_functions_of_linear_layers_alone_are_taken_from_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    function = "template <int bits>\n{} {}(const device float* x, const constant int& n) {{\n  return x[n];\n}}\n"
    own = [function.format("inline float" if "_impl" not in name else "METAL_FUNC void", name) for name in FUNCTIONS]
    other = function.format("inline float", "another")
    monkeypatch.setattr(peers_linear, "mlx_header", lambda name: "".join([*own, other]))
    source = peers_linear.source()
    assert "another" not in source and "METAL_FUNC float qdot(const float* x, const int& n)" in source
    assert "qmv_wide_impl<InputFloat, 64, 4, 4, 8>(" in source and "qmv_fast_impl<InputFloat, 64, 4>(" in source
    assert peers_experts.source().endswith(peers_experts.ENTRY)
    monkeypatch.setattr(peers_linear, "mlx_header", lambda name: "".join(own[1:]))
    with pytest.raises(peers.NotInstalled, match=f"expected a function {FUNCTIONS[0]}"):
        peers_linear.source()


@needs_simulated_device
def test_a_wrong_call_is_recorded_without_being_run(tmp_path: Path) -> None:
    ready("mps")
    from evidence.lab.cuda import hostile

    (each,) = (each for each in hostile.hostile() if each.entry.name == "aura_encode_")
    writer = Writer(tmp_path / "record.zip")
    hostile.record(each, writer)
    writer.close()
    torch.mps.synchronize()  # no error was reported
    (case,) = Reader(tmp_path / "record.zip").cases
    assert case.is_wrong and case.name == "hostile aura_encode_: slots [0, 8, 2, 2147483646, 4]"
    contents = [np.frombuffer(Reader(tmp_path / "record.zip").content(fill.content), np.uint8) for fill in case.fills]
    slots = torch.tensor(each.wrong).numpy().tobytes()
    assert any(content.tobytes() == slots for content in contents)


@needs_simulated_device
@pytest.mark.parametrize("op", [op for op, entry in REGISTRY.items() if entry.hostile])
def test_a_wrong_call_is_reported_by_the_simulated_device(op: str) -> None:
    ready("mps")
    from evidence.lab.cuda import hostile

    for each in (each for each in hostile.hostile() if each.entry.name == op):
        with pytest.raises(Exception, match="expected"):
            each.run(each.call())
            torch.mps.synchronize()


@pytest.mark.parametrize(("counts", "problems"), [([1, 3], 0), ([1, 0], 1), ([0, 0], 2)])
def test_a_wrong_call_must_be_reported_whatever_memory_held(counts: list[int], problems: int) -> None:
    class Reporting:
        ran: ClassVar[list[Any]] = []

        def run(self, case: CaseRecord, pattern: int) -> None:
            self.ran.append(pattern)

        def reports(self) -> int:
            return counts[len(self.ran) - 1]

    Reporting.ran.clear()
    result = replay.unreported(Reporting(), CaseRecord("wrong"))  # type: ignore[arg-type]
    assert result == ["wrong: no kernel reports it"] * problems and tuple(Reporting.ran) == replay.PATTERNS


def test_without_a_gpu_the_check_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from evidence.proof import __main__ as command

    monkeypatch.setattr(running, "missing", lambda: "no NVIDIA GPU: made up")
    assert command.main(["--only", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "cuda was skipped: no NVIDIA GPU: made up" in out


def test_the_page_has_every_number() -> None:
    value = {"case": "solve_tril 64", "output": "A_inv", "error": 3.25e-7, "recorded": 1.5e-7, "bound": 1e-6}
    timed = {"case": "decode [V, K] B 8", "microseconds": 7.44, "floor": 3.72, "kernels": {}}
    result = {"gpu": "GPU", "versions": "CUDA 1", "kernels": 3, "variants": 5, "cases": 7, "values": [value]}
    result |= {"wrong_calls": 2, "left_out": ["no ncu here"], "peer_versions": ["mlx 1.2"]}
    result["peers"] = [
        {"peer": peer, "case": "decode [V, K] B 8", "microseconds": us} for peer, us in (("MLX", 9.0), ("FLA", 8.0))
    ]
    result |= {"times": [timed], "copy_rate": 4.2e12, "sanitizers": [{"tool": "memcheck", "errors": 0, "places": []}]}
    text = page.text(result)
    assert "3 kernels in 5 variants gave the values below, in 7 cases, on one GPU (CUDA 1)." in text
    assert "| `solve_tril` | 1 | 3.25e-07 | 1.50e-07 |" in text and "`memcheck`: none." in text
    assert "| decode [V, K] B 8 | 7.4 | 3.7 | 2.00 | - |" in text and "4.20 TB/s" in text
    assert "| decode [V, K] B 8 | 7.4 | MLX 9.0, FLA 8.0 | 0.93 |" in text  # 7.44 / 8.0
    assert "(mlx 1.2)" in text and "2 of the cases are wrong calls" in text and "Not measured: no ncu here." in text
    assert "No error exceeds the simulated device's by more than a quarter" in text
    assert "1e-6: `A_inv` of `solve_tril 64`, 3.2e-06 (there 1.5e-07)" in page.text(
        result | {"values": [value | {"error": 3.2e-6}]}
    )
    sanitizer = {"tool": "memcheck", "errors": 2, "places": ["a", "b"]}
    assert "| `memcheck` | 2 | a; b |" in page.text(result | {"sanitizers": [sanitizer]})
    shares = [
        {"kernel": "solve_tril_64", "loads": 0.35, "stores": 0.59},
        {"kernel": "aura_flash_p1_matrix_8_4_64", "loads": 0.2, "stores": 0.0},
        {"kernel": "aura_flash_p1_matrix_8_2_80", "loads": 0.1, "stores": 0.3},
        {"kernel": "l2norm", "loads": 0.04, "stores": 0.0},
    ]
    text = page.text(result | {"conflicts": shares})
    assert "| `solve_tril_64` | 35% | 59% | not known |" in text and "l2norm" not in text
    assert "| `aura_flash_p1_matrix_8` | 20% | 30% | quarters, halves, data |" in text  # the worst
    assert "4 kernel variants were" in text
