"""Tests the in-place convolution: a pool of states with slots, null rows, sequences that restart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import causal_conv1d_interface, reference
from torch_gdn_check.registry.bounds import ROUNDING

D = 12


def padded_pool(slots: int, S: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns [slots, D, S] with 7 elements between slots."""
    return torch.randn(slots, D * S + 7).to(dtype)[:, : D * S].view(slots, D, S)


def update(device: torch.device, x: Tensor, weight: Tensor, pool: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns y and the updated pool on the CPU. The call's pool has the strides of `pool`."""
    whole = pool if pool._base is None else pool._base
    on_device = whole.clone().to(device).as_strided(pool.shape, pool.stride(), pool.storage_offset())
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    with kernels_run(device, "causal_conv1d"):
        y = torch.ops.gdn.causal_conv1d_update_(x.to(device), weight.to(device), on_device, **options)
    return y.cpu(), on_device.cpu()


def check(device: torch.device, x: Tensor, weight: Tensor, pool: Tensor, **options: Any) -> None:
    y, new_pool = update(device, x, weight, pool, **options)
    exact_pool = pool.double()
    in_f64 = {name: value.double() if name == "bias" else value for name, value in options.items()}
    exact = reference.causal_conv1d_update_(x.double(), weight.double(), exact_pool, **in_f64)
    assert_close("y", y, exact, ROUNDING[x.dtype], head_dim=2)
    assert_same_bits("pool", new_pool, exact_pool.to(pool.dtype))


@pytest.mark.parametrize("T", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("S", [3, 4, 6])
def test_moves_the_states_on(device: torch.device, T: int, S: int) -> None:
    x, weight, bias = torch.randn(3, T, D), torch.randn(D, 4), torch.randn(D)
    check(device, x, weight, padded_pool(3, S), bias=bias, activation="silu", residual=torch.randn(3, T, D))


@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("null_index", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots(device: torch.device, T: int, null_index: int, dtype: torch.dtype) -> None:
    """0 is a slot or the null index. Unused slots keep their bits."""
    indices = torch.tensor([5, -1, 0, 2, -7, 3], dtype=dtype)
    has_state = torch.tensor([True, True, True, False, True, True])
    options: dict[str, Any] = {"state_indices": indices, "has_initial_state": has_state, "null_index": null_index}
    x, weight, pool = torch.randn(6, T, D), torch.randn(D, 4), padded_pool(7)
    pool[2] = torch.nan  # the sequence in this slot restarts
    check(device, x, weight, pool, **options)
    y, new_pool = update(device, x, weight, pool, **options)
    null = indices <= null_index
    assert torch.equal(y[null], torch.zeros_like(y[null])) and y[~null].abs().sum() > 0
    untouched = [slot for slot in range(7) if slot not in indices[~null].tolist()]
    assert_same_bits("pool", new_pool[untouched], pool[untouched])


@pytest.mark.parametrize("tokens", [7, 70])
def test_packed_prefill(device: torch.device, tokens: int) -> None:
    cu_seqlens = torch.tensor([0, 1, 1, tokens - 3, tokens])
    check(
        device,
        torch.randn(1, tokens, D),
        torch.randn(D, 4),
        padded_pool(6, 3),
        residual=torch.randn(1, tokens, D),
        cu_seqlens=cu_seqlens,
        state_indices=torch.tensor([4, 1, -1, 0], dtype=torch.int32),
        has_initial_state=torch.tensor([True, False, True, True]),
    )


@pytest.mark.parametrize("S", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transposed_slots(device: torch.device, S: int, dtype: torch.dtype) -> None:
    """The pool is vLLM's [slots, S, D], transposed. The last sequence starts anew."""
    channels = 40  # some whole vectors and a part of one
    pool = torch.randn(4, S, channels).to(dtype).transpose(1, 2)
    x, weight = torch.randn(3, 1, channels).to(dtype), torch.randn(channels, 4).to(dtype)
    flags = torch.tensor([True, True, False])
    check(device, x, weight, pool, state_indices=torch.tensor([2, 1, 3]), has_initial_state=flags, residual=x)


@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_many_columns_as_taps_before(device: torch.device, dtype: torch.dtype, W: int, T: int) -> None:
    """States have W - 1 columns, and the channels fill several simdgroups and a part of one. The last sequence starts
    anew.
    """
    channels = 170
    x, weight = torch.randn(3, T, channels).to(dtype), torch.randn(channels, W).to(dtype)
    pool, flags = torch.randn(5, channels, W - 1).to(dtype), torch.tensor([True, True, False])
    check(device, x, weight, pool, state_indices=torch.tensor([4, 1, 3]), has_initial_state=flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_pool_has_its_own_dtype(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 5, D).bfloat16(), torch.randn(D, 4).bfloat16()
    check(device, x, weight, padded_pool(2, 4, dtype))


def test_without_tokens_only_a_reset_state_changes(device: torch.device) -> None:
    pool = torch.randn(2, D, 4)
    expected = pool.clone()
    expected[1] = 0
    on_device = pool.clone().to(device)
    torch.ops.gdn.causal_conv1d_update_(
        torch.empty(2, 0, D, device=device),
        torch.randn(D, 4, device=device),
        on_device,
        has_initial_state=torch.tensor([True, False], device=device),
    )
    assert_same_bits("pool", on_device, expected)


def test_a_saved_pool_is_seen_to_change() -> None:
    """Autograd refuses the backward pass of a result if its pool has been updated since."""
    pool, factor = torch.randn(1, D, 4), torch.ones(1, requires_grad=True)
    product = (factor * pool).sum()
    torch.ops.gdn.causal_conv1d_update_(torch.randn(1, 1, D), torch.randn(D, 4), pool)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


class TestPublicFunctions:
    @pytest.mark.parametrize("shape", [(3, D), (1, 3, D), (3, 1, D)], ids=str)
    def test_fla(self, device: torch.device, shape: tuple[int, ...]) -> None:
        x, weight, cache = torch.randn(shape).to(device), torch.randn(D, 4).to(device), torch.randn(3, D, 4).to(device)
        expected_cache, residual = cache.clone(), torch.randn(shape).to(device)
        expected = torch.ops.gdn.causal_conv1d_update_(
            x.view(3, 1, D), weight, expected_cache, activation="silu", residual=residual.view(3, 1, D)
        )
        y, same = torch_gdn.causal_conv1d_update(x, cache, residual, weight, activation="silu")
        assert same is cache and y.shape == x.shape
        assert_same_bits("y", y, expected.view(shape))
        assert_same_bits("cache", cache, expected_cache)

    @pytest.mark.parametrize("T", [None, 1, 3])
    def test_dao(self, device: torch.device, T: int | None) -> None:
        x = torch.randn(3, D) if T is None else torch.randn(3, D, T)
        weight, states = torch.randn(D, 4).to(device), torch.randn(3, D, 4).to(device)
        expected_states = states.clone()
        rows = x.view(3, D, -1).transpose(1, 2).to(device)
        expected = torch.ops.gdn.causal_conv1d_update_(rows, weight, expected_states, activation="silu")
        y = causal_conv1d_interface.causal_conv1d_update(x.to(device), states, weight, None, "silu")
        assert_same_bits("y", y, expected.transpose(1, 2).reshape(x.shape))
        assert_same_bits("states", states, expected_states)

    def test_dao_with_indices(self, device: torch.device) -> None:
        x, weight, states = torch.randn(2, D), torch.randn(D, 4), torch.randn(3, D, 4)
        indices = torch.tensor([2, -1], dtype=torch.int32)
        expected = states.clone()
        reference.causal_conv1d_update_(x[:, None], weight, expected, indices)
        on_device = states.clone().to(device)
        y = causal_conv1d_interface.causal_conv1d_update(
            x.to(device), on_device, weight.to(device), conv_state_indices=indices.to(device)
        )
        assert_same_bits("states", on_device, expected)
        assert torch.equal(y[1].cpu(), torch.zeros(D))
