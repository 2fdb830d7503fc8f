"""Tests the causal convolution, functional: values, states of any width, packed sequences, segments, layouts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run, launched, on_a_mac, profiled, ready
from tests.helpers.errors import assert_close, assert_same_bits
from tests.helpers.prefill import on_mps
from torch_gdn import reference
from torch_gdn_check.registry.bounds import ROUNDING

CU_SEQLENS = [0, 0, 2, 37, 37, 70]  # two are empty, one is shorter than W, and one is longer than a block of 32 tokens


def convolve(device: torch.device, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Runs the op, asserts that its kernel ran, and returns the results on the CPU."""
    on_device = [x.to(device) if isinstance(x, Tensor) else x for x in arguments]
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    y, state = launched(device, "causal_conv1d", torch.ops.gdn.causal_conv1d, *on_device, **options)
    return y.cpu(), state.cpu()


def check(device: torch.device, x: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> None:
    y, state = convolve(device, x, weight, *arguments, **options)
    in_f64 = [a.double() if isinstance(a, Tensor) else a for a in (x, weight, *arguments)]
    exact_y, exact_state = reference.causal_conv1d(*in_f64, **options)
    assert y.dtype == x.dtype and y.is_contiguous()
    assert_close("y", y, exact_y, ROUNDING[x.dtype], head_dim=2)
    if exact_state is not None:
        assert torch.equal(state.double(), exact_state), "a state is a copy, bit for bit"


def inputs(T: int, D: int = 12, W: int = 4, B: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Returns x, weight, bias, and a state of W columns."""
    shapes = ((B, T, D), (D, W), (D,), (B, D, W))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


@pytest.mark.sweep(2, of="dtype")
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("D", [12, 131, 140])  # 140 fills one simdgroup's vectors of channels and a part of the next
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, W: int, D: int) -> None:
    x, weight, bias, state = inputs(39, D, W, dtype=dtype)
    check(device, x, weight, bias, torch.randn(x.shape).to(dtype), state, True, None, "silu")


def test_taps_with_a_gap_after_each_channel(device: torch.device) -> None:
    x, weight, _, _ = inputs(39, 140)
    y, _ = convolve(device, x, torch.nn.functional.pad(weight, (0, 4)).to(device)[:, :4])
    assert_close("y", y, reference.causal_conv1d(x.double(), weight.double())[0], ROUNDING[x.dtype], head_dim=2)


@pytest.mark.parametrize("T", [1, 2, 3, 16, 17, 32, 33])
@pytest.mark.parametrize("S", [3, 4, 7])
def test_states_of_any_width(device: torch.device, T: int, S: int) -> None:
    """W - 1 is Dao's width; W is FLA's and transformers'. The kernel changes at 16 tokens, and blocks have 32."""
    x, weight, bias, _ = inputs(T)
    for state in (torch.randn(2, 12, S), torch.randn(2, S, 12).mT):
        check(device, x, weight, bias, None, state, True)


@pytest.mark.parametrize("width", [None, 3, 6])
def test_a_final_state_without_an_initial_one(device: torch.device, width: int | None) -> None:
    x, weight, bias, _ = inputs(2)
    check(device, x, weight, bias, None, None, True, width)


def test_without_tokens_the_state_stays(device: torch.device) -> None:
    x, weight, bias, state = inputs(0)
    y, final_state = convolve(device, x, weight, bias, None, state, True)
    assert y.shape == x.shape
    assert_same_bits("state", final_state, state)
    final_state = torch.ops.gdn.causal_conv1d(x.to(device), weight.to(device), output_final_state=True)[1]
    assert torch.equal(final_state.cpu(), torch.zeros(2, 12, 4))


def test_dtypes_of_weight_and_state_may_be_others(device: torch.device) -> None:
    x, weight, bias, state = inputs(20, dtype=torch.bfloat16)
    check(device, x, torch.randn(12, 4), torch.randn(12), None, torch.randn(2, 12, 4), True)
    _, final_state = convolve(device, x, weight, bias, None, state.float(), True)
    assert final_state.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_packed_sequences_are_those_alone(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias, _ = inputs(CU_SEQLENS[-1], B=1)
    state = torch.randn(len(CU_SEQLENS) - 1, 12, 4)
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=dtype)
    check(device, x, weight, bias, None, state, True, None, "silu", cu_seqlens=cu_seqlens)
    y, final_state = convolve(device, x, weight, bias, None, state, True, cu_seqlens=cu_seqlens)
    for n, (first, last) in enumerate(pairwise(CU_SEQLENS)):
        alone, alone_state = convolve(device, x[:, first:last], weight, bias, None, state[n : n + 1], True)
        assert_same_bits("y", y[:, first:last], alone)
        assert_same_bits("state", final_state[n : n + 1], alone_state)


def test_few_packed_tokens(device: torch.device) -> None:
    x, weight, bias, _ = inputs(7, B=1)
    cu_seqlens = torch.tensor([0, 1, 1, 6, 7])
    check(device, x, weight, bias, None, torch.randn(4, 12, 3), True, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("T", [5, 40])
def test_two_calls_are_one(device: torch.device, T: int) -> None:
    x, weight, bias, state = inputs(T)
    y, final_state = convolve(device, x, weight, bias, None, state, True)
    for cut in (1, 2, T - 1):
        first, between = convolve(device, x[:, :cut], weight, bias, None, state, True)
        second, last = convolve(device, x[:, cut:], weight, bias, None, between, True)
        assert_same_bits("y", torch.cat([first, second], 1), y)
        assert_same_bits("state", last, final_state)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_segments_do_not_see_each_other(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias, _ = inputs(40)
    runs = torch.tensor([[0] * 2 + [1] * 30 + [3] * 8, [0] * 31 + [-1] * 3 + [2] + [5] * 5], dtype=dtype)
    check(device, x, weight, bias, activation="swish", seq_idx=runs, residual=x)
    x[1, 20] = torch.nan
    y, _ = convolve(device, x, weight, bias, seq_idx=runs)
    assert y[1, 31:].isfinite().all() and torch.equal(y[1, 31:34], torch.zeros(3, 12))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_neighbouring_tokens_have_a_kernel_of_their_own(device: torch.device, dtype: torch.dtype) -> None:
    """Tiles have 64 tokens and 32 channels. Packed sequences cross them, with segments, an initial state and any W."""
    across = inputs(140, 35, 3, 1, dtype)[0].transpose(1, 2).contiguous().transpose(1, 2)
    _, weight, bias, _ = inputs(0, 35, 3, 1, dtype)
    cu_seqlens = torch.tensor([0, 0, 2, 67, 140])
    states, runs = torch.randn(4, 35, 5), torch.tensor([[0] * 63 + [1] * 66 + [-1] * 11])
    with kernels_run(device, "causal_conv1d_channel_first"):
        check(device, across, weight, bias, across, states, True, None, "silu", cu_seqlens=cu_seqlens)
        check(device, across, weight, bias, activation="silu", seq_idx=runs)
        check(device, across[:, :3], weight[:, :2], bias)


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not count allocated bytes")
def test_prefill_copies_nothing() -> None:
    """x is a transposed view of a projection. y splits into q, k, v with a last stride of 1."""
    ready("mps")
    projection, weight = torch.randn(2, 64, 128).to("mps"), torch.randn(128, 4).to("mps")
    with profiled() as profile:
        y = torch_gdn.causal_conv1d_fn(projection.transpose(1, 2), weight, activation="silu")
        q, k, v = y.transpose(1, 2).split([32, 32, 64], dim=-1)
        torch.ops.gdn.causal_conv1d(projection.transpose(0, 1), weight)
    assert all(part.stride() == (64 * 128, 128, 1) for part in (q, k, v))
    assert list(profile.kernels) == ["causal_conv1d_float_float_float_4_4"]
    # PyTorch rounds up the sizes of two outputs and two empty final states.
    assert 2 * projection.nbytes <= profile.allocated_bytes < 2 * projection.nbytes + 1024, str(profile)


@pytest.mark.parametrize("T", [4, 40])
def test_nan_stays_in_its_channel_and_sequence(device: torch.device, T: int) -> None:
    x, weight, bias, state = inputs(2 * T, B=1)
    state = torch.cat([state, state])[:2]
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, T, 2 * T]), "activation": "silu"}
    clean, _ = convolve(device, x, weight, bias, None, state, True, **options)
    x[0, T - 2, 5], state[1, 7, 0], state[1, 3, 3] = torch.nan, torch.nan, torch.inf
    y, final_state = convolve(device, x, weight, bias, None, state, True, **options)
    expected = clean.clone()
    expected[0, T - 2 : T, 5] = torch.nan
    expected[0, T : T + 3, 3] = y[0, T : T + 3, 3]
    assert not y[0, T : T + 3, 3].isfinite().all()
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert final_state[0, 5, 2].isnan() and final_state.isnan().sum() <= 2


@on_mps()  # the CPU's checks are in tests/gdn/test_errors.py
def test_wrong_cu_seqlens_on_the_device_are_reported(device: torch.device) -> None:
    x, weight, *_ = inputs(40, B=1)
    for T in (40, 9):
        cu_seqlens = torch.tensor([0, 50, 20, T]).to(device)
        here = x[:, :T].to(device)
        torch.ops.gdn.causal_conv1d(here, weight.to(device), output_final_state=True, cu_seqlens=cu_seqlens)
        with pytest.raises(RuntimeError, match="cu_seqlens"):
            torch.mps.synchronize()


class TestPublicFunctions:
    def test_fla(self, device: torch.device) -> None:
        x, weight, bias, state = (each.to(device) for each in inputs(6))
        with kernels_run(device, "causal_conv1d"):
            y, final_state = torch_gdn.causal_conv1d(x, weight, bias, None, state, True, "silu")
        here = [each.cpu().double() for each in (x, weight, bias, state)]
        exact = reference.causal_conv1d(*here[:3], None, here[3], True, None, "silu")
        assert_close("y", y, exact[0], ROUNDING[torch.float32], head_dim=None)
        assert final_state is not None and torch.equal(final_state.cpu().double(), exact[1])
        assert torch_gdn.causal_conv1d(x, weight)[1] is None

    def test_fla_with_heads_and_a_residual(self, device: torch.device) -> None:
        """The sum with the residual is rounded once."""
        x, weight, bias, _ = inputs(6, dtype=torch.bfloat16)
        residual, on_device = torch.randn(2, 6, 3, 4).bfloat16(), [each.to(device) for each in (weight, bias)]
        y, _ = torch_gdn.causal_conv1d(x.view(2, 6, 3, 4).to(device), *on_device, residual=residual.to(device))
        exact = reference.causal_conv1d(x.double(), weight.double(), bias.double())[0] + residual.view(x.shape)
        assert_close("y", y.view(x.shape), exact, ROUNDING[x.dtype], head_dim=2)

    @pytest.mark.parametrize("columns", [3, 4])
    def test_dao(self, device: torch.device, columns: int) -> None:
        x, weight, bias, _ = (each.to(device) for each in inputs(6))
        states = torch.randn(2, 12, columns, device=device)
        expected, expected_state = torch.ops.gdn.causal_conv1d(x, weight, bias, None, states, True, None, "silu")
        out = torch.empty_like(states)
        y, final = torch_gdn.causal_conv1d_fn(x.transpose(1, 2), weight, bias, None, states, True, out, "silu")
        assert_same_bits("y", y, expected.transpose(1, 2))
        assert_same_bits("state", final, expected_state)
        assert final is out

    def test_dao_s_states_have_one_column_less_than_the_weight(self, device: torch.device) -> None:
        x, weight, *_ = (each.to(device) for each in inputs(6))
        _, final = torch_gdn.causal_conv1d_fn(x.transpose(1, 2), weight, return_final_states=True)
        assert_same_bits("state", final, x[:, -3:].transpose(1, 2))
