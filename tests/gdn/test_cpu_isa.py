"""The CPU kernels of every ISA variant that this machine has: convolution, norms, gates, their exp, codes."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import reference
from torch_gdn.testing.aura import BITS, Codec, make_cache

CAPABILITIES = ("DEFAULT", "AVX2", "AVX512") if sys.platform == "linux" else ("DEFAULT",)
BOUND = {torch.float32: 3e-7, torch.bfloat16: 1.8e-3, torch.float16: 2.2e-4}
SIZES = (130, 77)  # channels and tokens: whole vectors or tiles and a remainder

PROGRAM = """
import sys, torch, torch_gdn
calls = torch.load(sys.argv[1])
results = [getattr(torch.ops.gdn, op)(*arguments, **options) for op, arguments, options in calls]
torch.save((torch.backends.cpu.get_cpu_capability(), results), sys.argv[2])
"""


@functools.cache
def channels() -> dict[torch.dtype, tuple[Tensor, Tensor]]:
    """x [1, T, D] and weights."""
    D, T = SIZES
    return {dtype: (torch.randn(1, T, D).to(dtype), torch.randn(D, 4).to(dtype)) for dtype in BOUND}


def one_token_calls() -> dict[tuple[torch.dtype, int], tuple[Tensor, Tensor, Tensor]]:
    """By dtype and S: x [1, 1, D], weights, and a state of S columns."""
    D = SIZES[0]
    return {
        (dtype, S): (x[:, :1], weight, x[:, :S].flatten()[: D * S].view(1, D, S))
        for dtype, (x, weight) in channels().items()
        for S in (3, 4)
    }


@functools.cache
def norms() -> dict[torch.dtype, tuple[Tensor, Tensor, Tensor]]:
    """x [1, T, D], gates and weights, whose rows are whole vectors and a remainder."""
    D = SIZES[1]
    return {dtype: (x[..., :D], x[..., -D:], weight[:D, 0]) for dtype, (x, weight) in channels().items()}


@functools.cache
def gates() -> Tensor:
    sizes = torch.cat([torch.logspace(-9, 3, 20000), torch.linspace(80, 95, 20000), torch.tensor([torch.inf])])
    return torch.cat([sizes, -sizes, torch.tensor([0.0, torch.nan])])[:, None]


@functools.cache
def codes() -> dict[tuple[int, int], dict[str, Tensor]]:
    """By head size and bits: vectors of whole registers of codes, and of one and a half."""
    found = {}
    for D, bits in itertools.product((80, 128), BITS):
        codec = Codec(D, bits)
        packed, norms = reference.aura_encode(torch.randn(9, D), *codec.tables)[:2]
        found[D, bits] = {"codes": packed, "norms": norms, "codebook": codec.codebook, "signs": codec.signs}
    return found


@functools.cache
def attention() -> dict[str, Any]:
    """With 7 query heads for a KV head, and a window whose ends are inside of tiles."""
    cache = make_cache(Codec(128, 8), Codec(128, 4), 1, 2, 200, with_means=True)
    q = torch.randn(1, 14, 1, 128)
    return {"q": q} | cache.parts(True) | cache.means(True) | {"window": 150}


def calls() -> list[tuple[str, tuple[object, ...], dict[str, Any]]]:
    """In the order of `Results`."""
    found: list[tuple[str, tuple[object, ...], dict[str, Any]]] = []
    for x, weight in channels().values():
        in_columns = x.transpose(1, 2).contiguous().transpose(1, 2)
        found += [("causal_conv1d", (each, weight, None, None, False, None, "silu"), {}) for each in (x, in_columns)]
    for x, weight, state in one_token_calls().values():
        found.append(("causal_conv1d", (x, weight, None, state, True, None, "silu"), {}))
    for each in norms().values():
        found += [("rms_norm_gated", (*each, 1e-6, "silu", rounds), {}) for rounds in (False, True)]
    for x, g, weight in norms().values():
        found += [("rms_norm", (x, weight, each, 1e-6, True), {}) for each in (None, g)]
    found.append(("rms_norm_gated", (torch.ones_like(gates()), gates(), None, 0.0, "sigmoid"), {}))
    found += [("l2norm", (x,), {}) for x, *_ in norms().values()]
    heads = gates().T[None]  # [1, 1, HV]: whole vectors and a remainder
    found.append(("gdn_gating", (torch.zeros(heads.size(2)), heads, heads), {}))
    found += [("aura_decode", (), {**each, "rotated": True}) for each in codes().values()]
    return [*found, ("aura_attention", (), attention())]


@dataclass
class Results:
    """Of a process limited to one ISA variant."""

    convolutions: dict[torch.dtype, tuple[Tensor, Tensor]]  # of rows and of columns
    one_token_calls: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]]  # y, and the state afterwards
    norms: dict[torch.dtype, tuple[Tensor, Tensor]]  # with one rounding, and where transformers rounds
    hidden_norms: dict[torch.dtype, tuple[tuple[Tensor, Tensor], ...]]  # without a residual, and with one
    sigmoid: Tensor
    l2norms: dict[torch.dtype, Tensor]
    gates: tuple[Tensor, Tensor]  # g and beta
    decoded: dict[tuple[int, int], Tensor]
    attention: Tensor


@pytest.fixture(scope="module", params=CAPABILITIES)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp(request.param)
    there, back = directory / "calls.pt", directory / "results.pt"
    torch.save(calls(), there)
    environment = os.environ | {"ATEN_CPU_CAPABILITY": request.param.lower()}
    subprocess.run([sys.executable, "-c", PROGRAM, there, back], check=True, env=environment)
    found, of_calls = torch.load(back)
    if found != request.param:
        pytest.skip(f"this machine has no {request.param}")
    left = iter(of_calls)
    convolutions = {dtype: (next(left)[0], next(left)[0]) for dtype in BOUND}
    of_one_token = {each: next(left) for each in one_token_calls()}
    of_norms = {dtype: (next(left), next(left)) for dtype in BOUND}
    hidden_norms = {dtype: (next(left), next(left)) for dtype in BOUND}
    sigmoid, l2norms, of_gates = next(left), {dtype: next(left) for dtype in BOUND}, next(left)
    decoded = {each: next(left) for each in codes()}
    return Results(convolutions, of_one_token, of_norms, hidden_norms, sigmoid, l2norms, of_gates, decoded, next(left))


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_convolves_rows_and_columns(results: Results, dtype: torch.dtype) -> None:
    x, weight = channels()[dtype]
    exact = reference.causal_conv1d(x.double(), weight.double(), activation="silu")[0]
    rows, columns = results.convolutions[dtype]
    assert_close("y", rows, exact, BOUND[dtype], head_dim=2)
    assert torch.equal(rows, columns), "of the same elements the same bits"


@pytest.mark.parametrize("S", [3, 4])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_convolves_one_token(results: Results, dtype: torch.dtype, S: int) -> None:
    x, weight, state = (each.double() for each in one_token_calls()[dtype, S])
    y, after = results.one_token_calls[dtype, S]
    exact, exact_state = reference.causal_conv1d(x, weight, None, state, True, activation="silu")
    assert_close("y", y, exact, BOUND[dtype], head_dim=None)
    assert torch.equal(after.double(), exact_state), "a state is a copy, bit for bit"


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_normalises(results: Results, dtype: torch.dtype) -> None:
    x, g, weight = (each.double() for each in norms()[dtype])
    once, thrice = results.norms[dtype]
    exact = reference.rms_norm_gated(x, g, weight)
    assert_close("y", once, exact, BOUND[dtype], head_dim=1)
    if dtype == torch.float32:
        assert_close("y", thrice, exact, 5e-7, head_dim=1)
        return
    product = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight.to(dtype)
    expected = (product.double() * torch.nn.functional.silu(g)).to(dtype)
    assert (thrice != expected).sum() < 0.002 * expected.numel(), "a sum of another order rounds another way"


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_normalises_sums(results: Results, dtype: torch.dtype) -> None:
    x, g, weight = (each.double() for each in norms()[dtype])
    (y, _), (of_sum, h) = results.hidden_norms[dtype]
    assert_close("y", y, reference.rms_norm(x, weight, None, 1e-6, True)[0], BOUND[dtype], head_dim=1)
    assert_close("y of the sum", of_sum, reference.rms_norm(x, weight, g, 1e-6, True)[0], BOUND[dtype], head_dim=1)
    assert_same_bits("h", h, (x.float() + g.float()).to(dtype))


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_l2norm(results: Results, dtype: torch.dtype) -> None:
    x = norms()[dtype][0].double()
    assert_close("y", results.l2norms[dtype], reference.l2norm(x), BOUND[dtype], head_dim=1)


def test_gates(results: Results) -> None:
    x = gates().T[None].double()
    g, beta = (each.double() for each in results.gates)
    torch.testing.assert_close(g, -torch.nn.functional.softplus(x), rtol=5e-7, atol=2**-125, equal_nan=True)
    torch.testing.assert_close(beta, x.sigmoid(), rtol=4e-7, atol=2**-125, equal_nan=True)


def test_exp_has_no_gaps(results: Results) -> None:
    """Of every size, through the sigmoid of a gate: 1 / (1 + exp(-x))."""
    exact = gates().double().sigmoid()
    torch.testing.assert_close(results.sigmoid.double(), exact, rtol=4e-7, atol=2**-125, equal_nan=True)


def test_looks_codes_up(results: Results) -> None:
    for (D, bits), found in results.decoded.items():
        exact = reference.aura_decode(**codes()[D, bits], rotated=True)
        assert torch.equal(found, exact), f"{bits} bits, D = {D}"


def test_attends_to_codes(results: Results) -> None:
    exact = reference.aura_attention(**(attention() | {"q": attention()["q"].double()}))
    assert_close("o", results.attention, exact, 1e-6, head_dim=1)
