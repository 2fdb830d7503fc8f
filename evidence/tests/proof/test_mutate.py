"""Tests planting faults: the table fits the tree, and the tool distinguishes a fault that is found from one that is
not.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from evidence.proof.checks import Silent
from evidence.proof.mutate import forks, mutants, scratch
from evidence.proof.mutate.faults import CHECKOUT, KINDS, PARTS, Fault, all_faults, exists, sample
from evidence.proof.mutate.page import PAGE, RECORD, page_text, record_text, recorded
from evidence.proof.mutate.rates import RECORD as DRAWN
from evidence.proof.mutate.rates import Row, rates, read_record, with_verdicts
from evidence.proof.mutate.rates import record_text as drawn_text
from evidence.proof.mutate.runs import Run, run_all
from evidence.proof.mutate.scratch import Finished
from evidence.proof.mutate.trial import BROKEN, CAUGHT, FALSE, LATE, MISSED, NOT_RUN, State, Verdict, failed_test
from evidence.tests.proof.needs import needs_simulated_device

FAULTS = all_faults()
runs_tests = pytest.mark.sweep(1, seeds=2)  # each test runs tests in a separate process, which takes seconds


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_fits_the_tree(fault: Fault) -> None:
    source = (CHECKOUT / fault.file).read_text()
    assert fault.plant(source) != source
    assert fault.kind in KINDS
    assert fault.tests


def test_the_tests_that_find_a_fault_exist() -> None:
    named = {(fault.id, test) for fault in FAULTS for test in fault.tests}
    named |= {(fault, verdict.test) for fault, verdict in recorded(RECORD.read_text()).items()}
    named |= {(row.mutant, row.test) for row in read_record(DRAWN.read_text())}
    assert [each for each in sorted(named) if each[1] and not exists(each[1])] == []


def test_the_line_of_each_drawn_mutant_is_there() -> None:
    """`python -m evidence.proof.mutate.drawn 0 --write` finds lines that moved, and drops the rows of others."""
    rows = read_record(DRAWN.read_text())
    assert [row.mutant for row in rows if not (found := row.refit(CHECKOUT)) or found.file != row.file] == []


def test_a_row_follows_its_line(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, text in (("one.py", "x\ny  -> b\nz\ny  -> b\n"), ("two.py", "\n  v = 1\nw\n"), ("b.py", "w\ny  -> b\n")):
        (tmp_path / "a" / name).write_text(text)
    rows = [Row("1", f"python/a/one.py:9: {line} -> 0", CAUGHT, "") for line in ("y  -> b", "v = 1", "w", "u")]
    found = [row.refit(tmp_path) for row in rows]
    assert [row and row.mutant for row in found] == [
        "python/a/one.py:4: y  -> b -> 0", "python/a/two.py:2: v = 1 -> 0", None, None
    ]  # fmt: skip


def test_identifiers_are_different() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 60


def test_the_sample_has_every_part_and_as_many_kinds_as_it_can() -> None:
    taken = sample(FAULTS, 10)
    assert len(set(taken)) == 10
    assert {fault.part for fault in taken} == set(PARTS)
    assert len({fault.kind for fault in taken}) == 10
    assert {fault.kind for fault in sample(FAULTS, len(KINDS))} == set(KINDS)


def test_a_text_that_is_not_there_once_is_an_error() -> None:
    fault = Fault("doubled", "number", "cpu", "a.py", "x", "y", ())
    for source in ("", "x x"):
        with pytest.raises(ValueError, match="once"):
            fault.plant(source)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(forks, "MODULES", ("pytest",))  # these tests need no other module
    monkeypatch.setattr(forks, "OF_A_TEST", 2)
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    (root / "product.py").write_text("def product(a, b):\n    return a * b\n\n\ndef unused():\n    return 1\n")
    test = "from product import product\n\n\ndef test_zero():\n    assert product(0, 5) == 0\n\n\n"
    test += "def test_six():\n    assert product(2, 3) == 6\n"
    (root / "tests" / "test_product.py").write_text(test)
    (root / "tests" / "test_never.py").write_text("def test_never():\n    assert False\n")
    subprocess.run(["git", "init", "--quiet", root], check=True)
    return root


def planted(text: str, replacement: str, test: str = "tests/test_product.py") -> Fault:
    return Fault(f"{text} -> {replacement}", "number", "ops", "product.py", text, replacement, (test,))


def verdict_of(project: Path, fault: Fault) -> Verdict:
    return run_all([fault], Silent(), folder=project.parent / "mutate", checkout=project)[fault.id]


@runs_tests
def test_a_fault_that_a_test_sees_is_caught_by_it(project: Path) -> None:
    before = (project / "product.py").read_text()
    verdict = verdict_of(project, planted("a * b", "a + b"))
    assert (verdict.word, verdict.test) == (CAUGHT, "tests/test_product.py::test_zero")
    assert verdict.is_confirmed
    assert (project / "product.py").read_text() == before
    assert (project.parent / "mutate" / "tree" / "product.py").read_text() == before


@needs_simulated_device
def test_sources_that_the_simulated_device_cannot_build_are_no_catch(project: Path) -> None:
    from mps_simulator import BuildError

    name, module = BuildError.__qualname__, BuildError.__module__
    as_raised = f"raise type({name!r}, (RuntimeError,), {{'__module__': {module!r}}})('clang++')"
    assert verdict_of(project, planted("return a * b", as_raised)).word == BROKEN


@runs_tests
def test_the_test_that_sees_it_is_named(project: Path) -> None:
    assert verdict_of(project, planted("a * b", "0")).test == "tests/test_product.py::test_six"


def test_a_fault_that_no_test_sees_is_missed(project: Path) -> None:
    assert verdict_of(project, planted("return 1", "return 2")).word == MISSED


@runs_tests
def test_faults_at_the_same_time_do_not_meet(project: Path) -> None:
    faults = [planted("a * b", "a + b"), planted("a * b", "0"), planted("return 1", "return 2")]
    verdicts = run_all(faults, Silent(), jobs=3, folder=project.parent / "mutate", checkout=project)
    tests = ["tests/test_product.py::test_zero", "tests/test_product.py::test_six", ""]
    assert [verdicts[fault.id].test for fault in faults] == tests
    assert [verdicts[fault.id].word for fault in faults] == [CAUGHT, CAUGHT, MISSED]


@runs_tests
def test_a_test_that_always_fails_finds_nothing(project: Path) -> None:
    assert verdict_of(project, planted("return 1", "return 2", "tests/test_never.py")).word == FALSE


@runs_tests
def test_a_process_that_ends_by_itself_names_the_test_it_was_in(project: Path) -> None:
    verdict = verdict_of(project, planted("return a * b", "import os; os._exit(3)"))
    assert (verdict.word, verdict.test) == (CAUGHT, "tests/test_product.py::test_zero")


def test_tests_that_do_not_end_in_time_catch_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SECONDS", 3)
    verdict = verdict_of(project, planted("return a * b", "import time; time.sleep(60)"))
    assert (verdict.word, verdict.test) == (LATE, "")


def test_a_test_that_never_ends_is_a_catch(project: Path) -> None:
    verdict = verdict_of(project, planted("return a * b", "\n    while True: pass"))
    assert (verdict.word, verdict.test) == (CAUGHT, "tests/test_product.py::test_zero")
    assert "2 s of processors" in verdict.reason


def test_a_test_that_fails_without_the_fault_hides_no_other(project: Path) -> None:
    with (project / "tests" / "test_product.py").open("a") as tests:
        tests.write("\n\ndef test_zero_too():\n    assert product(0, 1) == 0\n")
    fault = replace(planted("a * b", "a + b"), tests=("tests/test_never.py", "tests/test_product.py::test_zero_too"))
    assert verdict_of(project, fault).test == "tests/test_product.py::test_zero_too"


SWEEP = """import os, pytest
from product import product
@pytest.mark.sweep(4)
@pytest.mark.parametrize("a", [0, 2] if os.environ["TORCH_GDN_SWEEPS"] == "all" else [0])
def test_sweep(a):
    assert product(a, 3) == 3 * a
@pytest.mark.parametrize("a", [0, 2])
def test_classes(a):
    assert product(a, 3) == 3 * a
"""


def test_sweeps_run_after_other_tests_and_with_every_case_where_a_sample_passes(project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\nmarkers = sweep")
    (project / "tests" / "test_sweep.py").write_text(SWEEP)
    file = "tests/test_sweep.py"
    assert verdict_of(project, planted("a * b", "0", file)).test == f"{file}::test_classes[2]"
    assert verdict_of(project, planted("a * b", "0 ", f"{file}::test_sweep")).test == f"{file}::test_sweep[2]"


CRASH = """import os
from product import unused
def test_crash():
    assert unused() != 4 or os._exit(3)
def test_unused():
    assert unused() < 3
"""


@runs_tests
def test_the_whole_suite_tries_together_what_passes(project: Path) -> None:
    """A fault is caught by each folder's tests although others fail, end the process, or replace the same line."""
    (project / "tests" / "more").mkdir()
    (project / "tests" / "more" / "test_more.py").write_text(CRASH)
    own = "tests/test_product.py::test_zero"
    faults = [planted("a * b", "a * b + 0", own), planted("a * b", "a * b * b", own)]
    faults += [planted("return 1", f"return {n}", own) for n in (2, 3, 4)]
    state = State(project.parent / "mutate" / "drawn.json", project)
    verdicts = Run(state, project.parent / "mutate", project, 1, "0", suite=True).judge(faults, {}, Silent())
    result = [(verdicts[fault.id].word, verdicts[fault.id].test.partition("::")[2]) for fault in faults]
    assert result == [
        (MISSED, ""), (CAUGHT, "test_six"), (MISSED, ""), (CAUGHT, "test_unused"), (CAUGHT, "test_crash")
    ]  # fmt: skip
    assert state.verdicts.keys() == {fault.id for fault in faults}


def test_mutants_of_a_feature_are_in_its_files() -> None:
    files = [file for source in mutants.SOURCES for file in mutants.files_of(source)]
    for words in mutants.FEATURES.values():
        assert all(any(word in file for file in files) for word in words)
    drawn = mutants.draw(3, "0", mutants.SOURCES, ["sglang"])
    assert len({fault.id for fault in drawn}) == 3
    assert all("sglang" in fault.file or "serving.py" in fault.file for fault in drawn)


@runs_tests
def test_a_verdict_is_kept_until_the_file_or_a_test_changes(project: Path) -> None:
    fault = planted("a * b", "0")
    first = verdict_of(project, fault)
    state = project.parent / "mutate" / "state.json"
    state.write_text(state.read_text().replace("test_six", "test_kept"))
    assert verdict_of(project, fault).test == "tests/test_product.py::test_kept"
    with (project / "tests" / "test_product.py").open("a") as tests:
        tests.write("\n\ndef test_one():\n    assert product(1, 1) == 1\n")
    assert verdict_of(project, fault).test == first.test


def test_a_build_that_a_fault_breaks_is_no_catch(project: Path) -> None:
    (project / "setup.py").write_text("import sys\nsys.exit(open('csrc/value.h').read() == 'two' and 'error: no')\n")
    (project / "csrc").mkdir()
    (project / "csrc" / "value.h").write_text("one")
    fault = Fault("two", "number", "ops", "csrc/value.h", "one", "two", ("tests/test_never.py",))
    verdict = verdict_of(project, fault)
    assert (verdict.word, verdict.reason.strip()) == (BROKEN, "error: no")


@pytest.mark.parametrize(
    ("line", "test", "reason"),
    [
        ("FAILED tests/a.py::test_b[x - y] - assert 1 - 2", "tests/a.py::test_b[x - y]", "assert 1 - 2"),
        ("ERROR tests/a.py::test_b[x - y]", "tests/a.py::test_b[x - y]", ""),
    ],
)
def test_a_failed_test_with_spaces_in_its_name(line: str, test: str, reason: str) -> None:
    finished = Finished(1, f"tests/a.py::test_b[x - y] FAILED  [ 50%]\n{line}\n")
    assert failed_test(finished, [test]) == (test, reason)


def test_a_crash_is_of_the_test_that_was_begun_last() -> None:
    name = "tests/a.py::test_b[8-4]"
    crash = f"{name} Fatal Python error: Segmentation fault\n\nThread 1:\n"
    assert failed_test(Finished(-11, crash), ["tests/a.py"])[0] == name
    assert failed_test(Finished(2, "collecting ... "), ["tests/a.py"])[0] == "tests/a.py"


def test_the_record_and_the_page_have_every_fault() -> None:
    result = recorded(RECORD.read_text())
    assert RECORD.read_text() == record_text(FAULTS, result)
    drawn = read_record(DRAWN.read_text())
    assert DRAWN.read_text() == drawn_text(drawn)
    assert PAGE.read_text() == page_text(FAULTS, result, drawn)


def test_the_record_and_the_page_say_what_is_missed() -> None:
    new, missed = planted("a", "b"), planted("c", "d")
    result = recorded(record_text([new, missed], {missed.id: Verdict(MISSED)}))
    assert result == {new.id: Verdict(NOT_RUN)} | {missed.id: Verdict(MISSED)}
    assert f"- {missed.id}: MISSED\n" in page_text([new, missed], result)


@runs_tests
@pytest.mark.parametrize("folder", ["shaders/layers", "torch_gdn/aura", "csrc/cpu/aura"])
def test_mutants_are_drawn(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed gives the same mutants each time. Each fits the tree, changes it, and has tests."""
    monkeypatch.setattr(mutants, "ops_of_shaders", dict)  # this takes longer than the rest
    (source,) = (replace(each, folder=folder) for each in mutants.SOURCES if folder.startswith(each.folder))
    result = mutants.draw(3, "1", [source])
    assert result == mutants.draw(4, "1", [source])[:3] != mutants.draw(3, "2", [source])
    for fault in result:
        text = (CHECKOUT / fault.file).read_text()
        assert fault.plant(text) != text and fault.file.startswith(f"{folder}/")
        assert fault.tests and all((CHECKOUT / test).exists() for test in fault.tests)


@pytest.mark.parametrize(
    ("file", "ops", "tests"),
    [
        ("csrc/metal/gdn/gradients.cpp", {"chunk_bwd_dqkwg", "chunk_kda_bwd"}, {"gdn/test_backward_stages"}),
        ("csrc/cpu/gdn/chunk_stages.cpp", {"solve_tril", "chunk_bwd_dqkwg"}, {"gdn/test_stages", "gdn/test_gradients"}),
        ("csrc/ops/layers/rows.h", {"l2norm", "norm_bwd"}, {"layers/test_l2norm", "layers/test_gradients"}),
        ("csrc/cpu/aura/codes.h", {"aura_encode_", "aura_flash_p1"}, {"aura/test_aura_encode"}),  # by its includers
        ("csrc/cpu/aura/codes.cpp", {"aura_encode_", "aura_flash_p1"}, {"aura/test_aura_encode"}),  # by its header
        ("csrc/cpu/simd/causal_conv1d.cpp", {"causal_conv1d"}, {"layers/test_causal_conv1d"}),  # by its name
        ("csrc/cpu/define.h", set(), {"gdn/test_cpu_kernels"}),  # by what claims it
    ],
)
def test_a_mutant_of_a_file_runs_the_tests_of_each_op_in_it(file: str, ops: set[str], tests: set[str]) -> None:
    chosen, words = mutants.tests_that_see(file)
    assert {f"tests/{test}.py" for test in tests} <= set(chosen)
    assert (mutants.CLASSES in chosen) == bool(ops)
    assert ops | {Path(test).stem for test in chosen if test != mutants.CLASSES} <= set(words.split(" or "))


def test_every_op_has_a_contract_and_tests() -> None:
    from torch_gdn_check.registry import REGISTRY

    assert sorted(mutants.contracts().values()) == sorted(REGISTRY)
    assert [op for op in REGISTRY if not mutants.tests_of_op(op)] == []


def test_a_mutant_that_changes_a_text_alone_is_none() -> None:
    for one, other in (("'a 1'", "'a 2'"), ("x: int = 1", "x: str = 1"), ("x = f'{y} 1'", "x = f'{y} 2'")):
        assert mutants.without_texts(one) == mutants.without_texts(other)
    fault = Fault("valid", "drawn", "python", "setup.py", "import os\n", "import sys\n", ())
    assert mutants.means_something_else(fault)
    assert not mutants.means_something_else(replace(fault, replacement="import (\n"))


def test_the_rate_is_of_mutants_that_build_and_can_be_seen() -> None:
    words = [(CAUGHT, ""), (CAUGHT, ""), (MISSED, "equivalent: no reader"), (MISSED, ""), (BROKEN, "")]
    words += [(MISSED, "caught since by a test"), (LATE, "")]
    rows = [
        Row("1", f"shaders/shaders/gdn/a.metal:{n}: x -> y", *(word, "", why)) for n, (word, why) in enumerate(words)
    ]
    assert rates(rows).splitlines()[-1] == "| all | 6 | 1 | 3 | 1 | 1 | 75 % |"
    again = Fault(rows[3].mutant.removeprefix("shaders/"), "drawn", "shaders", "", "", "", ())
    kept = with_verdicts([replace(rows[3], judged="why")], "2", [again], {again.id: Verdict(MISSED)})
    assert kept == [replace(rows[3], seed="2", judged="why")]


def test_the_checkout_says_what_the_simulated_device_builds() -> None:
    result = scratch.sources_of_simulated_device(CHECKOUT)
    assert CHECKOUT / "csrc/metal/encoder.mm" in result
    assert not any("csrc/cpu" in str(path) for path in result)
