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


def test_a_compiled_kernels_line_has_the_figures_of_its_pipelines() -> None:
    figures = {"compile_seconds": 1.5, "max_total_threads_per_threadgroup": 512, "warnings": []}
    others = figures | {"compile_seconds": 0.25, "max_total_threads_per_threadgroup": 128, "warnings": ["one"]}
    others["static_threadgroup_memory_length"] = 4096
    rows = [Result("compile", "a", str(n), PASS, figures=each) for n, each in enumerate((figures, others))]
    expected = "1.8 s, at most 1.50 s; at least 128 threads a threadgroup, at most 4096 bytes of its memory"
    assert table(rows)[1].endswith(f"{expected}; 1 with warnings")
