"""Attention to pages against attention in float64 to what they hold, sequence by sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import torch_gdn
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close
from tests.helpers.paged import Call, make_call, there
from tests.helpers.pairwise import pairwise
from torch_gdn import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Queries and keys of each sequence: one token, few, and more than a tile of rows; of prompts, and of parts of them.
SEQUENCES: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1, 1, 1], [1, 40, 129]),
    "prompt": ([37], [37]),
    "part": ([20, 33], [90, 33]),
    "mixed": ([1, 0, 35, 2, 1], [70, 5, 35, 50, 1]),
    "drafts": ([4, 3], [60, 9]),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "sequences": tuple(SEQUENCES),
    "D": (64, 80, 96, 128, 256, 16),
    "ratio": (1, 2, 3, 8),
    "block_size": (16, 48, 7, 528),
    "dtype": DTYPES,
    "cache_dtype": DTYPES,
    "layout": ("pages", "padded", "apart"),
    "mask": ("causal", "all", "window of 1", "window of 30"),
    "sinks": (False, True),
}
CASES = pairwise(FACTORS)


def call_of(case: dict[str, Any], HK: int = 2) -> Call:
    queries, keys = SEQUENCES[case["sequences"]]
    names = ("D", "block_size", "dtype", "cache_dtype", "layout")
    HQ = HK * case["ratio"]
    call = make_call(queries, keys, HQ=HQ, HK=HK, **{name: case[name] for name in names})
    call["causal"] = case["mask"] != "all"
    call["window"] = {"window of 1": 1, "window of 30": 30}.get(case["mask"], 0)
    call["sinks"] = torch.randn(HQ) if case["sinks"] else None
    return call


def attend(device: torch.device, call: Call, *kernels: str) -> Tensor:
    """The rows of the sequences; padding, and what lies between rows of the output, must be as it was."""
    moved = there(call, device)
    with kernels_run(device, *kernels):
        o = torch_gdn.paged_attention(**moved)
    memory = o.as_strided((o.untyped_storage().size() // o.element_size(),), (1,), 0).cpu()
    written = torch.zeros_like(memory, dtype=torch.bool)
    rows = int(call["cu_seqlens"][-1])
    written.as_strided(o[:rows].shape, o.stride(), o.storage_offset()).fill_(True)
    assert (memory[~written] == 7).all()
    return o[:rows].cpu()


def exact(call: Call) -> Tensor:
    rows = int(call["cu_seqlens"][-1])
    return reference.paged_attention(**(call | {"q": call["q"].double(), "out": None}))[:rows]


def check(device: torch.device, call: Call, *kernels: str) -> None:
    assert_close("o", attend(device, call, *kernels), exact(call), BOUND[call["q"].dtype], head_dim=1)


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.").replace(" ", "_") for value in case.values())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_pair_of_options(device: torch.device, case: dict[str, Any]) -> None:
    check(device, call_of(case))


@pytest.mark.parametrize("name", SEQUENCES)
def test_pytorchs_own_attention(device: torch.device, name: str) -> None:
    """Gathered pages, in float64, by PyTorch's scaled_dot_product_attention: an oracle that is not ours."""
    queries, keys = SEQUENCES[name]
    call = make_call(queries, keys, HQ=6, HK=2)
    o = attend(device, call)
    for n, (L, T) in enumerate(zip(queries, keys, strict=True)):
        slots = torch.arange(T)
        blocks = call["block_table"][n].long()[slots // 16]
        k, v = (call[each][blocks, slots % 16].transpose(0, 1).double() for each in ("key_cache", "value_cache"))
        rows = slice(int(call["cu_seqlens"][n]), int(call["cu_seqlens"][n + 1]))
        mask = torch.ones(L, T, dtype=torch.bool).tril(T - L)
        q = call["q"][rows].transpose(0, 1).double()[None]
        expected = scaled_dot_product_attention(q, k[None], v[None], attn_mask=mask, enable_gqa=True)
        if L:
            assert_close(f"sequence {n}", o[rows], expected[0].transpose(0, 1), BOUND[torch.float32], head_dim=1)
