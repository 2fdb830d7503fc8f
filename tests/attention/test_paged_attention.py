"""Compares attention to pages, sequence by sequence, with attention in float64 to the keys and values in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import torch_gdn
from tests.helpers.devices import by_threads, kernels_run, on_a_mac, ready
from tests.helpers.errors import assert_close, assert_same_bits
from tests.helpers.pairwise import pairwise
from torch_gdn import reference
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.attention import make_call
from torch_gdn_check.registry.inputs import Call, to_device

INDICES = ("block_table", "cu_seqlens", "seq_lens")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# The numbers of queries and keys of each sequence: one token, few, and more than a tile; prompts, and parts of prompts.
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
    """Returns the rows of the sequences. Asserts that padding and gaps between rows of the output are unchanged."""
    moved = to_device(call, device)
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


@pytest.mark.sweep(12)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_pair_of_options(device: torch.device, case: dict[str, Any]) -> None:
    check(device, call_of(case))


@pytest.mark.parametrize("name", SEQUENCES)
def test_pytorchs_own_attention(device: torch.device, name: str) -> None:
    """PyTorch's scaled_dot_product_attention, a reference that we did not write, computes the gathered pages in
    float64.
    """
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


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_which_kernels_run(name: str) -> None:
    """Few query rows per KV head run a kernel that multiplies as it reads keys. More rows run one that stages tiles of
    keys.
    """
    if on_a_mac():
        pytest.skip("a Mac does not report which kernels ran")
    device = ready("mps")
    check(device, make_call(*SEQUENCES[name]), f"paged_attention_{'decode' if name == 'decode' else 'prefill'}")
    call = make_call([1, 1], [600, 3])
    check(device, call, "paged_attention_decode", "paged_attention_merge")


@pytest.mark.parametrize(
    ("queries", "keys", "ratio"),
    [([1, 1, 1], [900, 513, 1030], 2), ([1], [2260], 1), ([1, 2], [2270, 1500], 12), ([3, 40], [2500, 70], 4)],
)
@pytest.mark.parametrize("window", [0, 777, 2100])  # smaller and larger than a block of keys on the CPU
def test_keys_divided_among_threadgroups(
    device: torch.device, queries: list[int], keys: list[int], ratio: int, window: int
) -> None:
    """Threadgroups share the keys in decoding, and for few queries next to a prompt. Sinks count once."""
    call = make_call(queries, keys, HQ=ratio, HK=1, D=32, block_size=24) | {"window": window}
    call["sinks"] = 2 * torch.randn(ratio)
    check(device, call, "paged_attention_merge")


def test_blocks_that_sequences_share(device: torch.device) -> None:
    check(device, make_call([1, 5, 1, 30], [70, 90, 64, 94], shared_blocks=4))


@pytest.mark.parametrize("name", ["decode", "prompt"])
def test_scale(device: torch.device, name: str) -> None:
    check(device, make_call(*SEQUENCES[name]) | {"scale": 0.3})


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_the_bounds_may_be_left_out(device: torch.device, name: str) -> None:
    """The shapes then give the bounds, so many tiles and splits are empty."""
    check(device, make_call(*SEQUENCES[name]) | {"max_query_len": None, "max_seq_len": None})


def test_a_new_output(device: torch.device) -> None:
    call = make_call([5], [20], padding=0) | {"out": None}
    o = torch_gdn.paged_attention(**to_device(call, device))
    assert o.is_contiguous() and o.dtype == torch.float32
    assert_close("o", o.cpu(), exact(call), BOUND[torch.float32], head_dim=1)


def test_the_number_of_threads_changes_no_bit() -> None:
    call = make_call([1, 40, 3], [5000, 300, 2500])
    alone, *results = by_threads(lambda: attend(torch.device("cpu"), call), 1, 2, 5)
    for o in results:
        assert_same_bits("o", o, alone)


@pytest.mark.parametrize("which", ["key_cache", "value_cache"])
@pytest.mark.parametrize("queries", [1, 12])
def test_what_is_not_finite_stays_in_its_sequence_and_head(device: torch.device, queries: int, which: str) -> None:
    """The value that is not finite belongs to a key that all queries of a sequence see."""
    call = make_call([queries] * 3, [40, 40, 40])
    before = attend(device, call)
    call[which][call["block_table"][1, 0], 3, 1] = torch.nan
    after = attend(device, call)
    spoilt = torch.zeros(3 * queries, 4, 1, dtype=torch.bool)
    spoilt[queries : 2 * queries, 2:] = True
    assert after.isnan().eq(spoilt).all()
    assert torch.equal(after.masked_fill(spoilt, 0), before.masked_fill(spoilt, 0))


def test_no_sequences_or_no_rows(device: torch.device) -> None:
    for queries, keys, padding in (([], [], 2), ([0, 0], [5, 0], 2), ([0], [3], 0)):
        assert attend(device, make_call(queries, keys, padding=padding)).shape == (0, 4, 64)


class Wrong(NamedTuple):
    """An argument that does not fit the others, and how its error begins."""

    argument: str
    change: Callable[[Tensor], Any]
    words: str
    follows: str = ""  # another argument that is then wrong too; the device reports the one it meets first


WRONG = {
    "a block past the pool": Wrong("block_table", lambda x: with_one(x, (1, 1), 10_000), "expected blocks"),
    "a negative block": Wrong("block_table", lambda x: with_one(x, (1, 1), -1), "expected blocks"),
    "more keys than blocks": Wrong("seq_lens", lambda x: with_one(x, 1, 81), "expected at least the queries"),
    "fewer keys than queries": Wrong("seq_lens", lambda x: with_one(x, 1, 0), "expected at least the queries"),
    "negative keys": Wrong("seq_lens", lambda x: with_one(x, 1, -5), "expected at least the queries"),
    "a boundary past q": Wrong("cu_seqlens", lambda x: with_one(x, 3, 2**30), "expected boundaries"),
    "a descending boundary": Wrong("cu_seqlens", lambda x: with_one(x, 2, 0), "expected", "max_query_len"),
    "a first boundary": Wrong("cu_seqlens", lambda x: with_one(x, 0, 1), "expected"),
    "a negative boundary": Wrong("cu_seqlens", lambda x: with_one(x, 0, -1), "expected"),
    "a block past 2^32": Wrong("block_table", lambda x: with_one(x, (1, 1), 2**32 + 1), "expected blocks"),
    "a length past 2^32": Wrong("seq_lens", lambda x: with_one(x, 1, 2**32 + 60), "expected at least the queries"),
    "a boundary past 2^32": Wrong("cu_seqlens", lambda x: with_one(x, 3, 2**32), "expected boundaries"),
    "too few queries": Wrong("max_query_len", lambda x: x - 1, "expected at least the queries"),
    "too few keys": Wrong("max_seq_len", lambda x: x - 1, "expected at least the keys"),
}


def with_one(x: Tensor, at: Any, value: int) -> Tensor:
    x = x.clone() if abs(value) < 2**31 else x.long()
    x[at] = value
    return x


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("queries", [[1, 1, 1], [2, 40, 1]], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_wrong_indices(device: torch.device, dtype: torch.dtype, queries: list[int], wrong: Wrong) -> None:
    """Wrong indices read nothing outside the tensors (the simulated device would report it). Sequence 0 is right."""
    call = make_call(queries, [30, 60, 64], D=16, HK=1)
    call |= {name: call[name].to(dtype) for name in INDICES}
    expected = exact(call)[: queries[0]]
    call[wrong.argument] = wrong.change(call[wrong.argument])
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"^paged_attention_: {wrong.argument}: {wrong.words}"):
            torch_gdn.paged_attention(**call)
        return
    o = torch_gdn.paged_attention(**to_device(call, device))
    reported = "|".join(filter(None, (wrong.argument, wrong.follows)))
    with pytest.raises(RuntimeError, match=rf"^paged_attention_: ({reported}): {wrong.words}.*, got .*\d+ at \d+"):
        torch.mps.synchronize()
    torch.mps.synchronize()  # the error is reported only once
    if wrong.argument != "cu_seqlens" and queries[0] == 1:
        assert_close("o", o[:1].cpu(), expected, BOUND[torch.float32], head_dim=1)


@pytest.mark.parametrize("op", ["paged_attention_", "aura_paged_attention_"])
def test_index_tensors_of_64_bits(device: torch.device, op: str) -> None:
    """64-bit index tensors, each alone and all together, give the bits of 32-bit ones."""
    entry = REGISTRY[op]
    call = entry.smallest(device=device)
    expected = call["out"].clone()
    entry.run(call | {"out": expected})
    for names in (*((name,) for name in INDICES), INDICES):
        out = call["out"].clone()
        entry.run(call | {name: call[name].long() for name in names} | {"out": out})
        assert_same_bits("out", out, expected)
