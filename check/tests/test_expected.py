"""Tests the check's comparison of PyTorch itself with float64, and the bounds next to what it measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import ready
from torch_gdn_check import comparisons, expected, golden, models, plan
from torch_gdn_check.report import Report
from torch_gdn_check.steps import FAIL, PASS, PYTORCH, SKIPPED, Result, execute

CPU = torch.device("cpu")
M4_MAX = {"chip": "Apple M4 Max", "GPU cores": 40}


def test_pytorch_itself_is_compared_before_any_kernel() -> None:
    sections = [step.section for step in plan.steps(golden.FOLDER, quick=True)]
    assert sections[2:6] == [PYTORCH] * 4 and PYTORCH not in sections[6:]


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_pytorch_itself_is_right_here(device: str) -> None:
    device = ready(device)
    for step in plan.pytorch_steps():
        result = execute(step, device)
        assert result.status == PASS, result.message
        assert 0 < result.figures["tensors"][step.group]["error"] < 5e-3


@pytest.mark.parametrize("step", plan.pytorch_steps(), ids=lambda step: step.name)
@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_pytorch_that_is_off_is_named(step: Any, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only results in the dtype of the step are off: the exact ones are in float64."""
    call, shapes = comparisons.CALLS[step.group]

    def off(*inputs: Tensor) -> Tensor:
        return call(*inputs) * (1 if inputs[0].dtype == torch.float64 else factor)

    monkeypatch.setitem(comparisons.CALLS, step.group, (off, shapes))
    result = execute(step, CPU)
    assert result.status == FAIL
    assert result.message.startswith(f"PyTorch's own {step.group} in {step.case} is off on this device: ")
    assert result.message.endswith("need not be torch_gdn's.")


@pytest.mark.parametrize(
    ("chip", "cores", "bandwidth"),
    [
        ("Apple M4 Max", 40, 546),
        ("Apple M4 Max", 32, 410),
        ("Apple M1 Max", 24, 400),
        ("Apple M3 Max", 30, 300),
        ("Apple M4 Max", None, 410),
        ("Apple M4 Max", 99, None),
        ("AMD EPYC", 0, None),
        (None, None, None),
    ],
)
def test_the_mac_of_a_report(chip: str | None, cores: int | None, bandwidth: int | None) -> None:
    mac = expected.this_mac({"chip": chip, "GPU cores": cores})
    assert (mac and mac.bandwidth) == bandwidth


def prefill(case: str) -> Result:
    figures = {"torch_gdn": {"seconds": 1024e-6}, "tokens": 512}
    return Result("timing", "prefill", case, PASS, figures=figures)


DECODE = Result("timing", "decode", "a model", PASS, figures={"torch_gdn": {"seconds": 1e-5}, "state_bytes": 2_730_000})
MODEL = Result(
    "model",
    "tokens per second",
    "small",
    PASS,
    figures={"tokens_per_second": {"torch_gdn": {"decode": 1000.0}}, "moved": 27_300_000, "launches": 100},
)


def test_a_prompts_rule_is_compared_with_the_yardstick_of_its_size() -> None:
    assert list(expected.lines([prefill("Qwen3.5-27B"), prefill("other")], {})) == [
        "prefill, Qwen3.5-27B: 2.00 us per token and layer; Rapid-MLX on an M3 Ultra: 1.3",
        "prefill, other: 2.00 us per token and layer",
    ]


def test_decoding_is_compared_with_the_bandwidth() -> None:
    assert list(expected.lines([DECODE, MODEL], M4_MAX)) == [
        "decode, a model: 273 of 546 GB/s (50%) for the state of a layer",
        "model: 1000 tokens/s decoded, 27 of 546 GB/s (5%); "
        "the memory allows at most 20000, launches of 5 us at most 2000",
    ]
    assert list(expected.lines([DECODE, MODEL], {"chip": "unknown"})) == []


def test_a_step_without_times_has_no_line() -> None:
    skipped = Result("timing", "prefill", "Qwen3.5-27B", SKIPPED)
    assert list(expected.lines([skipped], M4_MAX)) == []


def test_the_report_has_the_lines() -> None:
    facts = Result("facts", "this machine", "", PASS, figures={"machine": M4_MAX})
    text = Report("", 1.0, {}, [facts, DECODE]).text()
    assert "next to bounds and other projects:\n    decode, a model: 273 of 546 GB/s" in text
    assert "next to bounds" not in Report("", 1.0, {}, [facts]).text()


def test_steps_measure_what_the_lines_read() -> None:
    """The yardstick's model is timed in a quick check too, and the steps' figures have the names that are read."""
    assert ("prefill", expected.YARDSTICK_MODEL) in {
        (step.group, step.case) for step in plan.timings(quick=True) if step.section == "timing"
    }
    figures = models.check_model(CPU, prompt=8, new=1).figures
    result = Result("model", "", "", PASS, figures=figures)
    (line,) = expected.lines([result], M4_MAX)
    # Four layers, the last with attention: hidden size 512, a state of 8 heads, float32, read and written.
    assert figures["launches"] == 35 + 3 * 12 + 16 and figures["moved"] > 2 * 3 * 4 * 8 * 128 * 128
    assert line.startswith("model: ")
