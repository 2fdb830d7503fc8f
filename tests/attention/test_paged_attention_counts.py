"""Compares the simulated device's byte counts of paged attention with the bytes that must be moved."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import torch_gdn
from tests.helpers.devices import on_a_mac, profiled, ready
from torch_gdn_check.registry.attention import make_call
from torch_gdn_check.registry.inputs import to_device

pytestmark = [pytest.mark.sweep(4), pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")]
HK, D, SIZE = 1, 128, 2  # half of Qwen3-Next's KV heads, its head size, and the bytes of an element


class Bytes(NamedTuple):
    distinct: int  # bytes of each dispatch that even a cache of any size must read or write
    issued: int  # bytes that simdgroups ask of the caches
    dispatches: int


def bytes_of(queries: list[int], keys: list[int], ratio: int) -> Bytes:
    call = make_call(queries, keys, HQ=HK * ratio, HK=HK, D=D, dtype=torch.bfloat16, padding=0)
    on_device = to_device(call, ready("mps"))
    with profiled(detailed=True) as profile:
        torch_gdn.paged_attention(**on_device)
    figures = list(profile.kernels.values())
    distinct, issued = (
        sum(getattr(each, f"device_bytes_{kind}_{way}") for each in figures for way in ("read", "written"))
        for kind in ("distinct", "issued")
    )
    return Bytes(distinct, issued, sum(each.dispatches for each in figures))


def compulsory(queries: list[int], keys: list[int], ratio: int) -> int:
    """Returns the bytes if keys and values move once for each KV head, and q and o once."""
    return (2 * sum(keys) * HK + 2 * sum(queries) * HK * ratio) * D * SIZE


def gathered(L: int, T: int, ratio: int) -> int:
    """Counts the bytes of one sequence if its pages are gathered and repeated for each query head, with scores in
    memory.
    """
    key_count, query_count, scores = 2 * T * HK * D, L * HK * ratio * D, L * T * HK * ratio
    gather = 2 * key_count  # read and written
    repeat = (1 + ratio) * key_count
    attention = ratio * key_count + 2 * query_count + 4 * scores  # scores and weights are written and read
    return (gather + repeat + attention) * SIZE


@pytest.mark.parametrize(
    ("keys", "ratio", "dispatches"),
    [([100], 8, 1), ([1000], 8, 2), ([700, 65, 513], 4, 2), ([2000], 1, 2), ([2050], 16, 2)],
)
def test_decoding_reads_each_key_once(keys: list[int], ratio: int, dispatches: int) -> None:
    queries = [1] * len(keys)
    result, least = bytes_of(queries, keys, ratio), compulsory(queries, keys, ratio)
    assert least <= result.distinct and result.issued <= 1.1 * least
    assert result.dispatches == dispatches


@pytest.mark.parametrize(("L", "T", "ratio"), [(128, 128, 8), (64, 512, 8), (256, 256, 2)])
def test_a_prompt_moves_a_quarter_of_what_gathering_does(L: int, T: int, ratio: int) -> None:
    result = bytes_of([L], [T], ratio)
    assert compulsory([L], [T], ratio) <= result.distinct <= 0.25 * gathered(L, T, ratio)
