"""Tests that each rule of strict Metal refuses its program and accepts the correct twin
(evidence/proof/metal/rule_examples).
"""

from __future__ import annotations

import pytest

from evidence.proof.metal import front_end as strict_front_end
from evidence.proof.metal.examples import Example, examples
from evidence.proof.metal.kernels import check_source
from evidence.tests.proof.needs import needs_clang

pytestmark = [needs_clang, pytest.mark.xdist_group("strict")]

ALL = examples()
RULES_OF_METAL = (  # each of the rules has at least one example
    "address_space warning double recursion function_pointer virtual_function exception run_time_type "
    "unqualified_pointer_of_kernel global_variable return_before_barrier lambda language_version "
    "keyword_as_name simdgroup_operation_under_condition large_array run_time_index"
)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("example", ALL, ids=lambda example: example.name)
def test_example_is_refused_and_its_twin_is_not(example: Example) -> None:
    assert example.problems() == []


def test_every_rule_has_an_example() -> None:
    assert set(RULES_OF_METAL.split()) <= {example.name for example in ALL}


def test_a_twin_differs_and_has_a_kernel() -> None:
    for example in ALL:
        assert example.accepted != example.refused
        assert check_source(example.accepted).facts, f"{example.name}: no kernel was seen"


def test_an_example_refused_with_other_words_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example("double")
    monkeypatch.setattr(Example, "words", "words that no compiler says")
    (problem,) = example.problems()
    assert problem.startswith("double: expected to be refused with 'words that no compiler says'")


def test_messages_name_file_and_line() -> None:
    source = '#line 7 "gdn/some.metal"\n#include <metal_stdlib>\nconstant double x = 1;\n'
    assert check_source(source).problems == ["gdn/some.metal:8:10: error: 'double' is not supported in Metal"]


def test_messages_speak_metal() -> None:
    (message, *_) = check_source(Example("address_space").refused).problems[1:]
    assert "pointer to address space 'device' as a pointer to address space 'threadgroup'" in message


def test_the_language_version_is_the_hosts() -> None:
    host = (strict_front_end.CHECKOUT / "csrc/metal/library.mm").read_text()
    assert "MTLLanguageVersion3_1" in host
    assert "-D__METAL_VERSION__=310" in strict_front_end.DEFINES
