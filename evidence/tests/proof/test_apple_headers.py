"""Tests that our stub headers agree with Apple's API, and that each kind of fault in them is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.proof.mac import apple_headers, header_faults
from evidence.proof.mac.declarations import Declaration

pytestmark = pytest.mark.xdist_group("proof")


@pytest.fixture(scope="module")
def comparison(reference: apple_headers.Reference, names: frozenset[str]) -> apple_headers.Comparison:
    return apple_headers.compare(apple_headers.stubs(), reference, names)


def test_every_declaration_agrees_or_is_listed_as_not_covered(comparison: apple_headers.Comparison) -> None:
    assert apple_headers.judge(comparison).problems == []


def test_what_was_compared_is_counted_apart_from_what_was_not(comparison: apple_headers.Comparison) -> None:
    finding = apple_headers.judge(comparison)
    assert finding.kinds == {
        "agreed": len(comparison.agreed),
        "by name only": len(comparison.by_name),
        "not covered": len(comparison.not_covered),
    }
    assert sum(finding.kinds.values()) == finding.cases and finding.kinds["not covered"] > 0


def test_a_wrong_declaration_is_counted_too(comparison: apple_headers.Comparison) -> None:
    wrong = apple_headers.Comparison(comparison.agreed, ["one"], comparison.by_name, comparison.not_covered)
    assert apple_headers.judge(wrong).kinds["wrong"] == 1


def test_metal_is_covered_with_its_types(comparison: apple_headers.Comparison) -> None:
    methods = [each for each in comparison.agreed if each.key[0] == "method" and each.key[1].startswith("MTL")]
    assert len(methods) > 80
    uncompared = [*comparison.by_name, *comparison.not_covered]
    assert [each for each in uncompared if each.key[0] == "method" and each.key[1].startswith("MTL")] == []


@pytest.mark.parametrize("fault", header_faults.FAULTS, ids=lambda fault: fault.what)
def test_planted_fault_is_found(
    fault: header_faults.Fault, reference: apple_headers.Reference, names: frozenset[str]
) -> None:
    assert any(fault.named in problem for problem in header_faults.problems_with(fault, reference, names))


def test_fault_that_cannot_be_planted_is_an_error(tmp_path: Path) -> None:
    fault = header_faults.Fault("nothing", f"{header_faults.METAL}/MTLTypes.h", "no such text", "", "")
    with pytest.raises(ValueError, match="no such text"):
        header_faults.planted(fault, tmp_path)


def test_entry_of_not_covered_that_is_covered_is_a_problem(comparison: apple_headers.Comparison) -> None:
    covered = apple_headers.Comparison(comparison.agreed, [], comparison.by_name, comparison.not_covered[1:])
    (problem,) = apple_headers.judge(covered).problems
    assert str(comparison.not_covered[0]) in problem


def test_inherited_methods_count_as_the_heirs_own() -> None:
    apple = apple_headers.Reference(
        [
            Declaration(("parent", "MTLBuffer", "MTLResource"), "", ""),
            Declaration(("method", "MTLResource", "-label"), "NSString*()", ""),
        ]
    )
    ours = Declaration(("method", "MTLBuffer", "-label"), "NSString*()", "MTLBuffer.h:1")
    assert apple_headers.compare([ours], apple, frozenset()).agreed == [ours]
