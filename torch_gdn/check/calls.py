"""Calls that launch the kernel variants which models use, and odd ones: recorded, to be compiled here and proved in
proof/. Their tensors hold nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from torch_gdn import _C
from torch_gdn._recorder import KernelVariant, Launch, recording
from torch_gdn.tune import prefill_algorithm
from torch_gdn.warmup import call_gating

METAL_TYPES = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float"}
DTYPES = tuple(METAL_TYPES)

# (H, HV, K, V) of published models. Heads choose no kernel variant; timings need them.
MODELS = {
    "Qwen3-Next-80B-A3B, Qwen3.5-35B-A3B, 9B, 4B": (16, 32, 128, 128),
    "Qwen3.5-27B": (16, 48, 128, 128),
    "Qwen3.5-122B, 397B": (16, 64, 128, 128),
    "Qwen3.5-2B, 0.8B": (16, 16, 128, 128),
    "OLMo-Hybrid-7B": (30, 30, 96, 192),
    "FLA's GatedDeltaNet": (6, 6, 256, 512),
}
MODEL_SIZES = tuple(dict.fromkeys((K, V) for _, _, K, V in MODELS.values()))
# The smallest; a vector of 4 and one element too many; not a multiple of 8; usual ones that are no model's default.
OTHER_SIZES = ((1, 1), (33, 65), (60, 100), (64, 64), (100, 60), (192, 256))
AURA_SIZES = (64, 80, 96, 128, 256, 512)
AURA_SCHEMES = ((8, 8), (8, 4), (4, 4), (4, 2), (3, 3), (2, 2))  # bits of keys and of values
AURA_ROWS = (1, 2, 4, 8, 17)  # queries x query heads of a KV head: each is a form of pass 1
# D of the gated norm, and whether its rows start at a multiple of 4 elements: models' heads; no multiple of 4; longest.
NORM_ROWS = ((128, True), (192, True), (512, True), (128, False), (33, False), (1023, False), (1024, True))
# The same of a decoder layer's norm: heads, hidden sizes of models; no multiple of 4; longest.
HIDDEN_ROWS = ((256, True), (2048, True), (4096, True), (1023, False), (16384, True))
TOKENS = 2
ATTENTION_SIZES = (64, 80, 96, 128, 256)
ATTENTION_ROWS = (8, 16, 64)  # queries x query heads of a KV head: each is a form of paged attention

Thunk = Callable[[], object]


@dataclass(frozen=True)
class Call:
    """Of the delta rule: what a kernel variant is chosen by."""

    dtype: torch.dtype
    K: int
    V: int
    chunk_size: int = 64
    aligned: bool = True  # every row of q, k and v starts at a multiple of 4 elements
    state_v_first: bool = False
    normalise: bool = False  # use_qk_l2norm_in_kernel
    channels: bool = False  # gk, gv or a beta with V columns; of the recurrent op
    pool: torch.dtype = torch.float32  # of the states: another where the op is called in place
    fused_chunk_size: int = 0  # of the fused chunk algorithm: 8, 16 or 32; 0: by K

    @property
    def name(self) -> str:
        marks = ["" if self.aligned else "_unaligned", "_v_first" if self.state_v_first else ""]
        marks += ["_l2norm" if self.normalise else "", "_channels" if self.channels else ""]
        marks += ["" if self.pool == torch.float32 else f"_pool_{METAL_TYPES[self.pool]}"]
        marks += [f"_fused_{self.fused_chunk_size}" if self.fused_chunk_size else ""]
        return f"{METAL_TYPES[self.dtype]}_{self.K}_{self.V}_{self.chunk_size}{''.join(marks)}"


def launches(calls: Iterable[Thunk]) -> list[Launch]:
    """Of all calls, the first of each kernel variant, with what overlaps in any of them."""
    with recording() as recorded:
        for call in calls:
            call()
    first: dict[KernelVariant, Launch] = {}
    for launch in recorded.launches:
        known = first.setdefault(launch.variant, launch)
        if not set(launch.overlaps) <= set(known.overlaps):
            overlaps = tuple(sorted({*known.overlaps, *launch.overlaps}))
            first[launch.variant] = replace(known, overlaps=overlaps)
    return list(first.values())


def empty(*sizes: int, dtype: torch.dtype = torch.float32, aligned: bool = True) -> Tensor:
    """On mps; an unaligned one begins one element into its storage."""
    first = 0 if aligned else 1
    storage = torch.empty(torch.Size(sizes).numel() + first, dtype=dtype, device="mps")
    return storage[first:].view(sizes)


def rows(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q or k, v, and g or beta."""
    q = empty(1, TOKENS, 1, call.K, dtype=call.dtype, aligned=call.aligned)
    v = empty(1, TOKENS, 2, call.V, dtype=call.dtype, aligned=call.aligned)
    return q, v, empty(1, TOKENS, 2)


def end_to_end(call: Call) -> None:
    """Both ops, a prefill in each algorithm."""
    q, v, g = rows(call)
    beta = v if call.channels else g
    sizes = (call.V, call.K) if call.state_v_first else (call.K, call.V)
    state = empty(1, 2, *sizes, dtype=call.pool)
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": call.normalise, "state_v_first": call.state_v_first}
    in_place = call.pool != torch.float32
    if in_place:
        torch_gdn.fused_recurrent_gated_delta_rule_(q, q, v, g, beta, state, **options)
    else:
        for initial_state in (state, None):  # without one its layout is the option's, not that of its strides
            torch_gdn.fused_recurrent_gated_delta_rule(q, q, v, g, beta=beta, initial_state=initial_state, **options)
    for algorithm in _C.prefill_algorithms():
        chunk_size = call.fused_chunk_size if algorithm == "fused_chunk" else 0
        with prefill_algorithm(algorithm, chunk_size):
            if in_place:
                torch_gdn.chunk_gated_delta_rule_(q, q, v, g, g, state, chunk_size=call.chunk_size, **options)
            else:
                torch_gdn.chunk_gated_delta_rule(
                    q, q, v, g, g, initial_state=state, chunk_size=call.chunk_size, **options
                )


def kda(call: Call) -> None:
    """A prefill of Kimi Delta Attention in both chunk algorithms; on a pool of another dtype in place."""
    q, v, beta = rows(call)
    g, state = empty(1, TOKENS, 2, call.K), empty(1, 2, call.K, call.V, dtype=call.pool)
    for algorithm, chunk_size in (("chunked", 0), ("fused_chunk", call.fused_chunk_size)):
        with prefill_algorithm(algorithm, chunk_size):
            if call.pool == torch.float32:
                torch.ops.gdn.chunk_kda(q, q, v, g, beta, initial_state=state, chunk_size=call.chunk_size)
            else:
                torch.ops.gdn.chunk_kda_(q, q, v, g, beta, state, chunk_size=call.chunk_size)


def by_stage(call: Call) -> None:
    """The stage ops and the norm, which the end-to-end ops launch in other types or not at all."""
    ops, C = torch.ops.gdn, call.chunk_size
    q, v, g = rows(call)
    g_cumsum = ops.chunk_local_cumsum(g, C)
    A_inv = ops.solve_tril(ops.chunk_scaled_dot_kkt(q, g_cumsum, g, chunk_size=C))
    w, u = ops.recompute_w_u(q, v, g, A_inv, g_cumsum)
    h, v_new, _ = ops.chunk_fwd_h(q, w, u, g_cumsum, chunk_size=C)
    ops.chunk_fwd_o(q, q, v_new, h, g_cumsum, chunk_size=C)
    ops.l2norm(q)


def longest_norm(dtype: torch.dtype) -> None:
    torch_gdn.l2norm(empty(1, 1, 1, 1024, dtype=dtype))


def aura(bits: tuple[int, int], D: int, dtype: torch.dtype) -> None:
    """The codec of keys and of values, then the attention in every form of its first pass."""
    ops, signs = torch.ops.gdn, empty(D)
    cache = []
    for b in bits:
        codebook = empty(2**b)
        codes, norms, _ = ops.aura_encode(empty(1, 1, TOKENS, D, dtype=dtype), signs, empty(2**b - 1), codebook)
        for rotated in (False, True):
            ops.aura_decode(codes, norms, codebook, signs, None, rotated, dtype)
        cache += [codes, norms, codebook, signs]
    for heads in AURA_ROWS:
        q = empty(1, heads, 1, D, dtype=dtype)
        ops.aura_attention(q, *cache)
    ops.aura_rotate(q, signs, 1.0, True)


def pages(dtype: torch.dtype, cache_dtype: torch.dtype, D: int) -> None:
    """Keys and values into pages, with and without gaps between them, and attention in every form, with a merge."""
    x, slots = empty(1, 1, D, dtype=dtype), torch.empty(1, dtype=torch.int32, device="mps")
    for gap in (1, 0):
        keys, values = (empty(2, 16, 1, D + gap, dtype=cache_dtype)[..., :D] for _ in range(2))
        torch_gdn.reshape_and_cache(x, x, keys, values, slots)
    table, boundaries = (torch.empty(size, dtype=torch.int32, device="mps") for size in ((1, 1000), (2,)))
    for heads in ATTENTION_ROWS:
        q = empty(1, heads, D, dtype=dtype)
        torch_gdn.paged_attention(q, keys, values, table, boundaries, boundaries[:1])


def coded_pages(bits: tuple[int, int], D: int, dtype: torch.dtype) -> None:
    """Attention to pages of codes, in both forms, with a merge."""
    cache: dict[str, Any] = {}
    for name, b in zip(("key", "value"), bits, strict=True):
        cache[f"{name}_codes"] = torch.empty(2, 16, 1, -(-D * b // 32), dtype=torch.int32, device="mps")
        cache |= {f"{name}_norms": empty(2, 16, 1), f"{name}_codebook": empty(2**b), f"{name}_signs": empty(D)}
    table, boundaries = (torch.empty(size, dtype=torch.int32, device="mps") for size in ((1, 1000), (2,)))
    sequences: dict[str, Any] = {"block_table": table, "cu_seqlens": boundaries, "seq_lens": boundaries[:1]}
    for heads in ATTENTION_ROWS[1:]:
        torch_gdn.aura_paged_attention(empty(1, heads, D, dtype=dtype), **cache, **sequences)


def convolution(x: torch.dtype, weight: torch.dtype, state: torch.dtype, W: int) -> None:
    """Of few tokens and of more, of 8 channels and of 6, which are in no vectors of 4, and over tokens in columns."""
    for D, tokens in itertools.product((8, 6), (TOKENS, 17)):
        torch_gdn.causal_conv1d(
            empty(1, tokens, D, dtype=x),
            empty(D, W, dtype=weight),
            initial_state=empty(1, D, W, dtype=state),
            output_final_state=True,
        )
    columns = empty(1, 8, TOKENS, dtype=x).transpose(1, 2)
    torch_gdn.causal_conv1d(columns, empty(8, W, dtype=weight), initial_state=empty(1, 8, W, dtype=state))


def gated_norm(x: torch.dtype, gate: torch.dtype, weight: torch.dtype, D: int, aligned: bool) -> None:
    y, z, factor = (empty(D, dtype=dtype, aligned=aligned) for dtype in (x, gate, weight))
    torch_gdn.rms_norm_gated(y, z, factor)


def hidden_norm(x: torch.dtype, weight: torch.dtype, D: int, aligned: bool) -> None:
    y, factor = (empty(D, dtype=dtype, aligned=aligned) for dtype in (x, weight))
    torch_gdn.rms_norm(y, factor, residual=y)


def gating() -> None:
    call_gating(TOKENS, torch.device("mps"), torch.float32)


def in_place() -> None:
    """Every kernel that takes a pool, in variants that other calls launch."""
    call = Call(torch.bfloat16, 128, 128)
    q, v, g = rows(call)
    pool, channels = empty(1, 2, call.K, call.V), empty(1, TOKENS, 2, call.K)
    torch_gdn.fused_recurrent_gated_delta_rule_(q, q, v, g, g, pool)
    for algorithm in _C.prefill_algorithms():
        with prefill_algorithm(algorithm):
            torch_gdn.chunk_gated_delta_rule_(q, q, v, g, g, pool)
            torch.ops.gdn.chunk_kda_(q, q, v, channels, g, pool)
    for tokens in (TOKENS, 17):
        x = empty(1, tokens, 8, dtype=call.dtype)
        torch_gdn.causal_conv1d_update_(x, empty(8, 4, dtype=call.dtype), empty(1, 8, 4, dtype=call.dtype))


def many_slots() -> None:
    """More than 32 slots are looked for by a kernel of its own."""
    sequences = 33
    x, pool = empty(sequences, 1, 8), empty(sequences, 8, 2)
    torch_gdn.causal_conv1d_update_(x, empty(8, 2), pool, torch.empty(sequences, dtype=torch.long, device="mps"))


def copying() -> None:
    numbers = torch.empty(1, dtype=torch.long, device="mps")
    torch_gdn.batch_copy_(torch.empty(64, dtype=torch.uint8, device="mps"), numbers, numbers, numbers)


def rule_calls(quick: bool = False) -> list[Call]:
    """What models call for, odd sizes, small chunks, unaligned rows, gates of channels, states of other dtypes.

    `quick`: in Qwen3-Next's sizes and bfloat16.
    """
    if quick:
        return layouts([(128, 128)], [torch.bfloat16])
    calls = layouts([*MODEL_SIZES, *OTHER_SIZES], DTYPES)
    for dtype, (K, V) in itertools.product(DTYPES, MODEL_SIZES):
        calls += [Call(dtype, K, V, chunk_size=32), Call(dtype, K, V, chunk_size=16), Call(dtype, K, V, aligned=False)]
    for state_v_first in (False, True):  # gates of channels: of no model listed, of KDA's and GLA's recurrences
        calls += [Call(dtype, 128, 128, state_v_first=state_v_first, channels=True) for dtype in DTYPES]
        pools = [dtype for dtype in DTYPES if dtype != torch.float32]
        calls += [Call(dtype, 128, 128, state_v_first=state_v_first, normalise=True, pool=dtype) for dtype in pools]
    return calls


def layouts(sizes: Iterable[tuple[int, int]], dtypes: Iterable[torch.dtype]) -> list[Call]:
    """Of each K, V and dtype: either layout of the states, with and without the norm."""
    return [
        Call(dtype, K, V, state_v_first=state_v_first, normalise=normalise)
        for (K, V), dtype, state_v_first, normalise in itertools.product(sizes, dtypes, (False, True), (False, True))
    ]


def kda_calls(quick: bool = False) -> list[Thunk]:
    """Of models' K of 128 and other sizes, in chunks of all sizes, unaligned, and on pools of other dtypes."""
    if quick:
        return [partial(kda, Call(torch.bfloat16, 128, 128))]
    sizes = [Call(dtype, K, V) for dtype in DTYPES for K, V in ((128, 128), (64, 64), (256, 256), (33, 65))]
    more = [Call(dtype, 128, 128, aligned=False) for dtype in DTYPES]
    more += [Call(dtype, 128, 128, chunk_size=C) for dtype in DTYPES for C in (16, 32)]
    more += [Call(dtype, 128, 128, fused_chunk_size=16) for dtype in DTYPES]
    more += [Call(dtype, 128, 128, pool=dtype) for dtype in DTYPES if dtype != torch.float32]
    return [partial(kda, call) for call in [*sizes, *more]]


def all_stages(calls: Iterable[Call]) -> list[Thunk]:
    """One for each set of sizes: the stage ops know neither layouts nor the norm."""
    plain = (Call(call.dtype, call.K, call.V, call.chunk_size, call.aligned) for call in calls)
    return [partial(by_stage, call) for call in dict.fromkeys(plain)]


def aura_calls(quick: bool = False) -> list[Thunk]:
    if quick:
        return [partial(aura, (8, 4), 128, torch.bfloat16)]
    return [partial(aura, bits, D, dtype) for bits, D, dtype in itertools.product(AURA_SCHEMES, AURA_SIZES, DTYPES)]


def attention_calls(quick: bool = False) -> list[Thunk]:
    if quick:
        of_models = partial(pages, torch.bfloat16, torch.bfloat16, 128)
        return [of_models, partial(coded_pages, (8, 4), 128, torch.bfloat16)]
    plain = [partial(pages, *kind) for kind in itertools.product(DTYPES, DTYPES, ATTENTION_SIZES)]
    kinds = itertools.product(AURA_SCHEMES, ATTENTION_SIZES, DTYPES)
    return [*plain, *(partial(coded_pages, *kind) for kind in kinds)]


def layer_calls(quick: bool = False) -> list[Thunk]:
    """The kernels beside the rule, all tensors of one dtype: W of 4, and rows of models' heads."""
    dtypes = DTYPES[:1] if quick else DTYPES
    norms = [partial(gated_norm, dtype, dtype, dtype, *row) for dtype in dtypes for row in NORM_ROWS[:3]]
    norms += [partial(hidden_norm, dtype, dtype, *row) for dtype in dtypes for row in HIDDEN_ROWS[: 1 if quick else 5]]
    return [*(partial(convolution, dtype, dtype, dtype, 4) for dtype in dtypes), *norms, gating, many_slots, copying]


def table(quick: bool = False) -> list[Thunk]:
    """Every call whose kernels are compiled by the check."""
    calls = rule_calls(quick)
    rules: list[Thunk] = [partial(end_to_end, call) for call in calls]
    others = [*kda_calls(quick), *aura_calls(quick), *attention_calls(quick), *layer_calls(quick)]
    return [*rules, *all_stages(calls), *others]
