"""Records the host code's own calls: the kernel variants to prove, and what launches them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from torch_gdn import reference
from torch_gdn._recorder import KernelVariant, Launch
from torch_gdn.tools.tuning_cache import FUSED_CHUNK_SIZES
from torch_gdn_check import probes
from torch_gdn_check.fake_mps import fake_mps
from torch_gdn_check.registry import REGISTRY, OpEntry, Point
from torch_gdn_check.registry.attention import PagePoint
from torch_gdn_check.registry.aura import AuraPoint, CodecPoint
from torch_gdn_check.registry.decode import DecodePoint
from torch_gdn_check.registry.experts import ExpertPoint
from torch_gdn_check.registry.gdn import RECURRENT, RulePoint, end_to_end, kda_at, stages_at
from torch_gdn_check.registry.layers import ConvolutionPoint, HeadPoint, RowPoint, mixed_dtypes
from torch_gdn_check.registry.models import DTYPES, MODEL_SIZES, OTHER_SIZES
from torch_gdn_check.registry.pages import StoredHeadPoint
from torch_gdn_check.registry.quantized import QuantizedPoint
from torch_gdn_check.registry.registry import MPS, compiled, computed, first_of_each_variant, launches_at

Wanted = Iterator[tuple[OpEntry[Any], Point]]

# K and V may be any sizes up to 256 and 512. In addition to the sizes of models and those that torch_gdn check
# compiles, there are K above V, and the largest odd sizes, which have the most registers and no vectors.
SIZES = (*MODEL_SIZES, *OTHER_SIZES, (192, 96), (255, 511))
CHUNK_SIZES = (16, 32, 64)
BOTH = (True, False)
SHORT = RulePoint(tokens=2)


def launches(wanted: Iterable[tuple[OpEntry[Any], Point]]) -> list[Launch]:
    """Returns the first of these calls for each kernel variant."""
    memory: AbstractContextManager[Any] | None = None
    if sys.platform == "linux":
        import mps_simulator

        mps_simulator.activate()
    else:
        memory = fake_mps()  # a virtual Mac cannot allocate; takes 10 ms a call
    recorded = (launches_at(entry, point, memory) for entry, point in wanted)
    return first_of_each_variant(itertools.chain.from_iterable(recorded))


def variants(wanted: Iterable[tuple[OpEntry[Any], Point]]) -> list[KernelVariant]:
    return [launch.variant for launch in launches(wanted)]


def rule_points() -> Iterator[RulePoint]:
    """Yields every dtype, chunk size, alignment, state layout and norm. The usual and the largest size also have gates
    for channels and pools of other dtypes.
    """
    for dtype, (K, V) in itertools.product(DTYPES, SIZES):
        point = replace(SHORT, dtype=dtype, K=K, V=V)
        for C, aligned, v_first, normalise in itertools.product(CHUNK_SIZES, BOTH, BOTH, BOTH):
            yield replace(point, chunk_size=C, aligned=aligned, state_v_first=v_first, normalise=normalise)
        for aligned, size in itertools.product(BOTH, FUSED_CHUNK_SIZES):
            yield replace(point, aligned=aligned, fused_chunk_size=size)
        if (K, V) in ((128, 128), (255, 511)):
            for v_first, normalise in itertools.product(BOTH, BOTH):
                laid_out = replace(point, state_v_first=v_first, normalise=normalise)
                yield replace(laid_out, channels=True)
                yield from (replace(laid_out, pool=pool) for pool in (torch.bfloat16, torch.float16))


def kda_points() -> Iterator[RulePoint]:
    """Yields every dtype, K, alignment and chunk size of either algorithm, and pools of other dtypes."""
    chunks = tuple(zip(CHUNK_SIZES, FUSED_CHUNK_SIZES, strict=True))
    for dtype, (K, V), aligned, (C, fused) in itertools.product(DTYPES, (*SIZES, (256, 256)), BOTH, chunks):
        yield replace(SHORT, dtype=dtype, K=K, V=V, chunk_size=C, aligned=aligned, fused_chunk_size=fused)
    for dtype, K in itertools.product(DTYPES, (128, 255)):
        yield replace(SHORT, dtype=dtype, K=K, V=K, pool=dtype)


def compiled_at(*families: type[Point]) -> Wanted:
    """Yields what the check compiles for ops with such points, or all points of an op if it compiles nothing more."""
    for entry in REGISTRY.values():
        if type(entry.small) in families:
            yield from ((entry, point) for point in [*entry.compiled()] or entry.points)


def backward_at(points: Iterable[RulePoint]) -> Wanted:
    ops = (*reference.gradients.__all__, *reference.stages.__all__)
    yield from ((REGISTRY[op], point) for point in points for op in ops)


@cache
def all_launches() -> list[Launch]:
    """Returns the launches of everything to prove: what the check computes and compiles, and more."""
    rules = list(rule_points())
    wanted: list[Wanted] = [end_to_end(point) for point in rules]
    wanted += [stages_at(rules), *(kda_at(point) for point in kda_points())]
    wanted += [computed(quick=False), compiled(), mixed_dtypes(), backward_at([replace(SHORT, K=255, V=511)])]
    return launches(itertools.chain.from_iterable(wanted))


@cache
def probe_launches() -> list[Launch]:
    """Returns the launches of the check's probes, which belong to no op."""
    if sys.platform == "linux":
        import mps_simulator

        mps_simulator.activate()
    return first_of_each_variant(probes.launches(MPS))


def is_of_models(entry: OpEntry[Any], point: Point) -> bool:
    """Returns whether models launch it. AURA and pages have 128 numbers per head, bfloat16, 8 bits for keys and 4 for
    values. Experts and packed weights have bfloat16, and a router has 256 or 512 experts.
    """
    if isinstance(point, StoredHeadPoint):
        return point.cache == point.dtype
    if isinstance(point, RowPoint):
        return entry.name != "l2norm" or point.D in (33, *(K for K, _ in MODEL_SIZES))
    if isinstance(point, ExpertPoint):
        return point.dtype == torch.bfloat16 and (entry.name != "moe_router" or point.E in (256, 512))
    if isinstance(point, QuantizedPoint):
        return point.dtype == torch.bfloat16
    if not isinstance(point, CodecPoint | AuraPoint | PagePoint):
        return True
    if isinstance(point, PagePoint) and "key_codes" not in entry.arguments:
        common_format = point.cache == torch.bfloat16
    else:
        common_format = point.bits in (8, 4, (8, 4))
    return common_format and point.dtype == torch.bfloat16 and point.D == 128


@cache
def model_launches() -> list[Launch]:
    """Returns launches of models in chunks of 64, and of one awkward size, for every run of the tests."""
    rules = [
        replace(SHORT, dtype=dtype, K=K, V=V, state_v_first=v_first, normalise=True, channels=not v_first and K == 128)
        for dtype in DTYPES
        for K, V in (*MODEL_SIZES, (33, 65))
        for v_first in BOTH
    ]
    others = compiled_at(
        *(CodecPoint, AuraPoint, PagePoint, ExpertPoint, QuantizedPoint, RowPoint, HeadPoint, ConvolutionPoint),
        *(DecodePoint, StoredHeadPoint, Point),
    )
    wanted: list[Wanted] = [*(end_to_end(point) for point in rules), stages_at(rules)]
    wanted.append((REGISTRY[RECURRENT], replace(each, tokens=1, channels=False)) for each in rules)
    wanted += [*(kda_at(replace(SHORT, dtype=dtype)) for dtype in DTYPES)]
    wanted.append(backward_at(replace(each, channels=False) for each in rules))
    wanted.append((entry, point) for entry, point in others if is_of_models(entry, point))
    # The awkward sizes are a length that is no power of two, codes that straddle words, and the longest vectors.
    awkward: list[tuple[str, Point]] = [("aura_encode", CodecPoint(DTYPES[0], D=80, tokens=2))]
    for D, form in ((80, 8), (512, 17)):
        awkward.append(("aura_attention", AuraPoint(DTYPES[0], bits=(3, 3), D=D, ratio=form, queries=1, batch=1)))
    kept = ("aura_encode_bfloat_3_80", "aura_flash_p1_eight_3_3_80", "aura_flash_p1_matrix_3_3_512")
    result = launches((REGISTRY[op], point) for op, point in awkward)
    return [
        *launches(itertools.chain.from_iterable(wanted)),
        *(launch for launch in result if launch.variant.name in kept),
    ]
