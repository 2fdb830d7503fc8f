from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.attention.test_reshape_and_cache import DTYPES, memory
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import qk_norm_rope, qk_norm_rope_and_cache_, reference
from torch_gdn_check.registry.attention import pool
from torch_gdn_check.registry.bounds import ROUNDING
from torch_gdn_check.registry.inputs import Call, to_device

CACHES = ("key_cache", "value_cache")
SLOTS = [17, -1, 0, 4, 5, -7, 19]  # out of 20, for 8 tokens


def make_call(
    D: int, P: int, dtype: torch.dtype, cache: torch.dtype, layout: str = "pages", normed: bool = True
) -> Call:
    """Makes two sequences of 4 tokens: 4 heads of q with their gates, and 3 of k and of v, in one projection."""
    projection = torch.randn(2, 4, 14, D).to(dtype)
    angles = 10 * torch.randn(2, 4, P)
    q, k, v = projection[:, :, 0:8:2], projection[:, :, 8:11], projection[:, :, 11:]
    call: Call = {"q": q, "k": k, "v": v, "cos": angles.cos(), "sin": angles.sin()}
    call |= dict(zip(CACHES, pool(4, 5, 3, D, cache, layout), strict=True))
    norm = {"q_weight": torch.rand(D), "k_weight": torch.rand(D), "eps": 1e-5, "zero_centered": True}
    return call | {"slot_mapping": torch.tensor(SLOTS)} | (norm if normed else {})


def compute(device: torch.device, call: Call) -> tuple[Tensor, Call]:
    """Returns q_out and the arguments on the device."""
    on_device = to_device(call, device)
    return launched(device, "qk_norm_rope_and_cache", qk_norm_rope_and_cache_, **on_device), on_device


@pytest.mark.sweep(4)
@pytest.mark.parametrize("layout", ["pages", "apart"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "P"), [(256, 32), (64, 32), (33, 7)])
def test_is_qk_norm_rope_and_then_reshape_and_cache(
    device: torch.device, D: int, P: int, dtype: torch.dtype, layout: str
) -> None:
    """Results are equal bit for bit, including the gaps of the caches."""
    call = make_call(D, P, dtype, dtype, layout)
    apart = to_device(call, device)
    options = {name: apart[name] for name in ("eps", "zero_centered")}
    names = ("q", "k", "cos", "sin", "q_weight", "k_weight")
    q, k = qk_norm_rope(*(apart[name] for name in names), **options)
    caches = [apart[name] for name in CACHES]
    torch_gdn.reshape_and_cache(k.flatten(0, 1), apart["v"].flatten(0, 1), *caches, apart["slot_mapping"])
    q_out, written = compute(device, call)
    assert_same_bits("q_out", q_out.cpu(), q.cpu())
    for name, cache in zip(CACHES, caches, strict=True):
        assert cache.isfinite().any()
        assert_same_bits(name, memory(written[name]), memory(cache))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("cache", DTYPES, ids=str)
def test_keys_are_rounded_once(device: torch.device, cache: torch.dtype, normed: bool) -> None:
    """q is in bfloat16, no vector fits the pages, and values have another size than keys."""
    call = make_call(64, 16, torch.bfloat16, cache, "padded", normed)
    call |= {"v": call["v"][..., :12], "value_cache": pool(4, 5, 3, 12, cache, "apart")[1]}
    exact = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
    expected = reference.qk_norm_rope_and_cache_(**exact)
    q_out, written = compute(device, call)
    assert_close("q_out", q_out.cpu(), expected, ROUNDING[torch.bfloat16])
    for name in CACHES:
        result, right = written[name].cpu(), exact[name]
        assert right.isfinite().any() and torch.equal(result.isfinite(), right.isfinite())
        assert_close(name, result.nan_to_num(), right.nan_to_num(), ROUNDING[cache])


def test_no_tokens_and_no_keys(device: torch.device) -> None:
    call = make_call(32, 8, torch.float32, torch.float32)
    tokens = {name: call[name][:, :0] for name in ("q", "k", "v", "cos", "sin")}
    none = to_device(call | tokens | {"slot_mapping": torch.tensor([], dtype=torch.int32)}, device)
    assert qk_norm_rope_and_cache_(**none).shape == (2, 0, 4, 32)
    q_out, written = compute(device, call)
    heads = {name: written[name][:, :, :0] for name in ("k", "v", *CACHES)}
    alone = qk_norm_rope_and_cache_(**(written | heads))
    assert_same_bits("q_out", alone.cpu(), q_out.cpu())
