"""Which kernel variants are proved, and what the host code launches them with: its own calls, recorded."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from functools import cache, partial

import torch

from torch_gdn._recorder import KernelVariant, Launch
from torch_gdn.check import calls
from torch_gdn.check.calls import DTYPES, MODEL_SIZES, OTHER_SIZES, Call, Thunk
from torch_gdn.check.fake_mps import fake_mps
from torch_gdn.tuning_cache import FUSED_CHUNK_SIZES

# K and V are free up to 256 and 512. To the sizes of models and to those that torch_gdn.check compiles come K above V,
# and the largest odd sizes, with the most registers and no vectors.
SIZES = (*MODEL_SIZES, *OTHER_SIZES, (192, 96), (255, 511))
CHUNK_SIZES = (16, 32, 64)
BOTH = (True, False)


def launches(wanted: Iterable[Thunk]) -> list[Launch]:
    """Of these calls, the first of each kernel variant."""
    if sys.platform == "linux":
        import simulator

        simulator.activate()
        return calls.launches(wanted)
    with fake_mps():  # a virtual Mac cannot allocate; 10 ms a call
        return calls.launches(wanted)


def variants(wanted: Iterable[Thunk]) -> list[KernelVariant]:
    return [launch.variant for launch in launches(wanted)]


def rule_calls() -> list[Call]:
    """Every dtype, chunk size, alignment, state layout and norm; at the usual size and the largest, gates of channels
    and pools of other dtypes.
    """
    return (
        [
            Call(dtype, K, V, chunk_size, aligned, state_v_first, normalise)
            for dtype in DTYPES
            for K, V in SIZES
            for chunk_size in CHUNK_SIZES
            for aligned, state_v_first, normalise in itertools.product(BOTH, repeat=3)
        ]
        + [
            Call(dtype, K, V, state_v_first=state_v_first, normalise=normalise, channels=channels, pool=pool)
            for dtype in DTYPES
            for K, V in ((128, 128), (255, 511))
            for state_v_first, normalise in itertools.product(BOTH, repeat=2)
            for channels, pool in ((True, torch.float32), (False, torch.bfloat16), (False, torch.float16))
        ]
        + [
            Call(dtype, K, V, aligned=aligned, fused_chunk_size=size)
            for dtype in DTYPES
            for K, V in SIZES
            for aligned in BOTH
            for size in FUSED_CHUNK_SIZES
        ]
    )


def kda_calls() -> list[Call]:
    """Every dtype, K, alignment and chunk size of either algorithm, and pools of other dtypes."""
    return [
        Call(dtype, K, V, chunk_size, aligned, fused_chunk_size=fused_chunk_size)
        for dtype in DTYPES
        for K, V in (*SIZES, (256, 256))
        for aligned in BOTH
        for chunk_size, fused_chunk_size in zip(CHUNK_SIZES, FUSED_CHUNK_SIZES, strict=True)
    ] + [Call(dtype, K, K, pool=dtype) for dtype in DTYPES for K in (128, 255)]


@cache
def all_launches() -> list[Launch]:
    """Of everything that is proved; the rows of norms, whose length is free, are those of the table."""
    rules = rule_calls()
    wanted: list[Thunk] = [partial(calls.end_to_end, call) for call in rules]
    wanted += [*calls.all_stages(rules), *(partial(calls.longest_norm, dtype) for dtype in DTYPES)]
    wanted += [*(partial(calls.kda, call) for call in kda_calls()), *calls.aura_calls(), *calls.attention_calls()]
    for x, weight, other in itertools.product(DTYPES, repeat=3):  # the state, or the gate
        wanted += [partial(calls.convolution, x, weight, other, W) for W in (2, 3, 4)]
        wanted += [partial(calls.gated_norm, x, other, weight, *row) for row in calls.NORM_ROWS]
    for x, weight in itertools.product(DTYPES, repeat=2):
        wanted += [partial(calls.hidden_norm, x, weight, *row) for row in calls.HIDDEN_ROWS]
    return launches([*wanted, calls.gating, calls.many_slots, calls.copying, calls.in_place])


@cache
def model_launches() -> list[Launch]:
    """Of what models call in chunks of 64, and of one awkward size: for every run of the tests."""
    rules = [
        Call(dtype, K, V, state_v_first=state_v_first, normalise=True, channels=not state_v_first and K == 128)
        for dtype in DTYPES
        for K, V in (*MODEL_SIZES, (33, 65))
        for state_v_first in BOTH
    ]
    wanted: list[Thunk] = [partial(calls.end_to_end, call) for call in rules]
    wanted += [*calls.all_stages(rules), *calls.aura_calls(quick=True)]
    wanted += [*(partial(calls.kda, Call(dtype, 128, 128)) for dtype in DTYPES)]
    wanted += [*calls.attention_calls(quick=True), *calls.layer_calls(), calls.in_place]
    # A length that is no power of two, codes that straddle words, and the longest vectors.
    awkward = launches(partial(calls.aura, (3, 3), D, DTYPES[0]) for D in (80, 512))
    kept = ("aura_encode_bfloat_3_80", "aura_flash_p1_3_3_80_8", "aura_flash_p1_matrix_3_3_512")
    return [*launches(wanted), *(launch for launch in awkward if launch.variant.name in kept)]
