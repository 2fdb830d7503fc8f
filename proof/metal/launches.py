"""What the host code launches, in its own words: the ops run on the simulated device, where a launcher takes notes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simulator import activate, build
from torch_gdn import (
    _C,
    causal_conv1d,
    causal_conv1d_update_,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gated_delta_rule_,
    gdn_gating,
    l2norm,
    rms_norm_gated,
    specialisations_aura,
    specialisations_modules,
)
from torch_gdn.specialisations import DTYPES, Specialisation, Variant
from torch_gdn.tune import prefill_algorithm

TOKENS = 2


@dataclass(frozen=True)
class Launch:
    name: str
    specialisation: Specialisation
    file: str
    bindings: int
    threads: int  # of a threadgroup


def _library() -> ctypes.CDLL:
    sources = [Path(__file__).with_name("recorder.cpp"), build.CHECKOUT / "csrc" / "metal" / "shader_source.cpp"]
    include = [build.CHECKOUT, build.CHECKOUT / "csrc", build.CHECKOUT / "shaders"]
    path = build.build_library(
        "torch_gdn_recorder", sources, build.build_device(), [Path(_C.__file__)], include=include
    )
    library = ctypes.CDLL(str(path))
    library.recorder_lines.restype = library.recorder_source.restype = ctypes.c_char_p
    return library


@contextmanager
def recording() -> Iterator[ctypes.CDLL]:
    """Inside, the ops launch nothing."""
    activate()
    library = _library()
    library.recorder_start()
    try:
        yield library
    finally:
        library.recorder_stop()


def _rows(variant: Variant, heads: int, size: int) -> Tensor:
    """[1, TOKENS, heads, size]; unaligned ones begin one element into their storage."""
    first = 0 if variant.aligned else 1
    storage = torch.empty(TOKENS * heads * size + first, dtype=variant.dtype, device="mps")
    return storage[first:].view(1, TOKENS, heads, size)


def _call(variant: Variant) -> None:
    q, k, v = _rows(variant, 1, variant.K), _rows(variant, 1, variant.K), _rows(variant, 2, variant.V)
    g = torch.empty(1, TOKENS, 2, device="mps")
    sizes = (variant.K, variant.V) if variant.value_inner else (variant.V, variant.K)
    options: dict[str, Any] = {
        "initial_state": torch.empty(1, 2, *sizes, device="mps"),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": variant.normalise,
        "state_v_first": not variant.value_inner,
    }
    fused_recurrent_gated_delta_rule(q, k, v, g, beta=g, **options)
    fused_recurrent_gated_delta_rule(q, k, v, g, beta=g, **(options | {"initial_state": None}))
    if variant.channels:
        fused_recurrent_gated_delta_rule(q, k, v, g, beta=v, **options)
    if variant.pool != torch.float32:
        _call_in_place(variant, q, k, v, g, options)
    if variant.by_stage:
        _call_stages(variant, q, k, v, g)
    else:
        for algorithm in _C.prefill_algorithms():
            with prefill_algorithm(algorithm, variant.wanted_chunk_size if algorithm == "fused_chunk" else 0):
                chunk_gated_delta_rule(q, k, v, g, beta=g, chunk_size=variant.chunk_size, **options)
    l2norm(q)


def _call_in_place(variant: Variant, q: Tensor, k: Tensor, v: Tensor, g: Tensor, options: dict[str, Any]) -> None:
    pool = options["initial_state"].to(variant.pool)
    of_both = {name: options[name] for name in ("use_qk_l2norm_in_kernel", "state_v_first")}
    fused_recurrent_gated_delta_rule_(q, k, v, g, g, pool, **of_both)
    for algorithm in _C.prefill_algorithms():
        with prefill_algorithm(algorithm, variant.wanted_chunk_size if algorithm == "fused_chunk" else 0):
            chunk_gated_delta_rule_(q, k, v, g, g, pool, chunk_size=variant.chunk_size, **of_both)


def _call_stages(variant: Variant, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> None:
    ops = torch.ops.gdn
    C = variant.chunk_size
    g_cumsum = ops.chunk_local_cumsum(g, C)
    A_inv = ops.solve_tril(ops.chunk_scaled_dot_kkt(k, g_cumsum, g, chunk_size=C))
    w, u = ops.recompute_w_u(k, v, g, A_inv, g_cumsum)
    h, v_new, _ = ops.chunk_fwd_h(k, w, u, g_cumsum, chunk_size=C)
    ops.chunk_fwd_o(q, k, v_new, h, g_cumsum, chunk_size=C)


def _call_aura(key_bits: int, value_bits: int, D: int, dtype: torch.dtype) -> None:
    """Every kernel, pass 1 once for each number of rows that it takes together."""
    ops = torch.ops.gdn
    signs = torch.empty(D, device="mps")
    caches = []
    for bits in (key_bits, value_bits):
        tables = (torch.empty(2**bits - 1, device="mps"), torch.empty(2**bits, device="mps"))
        codes, norms, _ = ops.aura_encode(torch.empty(1, 1, TOKENS, D, dtype=dtype, device="mps"), signs, *tables)
        for rotated in (False, True):
            ops.aura_decode(codes, norms, tables[1], signs, None, rotated, dtype)
        caches += [codes, norms, tables[1], signs]
    for rows in (1, 2, 4, 8, specialisations_aura.MATRIX_ROWS):
        q = torch.empty(1, rows, 1, D, dtype=dtype, device="mps")
        ops.aura_attention(q, *caches)
    ops.aura_rotate(q, signs, 1.0, True)


def _call_convolutions() -> None:
    """In all dtypes and widths, of 8 channels (packets of 4) and of 6; few tokens, and more."""
    for x, weight, state in itertools.product(DTYPES, repeat=3):
        for W, D, tokens in itertools.product((2, 3, 4), (8, 6), (TOKENS, 17)):
            causal_conv1d(
                torch.empty(1, tokens, D, dtype=x, device="mps"),
                torch.empty(D, W, dtype=weight, device="mps"),
                initial_state=torch.empty(1, D, W, dtype=state, device="mps"),
                output_final_state=True,
            )
        for W in (2, 3, 4):
            causal_conv1d(
                torch.empty(1, 8, TOKENS, dtype=x, device="mps").transpose(1, 2),
                torch.empty(8, W, dtype=weight, device="mps"),
                initial_state=torch.empty(1, 8, W, dtype=state, device="mps"),
            )


def _call_norms_and_gates() -> None:
    """Rows that begin one element into their storage are in no packets."""
    for x, gate, weight in itertools.product(DTYPES, repeat=3):
        for D, packet in specialisations_modules.ROWS:
            first = 0 if packet == "4" else 1
            rows = [torch.empty(int(D) + first, dtype=dtype, device="mps")[first:] for dtype in (x, gate, weight)]
            rms_norm_gated(rows[0], rows[1], rows[2])
    heads = torch.empty(TOKENS, device="mps")
    gdn_gating(heads, heads, heads)


def _call_many_slots() -> None:
    sequences = 33
    x, pool = torch.empty(sequences, 1, 8, device="mps"), torch.empty(sequences, 8, 2, device="mps")
    causal_conv1d_update_(x, pool[0], pool, torch.arange(sequences, device="mps"))


def launches_of(variants: Iterable[Variant], norms: Iterable[Variant] = (), others: bool = False) -> list[Launch]:
    """What these variants' calls launch, each specialisation once; of `norms` only l2norm is called.

    `others`: those of the ops that take no Variant, too.
    """
    with recording() as library:
        for variant in variants:
            _call(variant)
        for variant in norms:
            l2norm(_rows(variant, 1, variant.K))
        if others:
            for scheme, D, dtype in itertools.product(
                specialisations_aura.SCHEMES, specialisations_aura.HEAD_SIZES, DTYPES
            ):
                _call_aura(*scheme, D, dtype)
            _call_convolutions()
            _call_norms_and_gates()
            _call_many_slots()
        lines = library.recorder_lines().decode().splitlines()
    fields = (line.split("\t") for line in lines)
    return [
        Launch(name, Specialisation(kernel, tuple(arguments.split())), file, int(bindings), int(threads))
        for name, kernel, arguments, file, bindings, threads in fields
    ]


def source_of(variant: Variant) -> str:
    """The Metal source that the host compiles for the l2norm of this variant."""
    with recording() as library:
        l2norm(_rows(variant, 1, variant.K))
        return str(library.recorder_source().decode())
