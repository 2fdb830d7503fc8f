"""Tests the CPU kernels of every ISA variant that this processor runs: convolution, norms, gates, codes, attention, the
rule.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_gdn import reference
from torch_gdn_check.registry import REGISTRY, Point
from torch_gdn_check.registry.attention import PagePoint
from torch_gdn_check.registry.aura import BITS, TRELLIS, AuraPoint, CodecPoint
from torch_gdn_check.registry.gdn import RulePoint
from torch_gdn_check.registry.inputs import Call
from torch_gdn_check.registry.layers import ConvolutionPoint, RowPoint
from torch_gdn_check.registry.models import DTYPES
from torch_gdn_check.registry.registry import Named

pytestmark = [
    pytest.mark.sweep(2, of="results"),
    pytest.mark.xdist_group("cpu_isa"),
]  # each process would make the results again

VARIABLE = "TORCH_GDN_CPU_ISA"
HAS_VARIANTS = sys.platform == "linux" and platform.machine() == "x86_64"
VARIANTS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx") if HAS_VARIANTS else ("the only one",)
CHANNELS, ROW = 130, 77  # some whole vectors or tiles, and a remainder
NORMS = [op for op, entry in REGISTRY.items() if {"x", "eps"} <= {*entry.arguments}]
GATED_NORM, PAIRS = "rms_norm_gated", "chunk_gated_delta_rule"

PROGRAM = """
import sys, torch, torch_gdn
from torch_gdn_check.registry import REGISTRY
results = {name: REGISTRY[op].outputs(call, REGISTRY[op].run(call)) for name, op, call in torch.load(sys.argv[1])}
torch.save(results, sys.argv[2])
"""


@dataclass(frozen=True)
class Case:
    op: str
    point: Point
    call: Call


def drawn(op: str, point: Point, **changes: object) -> Case:
    return Case(op, point, REGISTRY[op].call(point) | changes)


@functools.cache
def cases() -> dict[str, Case]:
    """Returns cases by name. The tests compare each with float64."""
    result: dict[str, Case] = {}
    for dtype in DTYPES:
        columns = ConvolutionPoint(dtype, D=CHANNELS, tokens=ROW, batch=1, from_state=False)
        for name, by_channel in (("rows", False), ("columns", True)):
            point = ConvolutionPoint(dtype, D=CHANNELS, tokens=ROW, batch=1, from_state=False, by_channel=by_channel)
            result[f"convolution of {name} {dtype}"] = drawn("causal_conv1d", point)
        for S in (3, 4):
            state = {"initial_state": torch.randn(1, CHANNELS, S).to(dtype), "output_final_state": True}
            call = REGISTRY["causal_conv1d"].call(columns)
            call = call | state | {name: call[name][:, :1] for name in ("x", "residual")}
            result[f"convolution of one token {dtype} {S}"] = Case("causal_conv1d", columns, call)
        rows = RowPoint(dtype, D=ROW, tokens=ROW, heads=1, batch=1)
        for op in NORMS:
            result[f"{op} {dtype}"] = drawn(op, rows)
            if "residual" in REGISTRY[op].arguments:
                result[f"{op} of x alone {dtype}"] = drawn(op, rows, residual=None)
    for D in (80, 128):  # codes fill one and a half registers (80), or whole registers (128)
        for bits in BITS:
            point = CodecPoint(D=D, bits=bits, tokens=9, rotated=True)
            result[f"codes {D} {bits}"] = drawn("aura_decode", point, tile_means=None)
        for bits in TRELLIS:
            point = CodecPoint(D=D, bits=bits, tokens=9, rotated=True, trellis=True)
            result[f"trellis codes {D} {bits}"] = drawn("aura_decode", point, tile_means=None)
            result[f"encoding in a trellis {D} {bits}"] = drawn("aura_encode", point)
    # There are 7 query heads for a KV head, and a window that begins and ends inside tiles.
    for D in (80, 128):
        coded = AuraPoint(bits=(8, 4), D=D, ratio=7, queries=1, keys=200, batch=1)
        result[f"attention to codes {D}"] = drawn("aura_attention", coded, window=150)
        pages = PagePoint(D=D, HQ=7, HK=1, queries=(9, 1), keys=(90, 130), block_size=16)
        result[f"attention to pages {D}"] = drawn("paged_attention_", pages, window=75, sinks=torch.randn(7))
    return result | rules()


def rules() -> dict[str, Case]:
    """Returns cases with head sizes above and below those at which a kernel divides K, in both layouts of a state."""
    result: dict[str, Case] = {}
    ops = [op for op, entry in REGISTRY.items() if {"initial_state", "use_gate_in_kernel"} <= {*entry.arguments}]
    for op, (K, V), v_first in itertools.product(ops, ((16, 20), (96, 192), (256, 40)), (False, True)):
        point = RulePoint(K=K, V=V, tokens=5 if "recurrent" in op else 70, HV=1, state_v_first=v_first)
        result[f"{op} {K} {V}{' values first' if v_first else ''}"] = drawn(op, point)
    result[f"{PAIRS} of pairs"] = drawn(PAIRS, RulePoint(torch.bfloat16, tokens=70))  # products of bfloat16
    return result


@functools.cache
def gates() -> Tensor:
    sizes = torch.cat([torch.logspace(-9, 3, 20000), torch.linspace(80, 95, 20000), torch.tensor([torch.inf])])
    return torch.cat([sizes, -sizes, torch.tensor([0.0, torch.nan])])[:, None]


def calls() -> list[tuple[str, str, Call]]:
    """Returns the cases, and the calls that tests compare in other ways."""
    result = [(name, each.op, each.call) for name, each in cases().items()]
    for dtype in DTYPES:
        gated = cases()[f"{GATED_NORM} {dtype}"].call
        result.append((f"rounded {dtype}", GATED_NORM, gated | {"round_norm": True}))
    ones = {"x": torch.ones_like(gates()), "g": gates(), "eps": 0.0, "activation": "sigmoid"}
    result.append(("sigmoid", GATED_NORM, ones))
    heads = gates().T[None]  # [1, 1, HV]: some whole vectors and a remainder
    gating = {"A_log": torch.zeros(heads.size(2)), "a": heads, "b": heads}
    return [*result, ("gates", "gdn_gating", gating)]


def run(program: str, variant: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program in a process with this ISA variant. Skips if the processor cannot run it."""
    environment = os.environ | ({VARIABLE: variant} if HAS_VARIANTS else {})
    command = [sys.executable, "-c", program, *map(str, arguments)]
    finished = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if refusal := re.search(rf"ValueError: ({VARIABLE}: .* on this processor, got .*)", finished.stderr):
        pytest.skip(refusal[1])
    assert finished.returncode == 0, finished.stderr
    return finished


@pytest.fixture(scope="module", params=VARIANTS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Named]:
    """Returns the results by name from a process with one ISA variant."""
    directory = tmp_path_factory.mktemp("results")
    on_device, back = directory / "calls.pt", directory / "results.pt"
    torch.save(calls(), on_device)
    run(PROGRAM, request.param, on_device, back)
    result: dict[str, Named] = torch.load(back)
    return result


BITS_OF_VARIANT = """
import torch, torch_gdn
torch.manual_seed(0)
y = torch_gdn.rms_norm(torch.randn(20, 5120), torch.ones(5120))
q, k, v = torch.randn(3, 1, 64, 1, 128).bfloat16()
o, _ = torch_gdn.chunk_gated_delta_rule(q, k, v, torch.zeros(1, 64, 1), torch.ones(1, 64, 1))
print(y.view(torch.int32).sum().item(), o.view(torch.int16).sum().item())
"""


@pytest.mark.sweep(1, seeds=6)  # five processes
@pytest.mark.skipif(not HAS_VARIANTS, reason="on this machine the kernels have no variant to force")
def test_a_variant_is_forced_and_one_that_cannot_run_is_refused() -> None:
    """The order of a sum depends on the width of vectors, and products of bfloat16 are those of two variants."""
    with pytest.raises(pytest.skip.Exception, match=r"expected one of baseline.*, got 'no such variant'") as refused:
        run(BITS_OF_VARIANT, "no such variant")
    (runs_here,) = re.findall("one of (.*) on this processor", str(refused.value))
    bits = {each: run(BITS_OF_VARIANT, each).stdout for each in runs_here.split(", ") if each != "amx"}
    assert len(set(bits.values())) == len(bits) >= 1, bits


@pytest.mark.parametrize("name", cases())
def test_every_case_is_exact(results: dict[str, Named], name: str) -> None:
    case = cases()[name]
    for part in REGISTRY[case.op].compared(case.point, case.call, results[name]):
        if part.part == "the whole" or "one token" not in name:  # with one token, a channel is one number
            assert part.kept, str(part)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits(results: dict[str, Named], dtype: torch.dtype) -> None:
    """Rows and columns give the same bits, a state is a copy, and a residual is added once."""
    rows, columns = (results[f"convolution of {name} {dtype}"]["y"] for name in ("rows", "columns"))
    assert torch.equal(rows, columns)
    for S in (3, 4):
        name = f"convolution of one token {dtype} {S}"
        call = cases()[name].call
        after = torch.cat([call["initial_state"], call["x"].transpose(1, 2)], -1)[..., 1:]
        assert torch.equal(results[name]["final_state"], after)
    for op in NORMS:
        name = f"{op} {dtype}"
        if "residual" in (call := cases()[name].call):
            total = (call["x"].float() + call["residual"].float()).to(dtype)
            assert torch.equal(results[name]["residual_out"], total)


def test_codes_are_looked_up(results: dict[str, Named]) -> None:
    for name, case in cases().items():
        if case.op == "aura_decode":
            assert torch.equal(results[name]["x"], reference.aura_decode(**case.call)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_where_transformers_rounds(results: dict[str, Named], dtype: torch.dtype) -> None:
    call, result = cases()[f"{GATED_NORM} {dtype}"].call, results[f"rounded {dtype}"]["y"]
    x, g = call["x"].double(), call["g"].double()
    normalised = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    expected = ((normalised * call["weight"]).double() * torch.nn.functional.silu(g)).to(dtype)
    if dtype == torch.float32:
        assert (result - expected).norm() < 5e-7 * expected.norm()
        return
    assert (result != expected).sum() < 0.002 * expected.numel(), "a sum of another order rounds another way"


def test_gates(results: dict[str, Named]) -> None:
    x = gates().T[None].double()
    g, beta = (results["gates"][name].double() for name in ("g", "beta"))
    torch.testing.assert_close(g, -torch.nn.functional.softplus(x), rtol=5e-7, atol=2**-125, equal_nan=True)
    torch.testing.assert_close(beta, x.sigmoid(), rtol=4e-7, atol=2**-125, equal_nan=True)


def test_exp_has_no_gaps(results: dict[str, Named]) -> None:
    """The arguments have every size. A gate's sigmoid, 1 / (1 + exp(-x)), shows their exp."""
    exact = gates().double().sigmoid()
    torch.testing.assert_close(results["sigmoid"]["y"].double(), exact, rtol=4e-7, atol=2**-125, equal_nan=True)
