"""Our shaders through the strict front end: what models call for here, every variant in `make proof`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from proof.checks import Silent
from proof.metal import caps as strict_caps
from proof.metal import front_end as strict_front_end
from proof.metal import kernels as strict_kernels
from proof.metal.facts import Facts
from proof.metal.launches import model_launches
from tests.proof.needs import needs_clang
from torch_gdn._recorder import KernelVariant

pytestmark = [needs_clang, pytest.mark.xdist_group("strict")]


# The most that a variant of each kernel takes, of those that models call for: bytes of threadgroup memory, bytes of
# arrays and fragments a thread, registers a thread and passes of the banks (the last two by the model).
MOST = {
    "aura_decode": (1024, 32, 48, 1),
    "aura_encode": (2752, 160, 99, 2),
    "aura_flash_p1": (10336, 120, 104, 1),
    "aura_flash_p1_matrix": (18496, 312, 172, 2),
    "aura_flash_p2": (0, 16, 48, 1),
    "aura_paged_attention": (18752, 184, 228, 2),
    "aura_rotate": (0, 16, 39, 1),
    "causal_conv1d": (0, 128, 135, 1),
    "causal_conv1d_channel_first": (8576, 32, 98, 1),
    "causal_conv1d_state": (0, 0, 57, 1),
    "causal_conv1d_update": (0, 16, 88, 1),
    "chunk_fwd_h": (16896, 344, 174, 2),
    "chunk_fwd_intra": (27392, 496, 196, 4),
    "chunk_fwd_o": (27904, 168, 116, 2),
    "chunk_local_cumsum": (0, 0, 57, 1),
    "chunk_scaled_dot_kkt": (9216, 96, 79, 2),
    "fused_chunk_gated_delta_rule": (18688, 304, 224, 4),
    "fused_recurrent_gated_delta_rule": (18592, 296, 179, 1),
    "gdn_gating": (0, 0, 52, 1),
    "l2norm": (0, 32, 31, 1),
    "locate_slots": (0, 0, 38, 1),
    "paged_attention_decode": (6400, 184, 158, 1),
    "paged_attention_merge": (0, 16, 52, 1),
    "paged_attention_prefill": (9216, 184, 196, 2),
    "paged_rotate": (0, 16, 41, 1),
    "recompute_w_u": (18944, 96, 100, 4),
    "reshape_and_cache": (0, 0, 51, 1),
    "rms_norm_gated": (0, 64, 66, 1),
    "solve_tril": (9216, 120, 79, 4),
}


@pytest.fixture(scope="module")
def outcome() -> strict_kernels.Outcome:
    wanted = [launch.variant for launch in model_launches()]
    return strict_kernels.check_variants(wanted, Silent())


def test_what_models_call_for_keeps_every_rule(outcome: strict_kernels.Outcome) -> None:
    assert outcome.problems == []
    assert {facts.name for facts in outcome.facts} == {launch.variant.name for launch in model_launches()}
    assert strict_kernels.not_seen([launch.variant for launch in model_launches()], outcome) == []


def test_the_host_binds_what_the_kernels_take(outcome: strict_kernels.Outcome) -> None:
    assert strict_kernels.unlike_the_host(model_launches(), outcome.facts) == []


def test_kernels_take_what_they_took(outcome: strict_kernels.Outcome) -> None:
    kernels = {launch.variant.name: launch.variant.kernel for launch in model_launches()}
    found: dict[str, tuple[int, int, int, int]] = {}
    for facts in outcome.facts:
        taken = (facts.threadgroup_bytes, facts.thread_bytes, facts.registers, facts.bank_passes)
        before = found.get(kernels[facts.name], taken)
        found[kernels[facts.name]] = (
            max(taken[0], before[0]),
            max(taken[1], before[1]),
            max(taken[2], before[2]),
            max(taken[3], before[3]),
        )
    assert found == MOST


def test_no_variant_is_above_its_kernels_cap(outcome: strict_kernels.Outcome) -> None:
    kernels = {launch.variant.name: launch.variant.kernel for launch in model_launches()}
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
    assert strict_kernels.unlaunched_shaders() == ["gdn/added.metal is launched by no call of torch_gdn/check/calls.py"]


SOLVE_TRIL = KernelVariant("solve_tril", "gdn/solve_tril.metal", ("64",))
Spoil = Callable[[str, str, str], list[str]]


@pytest.fixture
def spoil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """The problems of solve_tril_64 when one text was put for another in one of its files."""

    def check(file: str, old: str, new: str) -> list[str]:
        shaders = shutil.copytree(strict_front_end.SHADERS, tmp_path / "shaders")
        text = (shaders / file).read_text()
        assert old in text, f"{file} has no {old!r} any more"
        (shaders / file).write_text(text.replace(old, new, 1))
        monkeypatch.setattr(strict_front_end, "SHADERS", shaders)
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
    found = spoil(SOLVE, COLUMN_LOOP, COLUMN_LOOP.replace("UNROLL ", ""))
    assert found and all("indexed by a value that is not known when it is compiled" in each for each in found)


def test_an_array_over_the_kernels_cap_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shaders = shutil.copytree(strict_front_end.SHADERS, tmp_path / "shaders")
    (shaders / SOLVE).write_text((shaders / SOLVE).read_text().replace("float x[8];", "float x[80];", 1))
    monkeypatch.setattr(strict_front_end, "SHADERS", shaders)
    outcome = strict_kernels.check_batch([SOLVE_TRIL])
    assert outcome.problems == []  # below what Metal allows
    found = strict_caps.over_cap(outcome.facts, {SOLVE_TRIL.name: SOLVE_TRIL.kernel}, strict_caps.recorded())
    assert [problem.split(", the cap")[0] for problem in found] == [
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
    found = spoil(SOLVE, "float x[8];", new)
    assert any(words in problem for problem in found), found


def test_a_pointer_into_the_wrong_memory_is_found(spoil: Spoil) -> None:
    found = spoil(SOLVE, "threadgroup float* block", "device float* block")
    assert "cannot initialize a variable of type 'device float *thread' with an rvalue" in found[0]


def test_an_unused_variable_is_found(spoil: Spoil) -> None:
    (problem,) = spoil(SOLVE, "  float2 result[", "  const int unused = 1;\n  float2 result[")
    assert "unused variable 'unused'" in problem


def test_a_variant_that_its_shader_refuses_is_found() -> None:
    refused = KernelVariant("solve_tril", "gdn/solve_tril.metal", ("63",))
    problems = strict_kernels.check_batch([refused]).problems
    assert "a chunk has 16, 32 or 64 tokens" in problems[0]
