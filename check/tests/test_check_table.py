"""Tests the check's report and the table that it prints."""

from __future__ import annotations

import json

from torch_gdn_check.registry.bounds import Part
from torch_gdn_check.report import Report, table
from torch_gdn_check.steps import FAIL, PASS, Result, judged


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


class TestTheReport:
    def report(self, *results: Result) -> Report:
        return Report("2026-01-01T00:00:00+00:00", 1.0, {}, list(results))

    def test_nan_is_too_much_and_is_valid_json(self) -> None:
        outcome = judged([Part("o", "the whole", 1e-9, 1e-6), Part("o", "head 0", float("nan"), 1e-6)])
        assert "head 0" in outcome.problem
        text = self.report(Result("recorded", "op", "case", FAIL, figures=outcome.figures)).json()
        assert "NaN" not in text
        assert json.loads(text)["results"][0]["figures"]["tensors"]["o"]["error"] == "nan"

    def test_a_message_of_many_cases_is_printed_once(self) -> None:
        cases = ("bfloat_64", "half_64", "float_64")
        rows = [Result("compile", "l2norm", case, FAIL, message=f"l2norm_{case}: error: no") for case in cases]
        text = self.report(*rows).text()
        assert text.count("error: no") == 1
        assert "failed: compile l2norm bfloat_64 and 2 more" in text

    def test_a_warning_of_many_pipelines_is_stored_once(self) -> None:
        rows = [
            Result("compile", "l2norm", str(i), PASS, figures={"warnings": text})
            for i, text in enumerate(["unused x", "", "unused y", "unused x"])
        ]
        so_far = Result("pipelines", "", "", PASS, figures={"pipelines": [{"warnings": "unused y"}]})
        result = json.loads(self.report(*rows, so_far).json())
        assert result["warnings"] == {"1": "unused x", "2": "unused y"}
        assert [row["figures"].get("warnings") for row in result["results"]] == ["1", "", "2", "1", None]
        assert result["results"][-1]["figures"]["pipelines"] == [{"warnings": "2"}]
        assert rows[0].figures["warnings"] == "unused x"

    def test_an_interrupted_run_has_not_passed(self) -> None:
        report = self.report(Result("compile", "l2norm", "", PASS))
        assert report.passed
        report.interrupted = True
        assert not report.passed and "interrupted" in report.text()
