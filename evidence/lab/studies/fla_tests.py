"""Runs FLA's own tests of delta rules, convolutions, norms and gates, forward and backward, on torch_gdn's CPU code.

    git clone https://github.com/fla-org/flash-linear-attention fla && git -C fla checkout COMMIT
    pip install --no-deps triton==3.4.0 einops
    python -m evidence.lab.studies.fla_tests fla [arguments of pytest]

COMMIT is the constant below. FLA's functions are replaced by ours of the same name before its tests import them, and
the tests run unchanged: their inputs, their references, which are PyTorch code, and their tolerances. The table at the
end has a row for each test function, and a row for each reason not to count one. Most of the time is that of FLA's
references. Those of the delta rules get 64 tokens of a sequence at a time, which gives the same bits in less time. All
of it takes 20 to 30 minutes of one core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from torch_gdn import autograd, causal_conv1d_interface

COMMIT = "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89"
FILES = (
    "ops/test_gdn.py",
    "ops/test_kda.py",
    "modules/test_conv.py",
    "modules/test_l2norm.py",
    "modules/test_layernorm.py",
    "modules/test_layernorm_gated.py",
)
# For each beginning of a test's name, why it says nothing about torch_gdn.
OTHERS = {
    "test_chunk_gated_delta_rule_fwd_h_blackwell": "a choice of FLA's for one GPU",
    "test_fast_conv_varlen": "FLA's forward with a CUDA library's backward",
    "test_flash_": "a library for one GPU",
    "test_groupnorm": "group norms, which torch_gdn does not have",
    "test_layernorm": "layer norms, which torch_gdn does not have",
    "test_naive_chunk": "one of FLA's references against another",
    "test_norm_swish_gate_linear": "a norm and a linear layer in one, which torch_gdn does not have",
    "test_prepare_wy_repr_bwd_no_g": "an inner function of FLA's without a gate",
    "test_rmsnorm_gated_large": "an input for a GPU with 180 GB",
    "test_rmsnorm_linear": "a norm and a linear layer in one, which torch_gdn does not have",
    "test_triton_ascend": "a library for one accelerator",
}
# For each test that fails, why.
FAILURES = {
    "test_chunk_invalid_chunk_size": "torch_gdn takes a chunk_size of 16 too",
    "test_gate[B1-T2-H2-D12-a_logTrue-biasFalse-lowerbound-5.0]": "dA is 5e-7 from float64, and FLA's reference 2e-4",
}


def ours(name: str, takes_none: tuple[str, ...] = ()) -> Any:
    """Returns torch_gdn's function. It drops the named options, which only FLA has and which must not be set."""

    def call(*args: Any, **options: Any) -> Any:
        for option in takes_none:
            assert not options.pop(option, None), f"{option} is set"
        return getattr(torch_gdn, name)(*args, **options)

    return call


def replace_functions() -> None:
    """Puts torch_gdn's functions where FLA's tests and modules look for FLA's."""
    causal_conv1d = ModuleType("causal_conv1d")
    causal_conv1d.causal_conv1d_fn = causal_conv1d_interface.causal_conv1d_fn  # type: ignore[attr-defined]
    causal_conv1d.causal_conv1d_update = causal_conv1d_interface.causal_conv1d_update  # type: ignore[attr-defined]
    sys.modules["causal_conv1d"] = causal_conv1d  # so that tests of FLA's CUDA back end do not skip
    utils: Any = import_module("fla.utils")
    utils.device, utils.device_torch_lib = "cpu", torch.cpu
    for module, name in (
        ("ops.gated_delta_rule", "chunk_gated_delta_rule"),
        ("ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        ("ops.gated_delta_rule.gate", "fused_gdn_gate"),
        ("ops.kda", "chunk_kda"),
        ("ops.kda", "fused_recurrent_kda"),
        ("ops.kda.gate", "fused_kda_gate"),
        ("modules.convolution", "causal_conv1d"),
        ("modules.convolution", "causal_conv1d_update"),
        ("modules.conv.causal_conv1d", "causal_conv1d"),
        ("modules.conv.triton.ops", "causal_conv1d_update"),
    ):
        setattr(import_module(f"fla.{module}"), name, ours(name))
    norms: list[Any] = [import_module(f"fla.modules.{name}") for name in ("l2norm", "layernorm", "fused_norm_gate")]
    only_fla = ("residual", "prenorm", "residual_in_fp32")
    norms[0].l2_norm, norms[1].rms_norm = ours("l2norm"), ours("rms_norm", only_fla)
    norms[2].rms_norm_gated = ours("rms_norm_gated", only_fla)
    for rule, name in (("gated_delta_rule", "naive_recurrent_gated_delta_rule"), ("kda", "naive_recurrent_kda")):
        references = import_module(f"fla.ops.{rule}.naive")
        setattr(references, name, in_segments(getattr(references, name)))


def in_segments(reference: Any) -> Any:
    """Wraps FLA's recurrent reference: each sequence, 64 tokens at a time. Autograd then keeps no gradient of a whole
    tensor for each token."""

    def call(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Tensor, Tensor | None]:
        if q.shape[0] > 1:
            rows = [x.split(1) for x in (q, k, v, rest.pop("g"), rest.pop("beta"))]
            state = rest.pop("initial_state", None)
            states = [None] * len(q) if state is None else state.split(1)
            results = [
                call(*row[:3], g=row[3], beta=row[4], initial_state=first, **rest)
                for *row, first in zip(*rows, states, strict=True)
            ]
        else:
            state, keeps = rest.pop("initial_state", None), rest.pop("output_final_state", False)
            segments = [x.split(64, 1) for x in (q, k, v, rest.pop("g"), rest.pop("beta"))]
            outputs = []
            for q, k, v, g, beta in zip(*segments, strict=True):
                options = {"g": g, "beta": beta, "initial_state": state, "output_final_state": True}
                o, state = reference(q, k, v, **options, **rest)
                outputs.append(o)
            return torch.cat(outputs, 1), state if keeps else None
        last = [state for _, state in results if state is not None]
        return torch.cat([o for o, _ in results]), torch.cat(last) if last else None

    return call


class Plugin:
    """Counts results, and how many tests of a function called one of our backward ops."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[tuple[str, str], int] = Counter()
        self.backwards = 0
        inner = autograd.differentiate

        def differentiate(op: str, *args: Any) -> Any:
            self.backwards += 1
            return inner(op, *args)

        for module in ("torch_gdn.autograd.delta_rule", "torch_gdn.autograd.layers"):
            import_module(module).differentiate = differentiate  # type: ignore[attr-defined]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.name in FAILURES:
                item.add_marker(pytest.mark.xfail(strict=True, reason=FAILURES[item.name]))
            for beginning, reason in OTHERS.items():
                if item.name.startswith(beginning):
                    item.add_marker(pytest.mark.skip(reason=reason))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.backwards = 0
        yield
        self.outcomes[self.function(item.nodeid)]["with a backward"] += self.backwards > 0

    @staticmethod
    def function(nodeid: str) -> str:
        return nodeid.split("tests/")[-1].split("[")[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        function = self.function(report.nodeid)
        if hasattr(report, "wasxfail"):
            self.reasons[function, report.wasxfail] += 1
        elif report.skipped:
            assert isinstance(report.longrepr, tuple)
            self.reasons[function, report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.when == "call" or report.failed:
            self.outcomes[function][report.outcome] += 1

    def pytest_terminal_summary(self) -> None:
        print("\n\n| FLA's test | passed | failed | with a backward |\n|---|---|---|---|")
        for function, counts in self.outcomes.items():
            print(f"| `{function}` | {counts['passed']} | {counts['failed']} | {counts['with a backward']} |")
        for (function, reason), count in self.reasons.items():
            print(f"not counted: {function}: {count}, {reason}")


def check_commit(checkout: str | os.PathLike[str]) -> None:
    commit = subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"], text=True).strip()
    assert commit == COMMIT, f"{checkout}: expected commit {COMMIT}, got {commit}"


def main() -> int:
    checkout, *arguments = sys.argv[1:]
    check_commit(checkout)
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # otherwise FLA skips grouped heads
    sys.path.insert(0, os.path.abspath(checkout))
    replace_functions()
    files = [] if any("::" in argument for argument in arguments) else [f"{checkout}/tests/{file}" for file in FILES]
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", checkout]
    return pytest.main([*options, *files, *arguments], plugins=[Plugin()])


if __name__ == "__main__":
    raise SystemExit(main())
