"""Tests which kernels' shaders changed, how many variants are taken, and that a fault is reported."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from evidence.proof.metal import changed as strict_changed
from evidence.proof.metal import front_end as strict_front_end
from evidence.proof.metal import launches as strict_launches
from evidence.tests.proof.needs import needs_clang
from torch_gdn._recorder import KernelVariant

pytestmark = pytest.mark.xdist_group("strict")

SHADERS = {str(path.relative_to(strict_front_end.SHADERS)) for path in strict_front_end.SHADERS.rglob("*.metal")}


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a repository with two commits on the main branch, the first with the shaders."""
    shutil.copytree(strict_front_end.SHADERS, tmp_path / "shaders")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message=shaders")
    (tmp_path / "readme").write_text("words\n")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message=words")
    monkeypatch.setattr(strict_changed, "CHECKOUT", tmp_path)
    return tmp_path


def append(path: Path) -> None:
    path.write_text(path.read_text() + "// changed\n")


def test_on_the_main_branch_the_last_commit_counts(repository: Path) -> None:
    assert strict_changed.default_base() == git(repository, "rev-parse", "HEAD~1")


def test_on_a_branch_the_merge_base_counts(repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    git(repository, "switch", "--quiet", "--create", "branch")
    for number in range(2):
        (repository / "readme").write_text(f"{number}\n")
        git(repository, "commit", "--quiet", "--all", "--message=more")
    assert strict_changed.default_base() == base


def test_one_commit_has_none_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message=first")
    monkeypatch.setattr(strict_changed, "CHECKOUT", tmp_path)
    assert strict_changed.default_base() is None
    assert strict_changed.what_changed(None, SHADERS)[0] is None


def test_a_shader_counts_before_it_is_committed(repository: Path) -> None:
    append(repository / "shaders" / "layers" / "l2norm.metal")
    assert strict_changed.what_changed("HEAD", SHADERS)[0] == {"layers/l2norm.metal"}


def test_a_header_counts_for_all_that_include_it(repository: Path) -> None:
    append(repository / "shaders" / "gdn" / "triangle.h")
    result, why = strict_changed.what_changed("HEAD", SHADERS)
    names = (
        "chunk_bwd_prepare",
        "chunk_fwd_intra",
        "chunk_fwd_o",
        "chunk_scaled_dot_kkt",
        "recompute_w_u",
        "solve_tril",
    )
    assert result == {"kda/kda_chunk_fwd_intra.metal", *(f"gdn/{name}.metal" for name in names)}
    assert why == f"since HEAD 7 of {len(SHADERS)} kernels changed"


def test_a_header_of_a_header_counts_too() -> None:
    assert "core/parameters.h" in strict_changed.included("gdn/chunk_fwd_o.metal")


def test_a_change_of_the_front_end_takes_a_sample(repository: Path) -> None:
    (repository / "evidence" / "proof" / "metal").mkdir(parents=True)
    (repository / "evidence" / "proof" / "metal" / "rules.py").write_text("")
    assert strict_changed.what_changed("HEAD", SHADERS)[0] is None


def test_a_commit_that_is_not_there_takes_a_sample(repository: Path) -> None:
    assert strict_changed.what_changed("0" * 40, SHADERS)[0] is None


def variants(kernel: str, count: int) -> list[KernelVariant]:
    return [KernelVariant(kernel, f"{kernel}.metal", (str(number),)) for number in range(count)]


def test_what_is_taken_has_a_limit_and_every_kernel() -> None:
    groups = {"large": variants("large", 2000), "small": variants("small", 3), "other": variants("other", 50)}
    taken = strict_changed.selection(groups, {"large.metal", "small.metal"})
    assert list(taken) == ["large", "small"]
    assert len(taken["small"]) == 3
    assert strict_changed.MOST - 10 <= len(taken["large"]) <= strict_changed.MOST
    assert strict_changed.selection(groups, {"other.metal"}) == {"other": groups["other"]}
    assert {kernel: len(sample) for kernel, sample in strict_changed.selection(groups, None).items()} == {
        "large": strict_changed.SAMPLE,
        "small": 3,
        "other": strict_changed.SAMPLE,
    }


def test_a_sample_is_spread_and_has_no_variant_twice() -> None:
    numbers = [int(each.arguments[0]) for each in strict_changed.evenly(variants("kernel", 100), 4)]
    assert numbers == [24, 49, 74, 99]


@pytest.mark.parametrize(("shaders", "recorded"), [(set(), []), (None, ["model"]), ({"gdn/solve_tril.metal"}, ["all"])])
def test_launches_are_recorded_as_far_as_they_are_taken(
    shaders: set[str] | None, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording all takes a minute, and most commits change no shader."""
    seen: list[str] = []
    for name in ("model", "all"):
        monkeypatch.setattr(strict_launches, f"{name}_launches", lambda name=name: seen.append(name) or [])
    monkeypatch.setattr(strict_changed, "what_changed", lambda base, known: (shaders, "why"))
    assert strict_changed.main([]) == 0 and seen == recorded


@needs_clang
@pytest.mark.parametrize("fault", [False, True])
def test_the_command_reports_a_fault_and_what_was_chosen(
    fault: bool, shaders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shaders / "gdn" / "solve_tril.metal"
    if fault:
        file.write_text(file.read_text().replace("const int64_t row_stride", "const int row_stride"))
    monkeypatch.setattr(strict_launches, "all_launches", strict_launches.model_launches)
    monkeypatch.setattr(strict_changed, "what_changed", lambda base, known: ({"gdn/solve_tril.metal"}, "one changed"))
    assert strict_changed.main([]) == int(fault)
    out = capsys.readouterr().out
    assert "Strict Metal: one changed" in out
    assert "  solve_tril: 3 of 3 variants chosen" in out or "  solve_tril: 1 of 1 variants chosen" in out
    assert "  l2norm: 0 of " in out
    assert ("WRONG: gdn/solve_tril.metal" in out) == fault
