"""chunk_kda's kernels of a stage each on Metal, against the float64 recurrence: sizes of chunks and heads, dtypes,
decays where blocks and chunks of tokens meet."""

from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close, assert_same_bits
from tests.helpers.kda import CHUNKED, F32, assert_exact_kda, exact_kda, inputs_and_options, kda_inputs
from tests.helpers.prefill import forced
from torch_gdn.testing.inputs import to_device

NAME = "chunk_kda"
pytestmark = pytest.mark.parametrize("device", forced(("chunked",)), indirect=True)
each_chunk_size = pytest.mark.parametrize("chunk_size", [16, 32, 64])


@pytest.mark.parametrize("T", [1, 9, 16, 65])
@each_chunk_size
def test_lengths(device: torch.device, chunk_size: int, T: int) -> None:
    assert_exact_kda(NAME, kda_inputs(T, 32, 32), device, chunk_size=chunk_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    names = {torch.float32: "float_float", torch.bfloat16: "bfloat_bfloat", torch.float16: "half_float"}
    with kernels_run(device, f"kda_chunk_fwd_intra_{names[dtype]}_64_48_64"):
        assert_exact_kda(NAME, kda_inputs(70, 64, 48, B=2, H=2, HV=4, dtype=dtype), device)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (33, 65), (60, 100), (128, 32), (256, 9)])
def test_sizes(device: torch.device, K: int, V: int) -> None:
    assert_exact_kda(NAME, kda_inputs(70, K, V, HV=1), device)


@each_chunk_size
def test_channels_that_forget_beside_others_that_do_not(device: torch.device, chunk_size: int) -> None:
    inputs = kda_inputs(130)
    inputs["g"] = -20 * torch.rand_like(inputs["g"])
    inputs["g"][..., ::2] = -1e-3
    assert_exact_kda(NAME, inputs, device, chunk_size=chunk_size)


@pytest.mark.parametrize("reset", [-torch.inf, -1e4])
def test_resets(device: torch.device, reset: float) -> None:
    """Resets a whole head within 8 tokens, some channels at their first and last token, and a head twice."""
    inputs = kda_inputs(70, 32, 32)
    g = inputs["g"]
    g[:, 11, 0] = g[:, 16, :, ::3] = g[:, 31, :, 1::3] = g[:, 33:35, 1] = reset
    assert_exact_kda(NAME, inputs, device)


@pytest.mark.parametrize("beta", [1.0, 1.9])
@each_chunk_size
def test_repeated_keys(device: torch.device, chunk_size: int, beta: float) -> None:
    """The inverse of (I + A) grows with beta, and with it what the sums of A over the channels have lost."""
    inputs = kda_inputs(130)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"], inputs["g"] = beta * (1 - 0.1 * inputs["beta"]), 0.01 * inputs["g"]
    assert_exact_kda(NAME, inputs, device, chunk_size=chunk_size)


def test_a_state_that_hardly_decays(device: torch.device) -> None:
    """125 chunks that add nothing: a decay rounded alike in each of them is off by 3e-6 at the end."""
    inputs = kda_inputs(2000, 32, 8, HV=1)
    inputs["g"], inputs["beta"] = torch.full_like(inputs["g"], -5e-5), torch.zeros_like(inputs["beta"])
    assert_exact_kda(NAME, inputs, device, chunk_size=16)


def test_thousands_of_tokens(device: torch.device) -> None:
    inputs = kda_inputs(4096, 32, 16, HV=1)
    inputs["g"] = -20 * torch.rand_like(inputs["g"])
    assert_exact_kda(NAME, inputs, device)


def test_options(device: torch.device) -> None:
    inputs, options = inputs_and_options(40)
    assert_exact_kda(NAME, inputs, device, **options)


def test_a_sequence_without_a_slot_is_zeros(device: torch.device) -> None:
    """Its tokens may be the padding of a server's batch: NaN."""
    inputs = kda_inputs(40, 32, 16, B=2)
    del inputs["initial_state"]
    for x in inputs.values():
        x[1] = torch.nan
    pool = torch.zeros(4, 2, 32, 16, device=device)
    slots = torch.tensor([2, -1], device=device)
    o = torch_gdn.chunk_kda_(**to_device(inputs, device), state_pool=pool, state_indices=slots)
    assert (o[1] == 0).all() and not o[0].isnan().any() and not pool.isnan().any()


def test_rows_that_are_not_aligned(device: torch.device) -> None:
    inputs = kda_inputs(20, 32, 16)
    there = to_device(inputs, device)
    for name in ("q", "k", "v", "g"):
        padded = torch.zeros(inputs[name].numel() + 1, device=device)
        there[name] = padded[1:].view(inputs[name].shape).copy_(inputs[name])
    with kernels_run(device, *CHUNKED):
        o, _ = torch_gdn.chunk_kda(**there)
    assert_close("o", o.cpu(), exact_kda(inputs)[0], F32)


def test_heads_of_views_are_those_of_their_copies(device: torch.device) -> None:
    """q, k, v and g of one projection, heads before tokens."""
    inputs = to_device(kda_inputs(70, 32, 32, B=2, H=2), device)
    stacked = torch.stack([inputs[name] for name in "qkvg"]).permute(3, 1, 2, 0, 4).contiguous()
    views = {name: stacked.permute(3, 1, 2, 0, 4)[i] for i, name in enumerate("qkvg")}
    assert not any(x.is_contiguous() for x in views.values())
    assert_same_bits("o", torch_gdn.chunk_kda(**(inputs | views))[0], torch_gdn.chunk_kda(**inputs)[0])
