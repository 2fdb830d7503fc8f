"""Tests that the end-to-end op equals float64 attention to the decoded keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close, assert_same_bits
from tests.helpers.pairwise import pairwise
from tests.helpers.prefill import on_mps
from torch_gdn import reference
from torch_gdn_check.registry.aura import BITS, HEAD_SIZES, Codec, make_cache
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.models import DTYPES

BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
KERNELS = ("aura_rotate", "aura_flash_p1", "aura_flash_p2")
FACTORS: dict[str, tuple[Any, ...]] = {
    "key_bits": BITS,
    "value_bits": BITS,
    "D": HEAD_SIZES,
    "ratio": (1, 2, 3, 8),
    "L": (1, 2, 7, 33),
    "T": (1, 63, 128, 300),
    "offset": ("last", "earlier", "later"),
    "mask": ("causal", "all", "window of 1", "window of 50"),
    "dtype": DTYPES,
    "trellis": (False, True),
    "tile_means": (False, True),
    "sinks": (False, True),
    "starts": (False, True),
    "block_size": (None, 16, 64, 512),
    "exact": ((0, 0), (3, 3), (132, 4), (260, 0)),  # the number of exact rows, and how many of them precede the codes
}
CASES = pairwise(FACTORS)
Call = dict[str, Any]


def make_call(case: dict[str, Any], B: int = 2, HK: int = 2) -> Call:
    D, L, T, HQ = case["D"], case["L"], case["T"], HK * case["ratio"]
    key, value = (Codec(D, case[f"{name}_bits"], seed, case["trellis"]) for name, seed in (("key", 3), ("value", 4)))
    cache = make_cache(key, value, B, HK, T)
    call: Call = {"q": 1.5 * torch.randn(B, L, HQ, D).to(case["dtype"]).transpose(1, 2)}
    call |= cache.parts(True)
    if case["tile_means"]:
        call["key_tile_means"] = torch.randn(B, -(-T // 128) + 1, HK, D).half().transpose(1, 2)
    call |= exact_rows(case["exact"], (B, HK, D), case["dtype"])
    tokens = T + case["exact"][0]
    call["q_offset"] = {"last": None, "earlier": max(0, tokens // 2 - L), "later": tokens + 3}[case["offset"]]
    call["causal"] = case["mask"] != "all"
    call["window"] = {"window of 1": 1, "window of 50": 50}.get(case["mask"], 0)
    call["sinks"] = torch.randn(HQ) if case["sinks"] else None
    call["starts"] = torch.tensor([T // 3, 0], dtype=torch.int32)[:B] if case["starts"] else None
    return call | {"block_size": case["block_size"]}


def exact_rows(exact: tuple[int, int], sizes: tuple[int, int, int], dtype: torch.dtype) -> Call:
    """Returns exact rows in a layout of their own. The two rows after them must not be read."""
    (length, sinks), (B, HK, D) = exact, sizes
    if length == 0:
        return {}
    call: Call = {"exact_sinks": sinks, "exact_length": length}
    for name in ("exact_keys", "exact_values"):
        rows = torch.randn(B, length + 2, HK, D)
        rows[:, length:] = torch.nan
        call[name] = rows.to(dtype).transpose(1, 2)
    return call


def attend(device: torch.device, call: Call) -> Tensor:
    others = {"aura_flash_exact": "exact_keys", "aura_tile_scores": "key_tile_means"}
    with kernels_run(device, *KERNELS, *(kernel for kernel, argument in others.items() if argument in call)):
        o = torch_gdn.aura_attention(**to_device(call, device))
    assert o.dtype == call["q"].dtype and o.is_contiguous()
    return o.cpu()


def exact(call: Call) -> Tensor:
    return reference.aura_attention(**(call | {"q": call["q"].double()}))


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.").replace(" ", "_") for value in case.values())


@pytest.mark.sweep(16)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_pair_of_options(device: torch.device, case: dict[str, Any]) -> None:
    call = make_call(case)
    assert_close("o", attend(device, call), exact(call), BOUND[case["dtype"]], head_dim=1)


@pytest.mark.parametrize("L", [1, 7])
@pytest.mark.parametrize("D", [80, 512])
def test_exact_rows_alone(device: torch.device, D: int, L: int) -> None:
    """Without codes, the result is attention to the exact rows. Their number is odd, and they are not aligned."""
    options = {"D": D, "L": L, "T": 0, "tile_means": True, "exact": (131, 5)}
    call = make_call(PLAIN | options) | {"starts": torch.tensor([2, 0])}
    for name in ("exact_keys", "exact_values"):
        rows = call[name]
        call[name] = rows.new_zeros(*rows.shape[:3], D + 1)[..., 1:].copy_(rows)
    with kernels_run(device, "aura_flash_exact", "aura_flash_p2"):
        o = torch_gdn.aura_attention(**to_device(call, device)).cpu()
    assert_close("o", o, exact(call), BOUND[torch.float32], head_dim=1)


def check_long_cache(device: torch.device, T: int, bits: tuple[int, int], D: int, HK: int, ratio: int, L: int) -> None:
    """Compares with PyTorch's own attention in float64."""
    cache = make_cache(Codec(D, bits[0]), Codec(D, bits[1], 4), 1, HK, T)
    call: Call = {"q": torch.randn(1, HK * ratio, L, D)} | cache.parts(True)
    k, v = (
        reference.aura_decode(codes, norms, codec.codebook, codec.signs, dtype=torch.float64)
        for codec, (codes, norms) in ((cache.key, cache.keys), (cache.value, cache.values))
    )
    mask = torch.ones(L, T, dtype=torch.bool).tril(T - L)
    expected = scaled_dot_product_attention(call["q"].double(), k, v, attn_mask=mask, enable_gqa=True)
    assert_close("o", attend(device, call), expected, BOUND[torch.float32], head_dim=1)


@pytest.mark.parametrize(
    ("key_bits", "value_bits", "D", "ratio", "L"), [(8, 4, 128, 4, 1), (4, 2, 256, 2, 5), (3, 3, 80, 1, 40)]
)
def test_a_long_cache(key_bits: int, value_bits: int, D: int, ratio: int, L: int) -> None:
    check_long_cache(torch.device("cpu"), 8192, (key_bits, value_bits), D, 2, ratio, L)


@on_mps()
@pytest.mark.parametrize(
    ("T", "D", "HK", "ratio", "L"), [(4096, 128, 2, 2, 1), (4096, 64, 1, 1, 8), (20_000, 64, 1, 2, 1)]
)
def test_a_long_cache_on_metal(device: torch.device, T: int, D: int, HK: int, ratio: int, L: int) -> None:
    check_long_cache(device, T, (4, 3), D, HK, ratio, L)


PLAIN: dict[str, Any] = {name: values[0] for name, values in FACTORS.items()} | {"D": 96, "T": 128, "L": 7, "ratio": 2}


def test_scale(device: torch.device) -> None:
    call = make_call(PLAIN) | {"scale": 0.3}
    assert_close("o", attend(device, call), exact(call), BOUND[torch.float32], head_dim=1)


@pytest.mark.parametrize("L", [1, 7, 40])
def test_a_window_begins_within_a_tile_of_means(device: torch.device, L: int) -> None:
    """A block holds three tiles. Kernels must not read keys of two tiles together."""
    options = {"L": L, "T": 300, "tile_means": True, "mask": "window of 50", "block_size": 512}
    call = make_call(PLAIN | options)
    assert_close("o", attend(device, call), exact(call), BOUND[torch.float32], head_dim=1)


@pytest.mark.parametrize("L", [1, 7])
def test_queries_that_see_nothing_give_zeros(device: torch.device, L: int) -> None:
    call = make_call(PLAIN | {"L": L}) | {"starts": torch.tensor([128, 0]), "sinks": torch.randn(4)}
    o = attend(device, call)
    assert (o[0] == 0).all()
    assert_close("o", o[1], exact(call)[1], BOUND[torch.float32], head_dim=0)


@pytest.mark.parametrize("L", [1, 7])
@pytest.mark.parametrize("which", ["key_norms", "value_norms"])
def test_what_is_not_finite_reaches_those_that_see_it(device: torch.device, L: int, which: str) -> None:
    """Two tokens of row 0 and KV head 1 have NaN. Only the last query sees the first, and the second is padding."""
    call = make_call(PLAIN | {"L": L}) | {"starts": torch.tensor([3, 0])}
    before = attend(device, call)
    call[which][0, 1, 127] = torch.nan
    call[which][0, 1, 1] = torch.nan
    after = attend(device, call)
    spoilt = torch.zeros(2, 4, L, 1, dtype=torch.bool)
    spoilt[0, 2:, -1] = True
    assert after.isnan().eq(spoilt).all()
    assert torch.equal(after.masked_fill(spoilt, 0), before.masked_fill(spoilt, 0))


@pytest.mark.parametrize(("L", "T"), [(3, 0), (0, 20)])
def test_no_keys_or_no_queries(device: torch.device, L: int, T: int) -> None:
    call = make_call(PLAIN | {"L": L, "T": T})
    assert torch.equal(torch_gdn.aura_attention(**to_device(call, device)).cpu(), torch.zeros(2, 4, L, 96))


@pytest.mark.parametrize("length", [0, 1, 63, 128])
@pytest.mark.parametrize("L", [1, 40])
def test_length(device: torch.device, L: int, length: int) -> None:
    """With `length`, the result has the bits of a sliced cache. The tokens after `length` are not read."""
    call = make_call(PLAIN | {"L": L, "T": 128, "tile_means": True, "block_size": None})
    cached = ("key_codes", "key_norms", "value_codes", "value_norms")
    sliced = call | {name: call[name][:, :, :length].clone() for name in cached}
    for name in cached:
        call[name][:, :, length:] = -1 if name.endswith("codes") else torch.nan
    o = torch_gdn.aura_attention(**to_device(call | {"length": length}, device)).cpu()
    assert_same_bits("o", o, torch_gdn.aura_attention(**to_device(sliced, device)).cpu())
    expected = exact(call | {"length": length})
    assert_close("o", o, expected, BOUND[torch.float32], head_dim=1)
