"""Runs our shaders through the strict front end: here a sample of the kernels, in `make proof` every variant."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from evidence.proof.checks import Silent
from evidence.proof.metal import caps as strict_caps
from evidence.proof.metal import front_end as strict_front_end
from evidence.proof.metal import kernels as strict_kernels
from evidence.proof.metal.facts import Facts
from evidence.proof.metal.launches import model_launches, probe_launches
from evidence.tests.proof.needs import needs_clang
from tests.sweeps import share_of
from torch_gdn import _C
from torch_gdn._recorder import KernelVariant, Launch

pytestmark = [needs_clang, pytest.mark.xdist_group("strict")]


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    """Returns the models' launches for one kernel in sixteen."""
    kernels = sorted({launch.variant.kernel for launch in model_launches()})
    kept = set(share_of(kernels, 16))
    return [launch for launch in model_launches() if launch.variant.kernel in kept]


@pytest.fixture(scope="module")
def outcome(launches: list[Launch]) -> strict_kernels.Outcome:
    return strict_kernels.check_variants([launch.variant for launch in launches], Silent())


@pytest.mark.sweep(1, seeds=4)
def test_what_models_call_for_keeps_every_rule(launches: list[Launch], outcome: strict_kernels.Outcome) -> None:
    assert outcome.problems == []
    assert {facts.name for facts in outcome.facts} == {launch.variant.name for launch in launches}
    assert strict_kernels.not_seen([launch.variant for launch in launches], outcome) == []


@pytest.mark.sweep(1)
def test_the_host_binds_what_the_kernels_take(launches: list[Launch], outcome: strict_kernels.Outcome) -> None:
    assert strict_kernels.unlike_the_host(launches, outcome.facts) == []


def test_the_checks_probes_keep_every_rule_and_bind_what_they_take() -> None:
    outcome = strict_kernels.check_variants([launch.variant for launch in probe_launches()], Silent())
    assert outcome.problems == []
    assert strict_kernels.unlike_the_host(probe_launches(), outcome.facts) == []


def test_a_compiler_of_cplusplus_14_does_not_warn_of_if_constexpr() -> None:
    """Metal 3.1 is C++14, so Apple's compiler, which is clang, would warn in every variant."""
    program = "void f() { if constexpr (true) {} }\n"
    host = _C.shader_source("l2norm", "layers/l2norm.metal", ["float", "64"])
    head = host[: host.index("#line")]
    command = [strict_front_end.CLANG, "-x", "c++", "-std=c++14", "-fsyntax-only", "-"]
    warned = [
        "extension" in subprocess.run(command, input=text, text=True, capture_output=True, check=True).stderr
        for text in (program, head + program)
    ]
    assert warned == [True, False]


@pytest.mark.sweep(1)
def test_kernels_take_what_they_took(launches: list[Launch], outcome: strict_kernels.Outcome) -> None:
    kernels = {launch.variant.name: launch.variant.kernel for launch in launches}
    result = strict_caps.by_kernel(outcome.facts, kernels, in_models=kernels)
    recorded = {kernel: caps.in_models for kernel, caps in strict_caps.recorded().items() if kernel in result}
    assert {kernel: caps.in_models for kernel, caps in result.items() if kernel in recorded} == recorded


@pytest.mark.sweep(1)
def test_no_variant_is_above_its_kernels_cap(launches: list[Launch], outcome: strict_kernels.Outcome) -> None:
    kernels = {launch.variant.name: launch.variant.kernel for launch in launches}
    assert strict_caps.over_cap(outcome.facts, kernels, strict_caps.recorded()) == []


def test_the_table_has_a_row_for_each_variant(
    outcome: strict_kernels.Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict_kernels, "TABLE", tmp_path / "build" / "kernel_variants.tsv")
    strict_kernels.write_table(outcome.facts)
    header, *rows = strict_kernels.TABLE.read_text().splitlines()
    assert header.split("\t") == list(Facts.COLUMNS)
    assert [tuple(row.split("\t")) for row in rows] == [facts.row() for facts in outcome.facts]


def test_a_shader_that_no_call_launches_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert strict_kernels.unlaunched_shaders() == []
    shaders = shutil.copytree(strict_kernels.SHADERS, tmp_path / "shaders")
    (shaders / "gdn" / "added.metal").write_text("")
    monkeypatch.setattr(strict_kernels, "SHADERS", shaders)
    assert strict_kernels.unlaunched_shaders() == [
        "gdn/added.metal is launched by no entry of check/torch_gdn_check/registry"
    ]


SOLVE_TRIL = KernelVariant("solve_tril", "gdn/solve_tril.metal", ("64",))
Spoil = Callable[[str, str, str], list[str]]


@pytest.fixture
def spoil(shaders: Path) -> Spoil:
    """Returns the problems of solve_tril_64 after one text in one of its files is replaced by another."""

    def check(file: str, old: str, new: str) -> list[str]:
        text = (shaders / file).read_text()
        assert old in text, f"{file} has no {old!r} any more"
        (shaders / file).write_text(text.replace(old, new, 1))
        return strict_kernels.check_batch([SOLVE_TRIL]).problems

    return check


SOLVE = "gdn/triangle.h"
COLUMN_LOOP = "    UNROLL for (int i = 0; i < 8; ++i) {\n"


def test_a_barrier_moved_under_a_condition_is_found(spoil: Spoil) -> None:
    (problem,) = spoil(SOLVE, COLUMN_LOOP, "    threadgroup_barrier(mem_flags::mem_threadgroup);\n" + COLUMN_LOOP)
    assert "gdn/triangle.h:" in problem and "threadgroup_barrier under a condition that differs" in problem


def test_a_simdgroup_operation_for_some_lanes_is_found(spoil: Spoil) -> None:
    (problem,) = spoil("core/fragment.h", "  simdgroup_multiply_acc", "  if (a.x > 0.0f) simdgroup_multiply_acc")
    assert "core/fragment.h:" in problem
    assert "simdgroup_multiply_accumulate under a condition that differs between lanes" in problem


def test_a_loop_that_lost_its_unrolling_is_found(spoil: Spoil) -> None:
    result = spoil(SOLVE, COLUMN_LOOP, COLUMN_LOOP.replace("UNROLL ", ""))
    assert result and all("indexed by a value that is not known when it is compiled" in each for each in result)


def test_an_array_over_the_kernels_cap_is_found(shaders: Path) -> None:
    kernels = {SOLVE_TRIL.name: SOLVE_TRIL.kernel}
    caps = strict_caps.by_kernel(strict_kernels.check_batch([SOLVE_TRIL]).facts, kernels, in_models=kernels)
    (shaders / SOLVE).write_text((shaders / SOLVE).read_text().replace("float x[8];", "float x[80];", 1))
    outcome = strict_kernels.check_batch([SOLVE_TRIL])
    assert outcome.problems == []  # fewer than Metal allows
    result = strict_caps.over_cap(outcome.facts, kernels, caps)
    assert [problem.split(", the cap")[0] for problem in result] == [
        f"solve_tril_64: {outcome.facts[0].thread_bytes} thread bytes",
        f"solve_tril_64: {outcome.facts[0].registers} registers",
    ]


def test_an_array_over_the_limit_is_found(spoil: Spoil) -> None:
    (problem,) = spoil(SOLVE, "float x[8];", "float x[160];")
    assert problem.startswith("solve_tril_64: ") and problem.endswith("arrays and fragments a thread, the limit is 512")


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("double x[8];", "'double' is not supported in Metal"),
        ("auto zero = []() { return 0.0f; };\n  float x[8] = {zero()};", "lambda expressions are not supported"),
        ("static float x[8];", "static"),
        ("if (thread_index > 40) return;\n  float x[8];", "after the return at gdn/triangle.h:"),
    ],
    ids=["double", "lambda", "static", "return"],
)
def test_what_metal_has_not_is_found(spoil: Spoil, new: str, words: str) -> None:
    result = spoil(SOLVE, "float x[8];", new)
    assert any(words in problem for problem in result), result


def test_a_pointer_into_the_wrong_memory_is_found(spoil: Spoil) -> None:
    result = spoil(SOLVE, "threadgroup float* block", "device float* block")
    assert "cannot initialize a variable of type 'device float *thread' with an rvalue" in result[0]


def test_an_unused_variable_is_found(spoil: Spoil) -> None:
    (problem,) = spoil(SOLVE, "  float2 result[", "  const int unused = 1;\n  float2 result[")
    assert "unused variable 'unused'" in problem


def test_a_variant_that_its_shader_refuses_is_found() -> None:
    refused = KernelVariant("solve_tril", "gdn/solve_tril.metal", ("63",))
    problems = strict_kernels.check_batch([refused]).problems
    assert "a chunk has 16, 32 or 64 tokens" in problems[0]
