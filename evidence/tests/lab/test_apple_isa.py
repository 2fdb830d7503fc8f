"""Tests Metal as C++ for OpenCL, address spaces, rules, figures and their recorded table, without Apple's compiler."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from evidence.lab.agx import calibration, checks, compiler, rules, spaces, table
from evidence.lab.agx.dialect import opencl
from evidence.proof.checks import Check, Finding, Result, Silent
from evidence.proof.checks import run as run_checks
from evidence.proof.reasons import Unavailable
from evidence.tests.proof.needs import needs_clang

PROGRAM = """\
template <typename T, int K>
[[kernel]] void probe(
    constant Block& block [[buffer(1)]],
    device const T* x [[buffer(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tile[K];
}
"""
SMALL = compiler.Figures(32, 1024, 0, 0, 0, 200, 150, 90, 40, 1, 9000, 100, 200, 300, 400, 500)
LARGE = compiler.Figures(128, 384, 64, 12, 20, 3000, 2500, 900, 512, 9, 0, 150, 1100, 700, 20, 800)


def test_a_kernel_template_becomes_an_entry_point() -> None:
    text = opencl(PROGRAM, "probe", ["float", "16"], 64)
    assert "__attribute__((reqd_work_group_size(64, 1, 1))) __kernel void probe_float_16(" in text
    assert "probe_float_16(__global void* __restrict b0, __global void* __restrict constant_b1) {" in text
    assert "typedef float T; constexpr int K = 16;" in text
    assert "constant Block& block = *(constant Block*)constant_b1;" in text
    assert "device const T* x = (device const T*)b0;" in text
    assert "const uint lane = get_sub_group_local_id();" in text
    assert "template" not in text and "[[" not in text
    assert text.count("threadgroup float tile[K];") == 1


def test_the_size_of_the_grid_is_an_argument() -> None:
    text = opencl(
        PROGRAM.replace("threadgroup_position_in_grid", "threadgroups_per_grid"), "probe", ["float", "16"], 64
    )
    assert "uint groups_0, uint groups_1, uint groups_2) {" in text
    assert "uint groups_0" not in opencl(PROGRAM, "probe", ["float", "16"], 64)


def test_a_position_without_counterpart_is_refused() -> None:
    program = PROGRAM.replace("thread_index_in_simdgroup", "amplification_id")
    with pytest.raises(ValueError, match=r"probe: \[\[amplification_id\]\] has no counterpart"):
        opencl(program, "probe", ["float", "16"], 64)


def test_generic_pointers_take_the_space_of_what_they_point_to() -> None:
    code = """\
define spir_kernel void @probe(ptr addrspace(1) %b0, ptr addrspace(1) %constant_b1) {
  %g = addrspacecast ptr addrspace(1) %b0 to ptr addrspace(4)
  %e = getelementptr inbounds float, ptr addrspace(4) %g, i64 3
  %v = load float, ptr addrspace(4) %e, align 4
  %t = getelementptr i8, ptr addrspace(4) addrspacecast (ptr addrspace(3) @tile to ptr addrspace(4)), i64 4
  store float %v, ptr addrspace(4) %t, align 4
  store i8 0, ptr addrspace(4) getelementptr inbounds (i8, \
ptr addrspace(4) addrspacecast (ptr addrspace(3) @tile to ptr addrspace(4)), i64 4), align 4
  %c = getelementptr inbounds i8, ptr addrspace(1) %constant_b1, i64 8
  %n = load i32, ptr addrspace(1) %c, align 4
}"""
    lines = [line.strip() for line in spaces.resolved(code).splitlines()]
    assert lines[0] == "define spir_kernel void @probe(ptr addrspace(1) %b0, ptr addrspace(2) %constant_b1) {"
    assert lines[1] == "%g = getelementptr i8, ptr addrspace(1) %b0, i64 0"
    assert lines[3] == "%v = load float, ptr addrspace(1) %e, align 4"
    assert lines[4] == "%t = getelementptr i8, ptr addrspace(3) @tile, i64 4"
    assert lines[5] == "store float %v, ptr addrspace(3) %t, align 4"
    assert (
        lines[6] == "store i8 0, ptr addrspace(3) getelementptr inbounds (i8, ptr addrspace(3) @tile, i64 4), align 4"
    )
    assert lines[8] == "%n = load i32, ptr addrspace(2) %c, align 4"


def test_constants_that_meet_device_memory_go_through_an_integer() -> None:
    code = """\
define spir_kernel void @probe(ptr addrspace(1) %b0, ptr addrspace(1) %constant_b1, i1 %which) {
  %c = getelementptr i8, ptr addrspace(1) %constant_b1, i64 8
  %d = getelementptr i8, ptr addrspace(1) %b0, i64 0
  %p = select i1 %which, ptr addrspace(1) %c, ptr addrspace(1) %d
  %v = load i32, ptr addrspace(1) %p, align 4
}"""
    text = spaces.resolved(code)
    assert "%c.c = getelementptr i8, ptr addrspace(2) %constant_b1, i64 8" in text
    assert "%c = inttoptr i64 %c.i to ptr addrspace(1)" in text
    assert "%v = load i32, ptr addrspace(1) %p" in text


def test_code_says_opencl_2_and_copies_name_their_spaces() -> None:
    code = """\
!opencl.ocl.version = !{!3}
!opencl.cxx.version = !{!4}
!3 = !{i32 3, i32 0}
  call void @llvm.memcpy.p4.p4.i64(ptr addrspace(3) %t, ptr addrspace(1) %s, i64 16, i1 false)
  call void @llvm.memcpy.p4.p4.i64(ptr addrspace(3) getelementptr (i8, ptr addrspace(3) @t, i64 5), \
ptr %p, i64 3, i1 false)"""
    text = spaces.resolved(code)
    assert "!3 = !{i32 2, i32 0}" in text and "cxx" not in text
    assert "call void @llvm.memcpy.p3.p1.i64(ptr addrspace(3) %t, ptr addrspace(1) %s" in text
    assert "declare void @llvm.memcpy.p3.p1.i64(ptr addrspace(3), ptr addrspace(1), i64, i1)" in text
    assert "@llvm.memcpy.p3.p0.i64(ptr addrspace(3) getelementptr (i8, ptr addrspace(3) @t, i64 5), ptr %p" in text


@pytest.mark.parametrize("operation", ["sdiv", "udiv", "srem", "urem", "sdiv exact"])
def test_a_division_of_64_bits_is_a_problem(operation: str) -> None:
    assert rules.optimised_problems(f"  %q = {operation} i32 %a, %b") == []
    assert rules.optimised_problems(f"  %q = {operation} i64 %a, 1024") == []
    assert len(rules.optimised_problems(f"  %q = {operation} i64 %a, 1023")) == 1
    (problem,) = rules.optimised_problems(f"  %q = {operation} i64 %a, %b")
    assert problem == f"1 divisions of 64 bits ({operation.split()[0]})"


def test_an_array_left_in_memory_is_a_problem() -> None:
    (problem,) = rules.optimised_problems("  %window = alloca [4 x float], align 4\n  %v = load float, ptr %window")
    assert problem == "%window is left in memory: [4 x float]"


def test_an_element_of_a_vector_in_memory_loaded_alone_is_a_problem() -> None:
    whole = "  %v = load <4 x float>, ptr addrspace(1) %x, align 16\n"
    field = '  %y = getelementptr inbounds %"struct.metal::vec.3", ptr addrspace(1) %x, i32 0, i32 1\n'
    assert rules.source_problems(whole + field) == []  # taking an address is no load
    load = "  %e = load float, ptr addrspace(1) %y, align 4\n"
    assert rules.source_problems(field + load) == ["a device vector's element is loaded alone, as float"]


def test_figures_are_those_of_the_compilers_line() -> None:
    line = "SHADER-DB: MESA_SHADER_KERNEL shader: 1565 inst, 1350 alu, 1300 fscib, 900 ic, 9000 code, 73 regs, "
    line += "54 uniforms, 16 scratch, 1024 threads, 2 loops, 3:5 spills:fills"
    figures = compiler.read_figures(f"\nblock0 {{\n   r1 = mov_imm #0\n   stop\n}}\n{line}\n")
    assert figures == compiler.Figures(37, 1024, 16, 3, 5, 1565, 1300, 900, 54, 2, 200, 0, 0, 0, 0, 0)
    with pytest.raises(compiler.Failed, match="no SHADER-DB line"):
        compiler.read_figures("block0 {\n}\n")
    with pytest.raises(compiler.Failed, match="figures of another form"):
        compiler.read_figures(line.replace("fscib", "cycles"))


def test_the_table_is_read_as_it_was_written() -> None:
    result = {"a_1": {"O2": SMALL, "lean": LARGE}, "b_2": {"O2": "agx_validate_ra: invalid", "lean": SMALL}}
    assert table.read(table.text("clang 19", result)) == ("clang 19", result)
    with pytest.raises(ValueError, match="expected the columns"):
        table.read("# clang 19\nkernel\tregisters\n")


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("name", table.NAMES)
def test_a_figure_that_changes_in_either_direction_is_named(name: str, by: int) -> None:
    value = getattr(LARGE, name)
    before = {"a_1": {"O2": LARGE, "lean": LARGE}}
    after = {"a_1": {"O2": replace(LARGE, **{name: value + by}), "lean": LARGE}}
    assert table.changed(before, before) == []
    assert table.changed(before, after) == [f"a_1: O2 {name.replace('_', ' ')} {value} -> {value + by}"]


def test_variants_that_come_and_go_and_fail_are_named() -> None:
    before: table.Table = {"a": {"O2": SMALL, "lean": SMALL}, "b": {"O2": SMALL, "lean": SMALL}}
    after: table.Table = {"b": {"O2": "no registers", "lean": SMALL}, "c": {"O2": SMALL, "lean": SMALL}}
    new, gone, failing = table.changed(before, after)
    assert new == "c: isa.tsv has no such variant" and gone == "a: is recorded, but no longer launched"
    assert failing.startswith("b: O2 Figures(") and failing.endswith("-> no registers")


def test_a_spill_is_believed_where_every_pipeline_has_it() -> None:
    result: table.Table = {
        "both": {"O2": LARGE, "lean": LARGE},
        "one": {"O2": LARGE, "lean": SMALL},
        "compiled in one": {"O2": LARGE, "lean": "failed"},
    }
    assert table.spilling(result) == ["both", "compiled in one"]


def _result(finding: Finding, write: bool) -> Result:
    (result,) = run_checks([Check("apple-isa", "", lambda progress: finding)], Silent(), write)
    return result


def test_a_changed_figure_fails_until_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TABLE", tmp_path / "isa.tsv")
    before = compiler.Compiled("a_1", {"O2": SMALL, "lean": SMALL}, {}, [])
    after = compiler.Compiled("a_1", {"O2": SMALL, "lean": LARGE}, {}, [])
    assert _result(checks.finding_of([before], "clang 19"), write=True).word == "pass"
    assert _result(checks.finding_of([before], "clang 19"), write=False).word == "pass"
    changed = checks.finding_of([after], "clang 19")
    assert any("not as recorded: a_1: lean registers 32 -> 128" in note for note in changed.notes)
    assert _result(changed, write=False).word == "1 wrong"
    assert _result(checks.finding_of([after], "clang 19"), write=True).word == "pass"
    assert _result(checks.finding_of([after], "clang 20"), write=False).word == "1 wrong"


def test_a_broken_rule_fails_and_a_failure_of_mesas_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TABLE", tmp_path / "isa.tsv")
    compiled = compiler.Compiled("a_1", {"O2": SMALL}, {"lean": "no registers"}, ["an array is left"])
    finding = checks.finding_of([compiled], "clang 19")
    assert finding.problems == ["a_1: an array is left"]
    assert "a_1: Mesa fails: lean no registers" in finding.notes


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (0, "no compiler: debootstrap is missing: apt-get install debootstrap"),
        (1000, "no compiler: a chroot needs root, or sudo without a password"),
    ],
)
def test_without_a_compiler_the_check_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, words: str
) -> None:
    monkeypatch.setenv("TORCH_GDN_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler.os, "geteuid", lambda: user)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    for cached in (compiler.root, compiler.as_root):
        cached.cache_clear()
    try:
        with pytest.raises(Unavailable, match=words):
            compiler.root()
    finally:
        for cached in (compiler.root, compiler.as_root):
            cached.cache_clear()


def test_calibration_counts_tiers_and_fails_where_every_pipeline_is_far() -> None:
    kernel = "kernel_mul_mat_q2_K_f32"  # Apple's compiler has 640
    assert calibration.tiers_apart(kernel, 640) == 0
    assert calibration.tiers_apart(kernel, 704) == 1 and calibration.tiers_apart(kernel, 576) == -1
    assert calibration.problems_of({kernel: {"O2": 384, "lean": 576}}) == []
    (problem,) = calibration.problems_of({kernel: {"O2": 384, "lean": 512}})
    assert problem == f"{kernel}: O2 384, lean 512, Apple's compiler 640: more than 1 tiers apart"
    assert len(calibration.problems_of({kernel: {}})) == 1


def test_calibration_takes_one_kernel_of_a_program() -> None:
    program = "float f();\nkernel void a(device float* x) { { } }\nkernel void b(device float* x) { x[0] = 1; }\n"
    program += "kernel void b(device float* x) { x[0] = 2; }\ntemplate <typename type4x4>\nvoid g();\n"
    assert calibration.alone(program, "b").split("\n") == [
        "float f();",
        "",
        "kernel void b(device float* x) { x[0] = 1; }",
        "",
        "",
    ]


COPIED = """\
#include <metal_stdlib>
using namespace metal;
__kernel void probe(__global void* in, __global void* out) {
  const vec<ELEMENT, 4> v = ((device const vec<ELEMENT, 4>*)in)[0];
  ((device float*)out)[0] = float(v.INDEX);
}
"""


@needs_clang
@pytest.mark.parametrize("element", ["float", "bfloat"])
@pytest.mark.parametrize("index", ["x", "y", "z", "w"])
def test_each_element_of_a_vector_is_its_own_in_the_shim(element: str, index: str) -> None:
    """If one is taken for another, the rest of a kernel disappears from its machine code."""
    shim = str(compiler.HERE / "shim")
    command = [shim if each == "shim" else each for each in compiler.FRONT]
    where = command.index("-disable-llvm-passes")
    command[where - 1 : where + 1] = []  # optimised code shows plainly which element it takes
    source = COPIED.replace("ELEMENT", element).replace("INDEX", index)
    code = subprocess.run([*command, "-o", "-", "-"], input=source, capture_output=True, text=True, check=True).stdout
    offsets = re.findall(r"getelementptr inbounds i8, ptr addrspace\(\d\) %[\w.]+, i64 (\d+)", code) or ["0"]
    assert offsets == [str("xyzw".index(index) * (4 if element == "float" else 2))]
