"""The table that the check prints."""

from __future__ import annotations

from torch_gdn.check.report import table
from torch_gdn.check.steps import FAIL, PASS, Result


def test_a_kernel_has_a_line_for_the_cases_that_launch_it() -> None:
    launched = {"first": (FAIL, ("a", "b")), "second": (PASS, ("a", "b")), "third": (PASS, ("b",))}
    rows = [Result("recorded", "op", case, status, kernels=kernels) for case, (status, kernels) in launched.items()]
    lines = [line.split() for line in table(rows)[1:]]
    counts = {"recorded op": "3", "computed a": "2", "computed b": "3"}
    assert lines == [[*name.split(), count, "1", "failed"] for name, count in counts.items()]
