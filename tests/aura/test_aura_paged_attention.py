"""Compares attention to pages of codes with attention in float64 to the decoded vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.attention.test_paged_attention import BOUND, DTYPES, SEQUENCES, exact, name_of
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close
from tests.helpers.pairwise import pairwise
from torch_gdn import reference
from torch_gdn.aura import Scheme
from torch_gdn.reference.aura import TILE
from torch_gdn_check.registry.attention import (
    add_exact_rows,
    aura_pages,
    make_call,
    means_of_pages,
    place_exact_rows,
    slot_means,
)
from torch_gdn_check.registry.aura import Codec
from torch_gdn_check.registry.inputs import Call, to_device

KERNELS = ("paged_rotate", "aura_paged_attention")
FACTORS: dict[str, tuple[Any, ...]] = {
    "sequences": tuple(SEQUENCES),
    "scheme": ("8v8", "8v4", "4v4t", "3v3", "2v3t"),
    "D": (64, 80, 96, 128, 256),
    "ratio": (1, 2, 8),
    "block_size": (16, 7, 128, 384),  # blocks of whole tiles have means
    "dtype": DTYPES,
    "mask": ("causal", "all", "window of 30"),
    "sinks": (False, True),
    "tail": (0, 24, 128),
}


def coded(call: Call, scheme: str) -> tuple[Call, Call]:
    """Returns the call with codes in its caches, and the call with the decoded vectors in float64."""
    D = call["q"].shape[-1]
    codes: Call = {name: x for name, x in call.items() if not name.endswith("_cache")}
    plain: Call = dict(call)
    of = Scheme(scheme)
    for name, bits, seed in (("key", of.key_bits, 3), ("value", of.value_bits, 4)):
        codec = Codec(D, bits, seed, of.trellis)
        cache = call[f"{name}_cache"]
        if name == "key" and cache.shape[1] % TILE == 0:
            codes["key_tile_means"] = means_of_pages(cache)
            means = slot_means(codes["key_tile_means"])
            pages, decoded = aura_pages(codec, cache - means)
            decoded += means
        else:
            pages, decoded = aura_pages(codec, cache)
        codes |= {f"{name}_codes": pages[0], f"{name}_norms": pages[1]}
        codes |= {f"{name}_codebook": codec.codebook, f"{name}_signs": codec.signs}
        plain[f"{name}_cache"] = decoded
    return codes, plain


def check(device: torch.device, call: Call, scheme: str, *kernels: str, tail: int = 0) -> None:
    codes, plain = coded(call, scheme)
    if tail:
        starts = [n % 2 * max(1, length - 40) for n, length in enumerate(call["seq_lens"].tolist())]
        codes = add_exact_rows(codes, tail, 4, starts)
        place_exact_rows(codes, {"key": plain["key_cache"], "value": plain["value_cache"]})
    moved = to_device(codes, device)
    with kernels_run(device, *KERNELS, *kernels):
        o = torch_gdn.aura_paged_attention(**moved)
    rows = int(call["cu_seqlens"][-1])
    assert (o[rows:] == 7).all()
    assert_close("o", o[:rows].cpu(), exact(plain), BOUND[call["q"].dtype], head_dim=1)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("case", pairwise(FACTORS), ids=name_of)
def test_every_pair_of_options(device: torch.device, case: dict[str, Any]) -> None:
    queries, keys = SEQUENCES[case["sequences"]]
    names = ("D", "block_size", "dtype")
    call = make_call(queries, keys, HQ=2 * case["ratio"], HK=2, **{name: case[name] for name in names})
    call |= {"causal": case["mask"] != "all", "window": 30 if case["mask"] == "window of 30" else 0}
    call |= {"sinks": torch.randn(2 * case["ratio"]) if case["sinks"] else None}
    check(device, call, case["scheme"], tail=case["tail"])


@pytest.mark.parametrize(("queries", "keys"), [([1, 1], [600, 1030]), ([2, 40], [2100, 70])])
def test_keys_divided_among_threadgroups(device: torch.device, queries: list[int], keys: list[int]) -> None:
    call = make_call(queries, keys, HQ=2, HK=1, D=64, block_size=128) | {"scale": 0.2, "sinks": torch.randn(2)}
    check(device, call, "8v4", "paged_attention_merge", tail=128)


def test_rows_of_padding_alone_are_not_written(device: torch.device) -> None:
    codes, _ = coded(make_call([0, 0], [5, 0], padding=2), "8v4")
    assert (torch_gdn.aura_paged_attention(**to_device(codes, device)) == 7).all()


@pytest.mark.parametrize(("queries", "window"), [(1, 184), (40, 184), (40, 160), (1, 150)])
@pytest.mark.parametrize("D", [64, 256])
def test_keys_that_are_read_together_have_two_means(device: torch.device, D: int, queries: int, window: int) -> None:
    """A block has three tiles. The window begins 12, 51 or 27 keys before the second one, or 22 behind its start."""
    call = make_call([queries], [300], HQ=2, HK=1, D=D, block_size=384) | {"window": window}
    check(device, call, "8v4")


def test_what_was_encoded_into_slots(device: torch.device) -> None:
    """aura_encode_ writes the pages of one layer by slot_mapping. All heads of a token follow one another."""
    codec, (blocks, size, H, D) = Codec(64, 8), (5, 16, 2, 64)
    x, slots = torch.randn(1, H, 20, D), torch.tensor([*range(48, 64), *range(16, 20)])
    codes = torch.zeros(blocks * size, H, codec.words, dtype=torch.int32, device=device)
    norms = torch.zeros(blocks * size, H, dtype=torch.float16, device=device)
    tables = codec.to(device).tables
    by_head = (codes.transpose(0, 1)[None], norms.transpose(0, 1)[None])
    torch_gdn.aura_encode_(x.to(device), slots.to(device), *tables, *by_head)
    pages = (codes.view(blocks, size, H, -1), norms.view(blocks, size, H), tables[2], tables[0])
    indices = [torch.tensor(each, dtype=torch.int32, device=device) for each in ([[3, 1]], [0, 1], [20])]
    q = torch.randn(1, 4, D)
    o = torch_gdn.aura_paged_attention(q.to(device), *pages, *pages, *indices)
    exact_codes, exact_norms = reference.aura_encode(x, *codec.tables)
    k = reference.aura_decode(exact_codes, exact_norms.half(), codec.codebook, codec.signs)
    sdpa: Tensor = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], k, k, enable_gqa=True)
    assert_close("o", o.cpu(), sdpa[0].transpose(0, 1), 3e-6, head_dim=1)
