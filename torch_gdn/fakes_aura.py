"""What each AURA op returns, without computing it, as fakes.py does for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_gdn.fakes import ACTIVATION_DTYPES, Check

HEAD_SIZES = (64, 80, 96, 128, 256, 512)
BITS = (2, 3, 4, 8)


def code_words(D: int, bits: int) -> int:
    return (D * bits + 31) // 32


class AuraCheck(Check):
    def head_size(self, argument: str, D: int) -> int:
        self.value(D in HEAD_SIZES, argument, "a head size of 64, 80, 96, 128, 256 or 512", D)
        return D

    def table(self, argument: str, x: Tensor, pattern: str, size: int) -> None:
        self.float32(argument, x)
        self.shape(argument, x, pattern, (size,))

    def bits(self, argument: str, codebook: Tensor) -> int:
        self.float32(argument, codebook)
        self.dimensions(argument, codebook, "[2^bits]")
        for bits in BITS:
            if codebook.shape[0] == 2**bits:
                return bits
        self.value(False, argument, "4, 8, 16 or 256 centroids (2, 3, 4 or 8 bits)", codebook.shape[0])
        raise AssertionError  # never here: the check has raised

    def codes_like(self, argument: str, codes: Tensor, rows: Sequence[int], D: int, bits: int) -> None:
        self.dtype(codes.dtype == torch.int32, argument, "dtype int32", codes)
        self.sized(argument, codes, "[.., ceil(D * bits / 32)]", (*rows, code_words(D, bits)))

    def norms_like(self, argument: str, norms: Tensor, rows: Sequence[int]) -> None:
        self.float32(argument, norms)
        self.sized(argument, norms, "that of the codes without their words", rows)

    def sized(self, argument: str, x: Tensor, pattern: str, sizes: Sequence[int]) -> None:
        expected = f"shape {pattern} = {list(sizes)}"
        self.value(x.dim() == len(sizes), argument, expected, x.shape)
        for size, wanted in zip(x.shape, sizes, strict=True):
            self.value(size == wanted, argument, expected, x.shape)
        self.device(argument, x)

    def index(self, argument: str, x: Tensor) -> None:
        self.dtype(x.dtype in (torch.int32, torch.int64), argument, "dtype int32 or int64", x)
        self.device(argument, x)

    def some_dimension(self, argument: str, x: Tensor) -> None:
        self.value(x.dim() >= 1, argument, "at least one dimension", x.dim())

    def result_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        expected = f"{self.op}: dtype: expected dtype bfloat16, float16 or float32, got {dtype}"
        torch._check_type(dtype is None or dtype in ACTIVATION_DTYPES, lambda: expected)
        return dtype or torch.float32


def check_codec(check: AuraCheck, x: Tensor, signs: Tensor, boundaries: Tensor, codebook: Tensor) -> tuple[int, int]:
    """D and bits."""
    check.activation("x", x)
    check.some_dimension("x", x)
    D = check.head_size("x", x.shape[-1])
    check.table("signs", signs, "[D]", D)
    bits = check.bits("codebook", codebook)
    check.table("boundaries", boundaries, "[2^bits - 1]", codebook.shape[0] - 1)
    return D, bits


@torch.library.register_fake("gdn::aura_encode")
def aura_encode(
    x: Tensor, signs: Tensor, boundaries: Tensor, codebook: Tensor, with_means: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    D, bits = check_codec(AuraCheck("aura_encode", "x", x), x, signs, boundaries, codebook)
    rows = x.shape[:-1]
    codes = x.new_empty((*rows, code_words(D, bits)), dtype=torch.int32)
    means = rows if with_means else (0,)
    return codes, x.new_empty(rows, dtype=torch.float32), x.new_empty(means, dtype=torch.float32)


@torch.library.register_fake("gdn::aura_encode_")
def aura_encode_(
    x: Tensor,
    slots: Tensor,
    signs: Tensor,
    boundaries: Tensor,
    codebook: Tensor,
    codes: Tensor,
    norms: Tensor,
    means: Tensor | None = None,
) -> None:
    check = AuraCheck("aura_encode_", "x", x)
    check.activation("x", x)
    check.dimensions("x", x, "[B, HK, T, D]")
    D, bits = check_codec(check, x, signs, boundaries, codebook)
    B, HK, T = x.shape[:3]
    check.index("slots", slots)
    if slots.dim() == 1:
        check.shape("slots", slots, "[T]", (T,))
    else:
        check.shape("slots", slots, "[B, T] or [T]", (B, T))
    check.dtype(codes.dtype == torch.int32, "codes", "dtype int32", codes)
    check.dimensions("codes", codes, "[B, HK, S, ceil(D * bits / 32)]")
    rows = (B, HK, codes.shape[2])
    check.codes_like("codes", codes, rows, D, bits)
    check.value(codes.stride(3) == 1, "codes", "a last stride of 1", codes.stride(3))
    check.norms_like("norms", norms, rows)
    if means is not None:
        check.norms_like("means", means, rows)


@torch.library.register_fake("gdn::aura_decode")
def aura_decode(
    codes: Tensor,
    norms: Tensor,
    codebook: Tensor,
    signs: Tensor,
    means: Tensor | None = None,
    rotated: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    check = AuraCheck("aura_decode", "codes", codes)
    check.dtype(codes.dtype == torch.int32, "codes", "dtype int32", codes)
    check.some_dimension("codes", codes)
    check.float32("signs", signs)
    check.dimensions("signs", signs, "[D]")
    D = check.head_size("signs", signs.shape[0])
    bits = check.bits("codebook", codebook)
    rows = codes.shape[:-1]
    check.codes_like("codes", codes, rows, D, bits)
    check.norms_like("norms", norms, rows)
    if means is not None:
        check.norms_like("means", means, rows)
    return norms.new_empty((*rows, D), dtype=check.result_dtype(dtype))


@torch.library.register_fake("gdn::aura_rotate")
def aura_rotate(x: Tensor, signs: Tensor, scale: float = 1.0, inverse: bool = False) -> Tensor:
    check = AuraCheck("aura_rotate", "x", x)
    check.activation("x", x)
    check.some_dimension("x", x)
    check.table("signs", signs, "[D]", check.head_size("x", x.shape[-1]))
    return x.new_empty(x.shape, dtype=torch.float32)


LARGEST_POSITION = 2**30 - 1


def check_queries(
    check: AuraCheck,
    name: str,
    q: Tensor,
    keys: tuple[Tensor, Tensor, Tensor, Tensor | None],
    values: tuple[Tensor, Tensor, Tensor, Tensor | None],
    starts: Tensor | None,
    causal: bool,
    q_offset: int | None,
    window: int,
) -> tuple[int, int, int, int, int]:
    """What pass 1 and the end-to-end op share: B, HQ, L, T, D."""
    check.dimensions(name, q, "[B, HQ, L, D]")
    B, HQ, L = q.shape[:3]
    D = check.head_size(name, q.shape[3])
    bits = [check.bits(f"{which}_codebook", x[2]) for which, x in (("key", keys), ("value", values))]
    check.dtype(keys[0].dtype == torch.int32, "key_codes", "dtype int32", keys[0])
    check.dimensions("key_codes", keys[0], "[B, HK, T, ceil(D * bits / 32)]")
    HK, T = keys[0].shape[1:3]
    check.heads("key_codes", HK, name, HQ)
    for which, (codes, norms, _, means), b in (("key", keys, bits[0]), ("value", values, bits[1])):
        check.codes_like(f"{which}_codes", codes, (B, HK, T), D, b)
        check.norms_like(f"{which}_norms", norms, (B, HK, T))
        if means is not None:
            check.norms_like(f"{which}_means", means, (B, HK, T))
    if starts is not None:
        check.index("starts", starts)
        check.shape("starts", starts, "[B]", (B,))
    check.value(T <= LARGEST_POSITION, "key_codes", "fewer than 2^30 tokens", T)
    if q_offset is not None:
        check.value(q_offset >= -LARGEST_POSITION, "q_offset", "a position below 2^30", q_offset)
        check.value(q_offset <= LARGEST_POSITION, "q_offset", "a position below 2^30", q_offset)
    check.value(0 <= window <= LARGEST_POSITION, "window", "a window from 0 (none) to 2^30", window)
    check.value(window == 0 or causal, "window", "0 where causal is false", window)
    return B, HQ, L, T, D


def check_block_size(check: AuraCheck, size: int) -> None:
    check.value(size >= 16, "block_size", "a multiple of 16", size)
    check.value(size % 16 == 0, "block_size", "a multiple of 16", size)


@torch.library.register_fake("gdn::aura_flash_p1")
def aura_flash_p1(
    q_rot: Tensor,
    key_codes: Tensor,
    key_norms: Tensor,
    key_codebook: Tensor,
    value_codes: Tensor,
    value_norms: Tensor,
    value_codebook: Tensor,
    key_means: Tensor | None = None,
    q_sums: Tensor | None = None,
    value_means: Tensor | None = None,
    starts: Tensor | None = None,
    causal: bool = True,
    q_offset: int | None = None,
    window: int = 0,
    block_size: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check = AuraCheck("aura_flash_p1", "q_rot", q_rot)
    check.float32("q_rot", q_rot)
    keys = (key_codes, key_norms, key_codebook, key_means)
    values = (value_codes, value_norms, value_codebook, value_means)
    B, HQ, L, T, D = check_queries(check, "q_rot", q_rot, keys, values, starts, causal, q_offset, window)
    got = "None" if q_sums is None else "a tensor"
    check.value((q_sums is None) == (key_means is None), "q_sums", "a tensor where key_means is one, else None", got)
    if q_sums is not None:
        check.float32("q_sums", q_sums)
        check.shape("q_sums", q_sums, "[B, HQ, L]", (B, HQ, L))
    check_block_size(check, block_size)
    rows = (B, HQ, L, (T + block_size - 1) // block_size)
    means = rows if value_means is not None else (0,)
    return q_rot.new_empty((*rows, D)), q_rot.new_empty(rows), q_rot.new_empty(rows), q_rot.new_empty(means)


@torch.library.register_fake("gdn::aura_flash_p2")
def aura_flash_p2(
    o_partials: Tensor,
    m_partials: Tensor,
    l_partials: Tensor,
    value_signs: Tensor,
    mean_partials: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    check = AuraCheck("aura_flash_p2", "o_partials", o_partials)
    check.float32("o_partials", o_partials)
    check.dimensions("o_partials", o_partials, "[B, HQ, L, NB, D]")
    B, HQ, L, NB = o_partials.shape[:4]
    D = check.head_size("o_partials", o_partials.shape[4])
    parts = {"m_partials": m_partials, "l_partials": l_partials}
    if mean_partials is not None:
        parts["mean_partials"] = mean_partials
    for name, part in parts.items():
        check.float32(name, part)
        check.shape(name, part, "[B, HQ, L, NB]", (B, HQ, L, NB))
    check.table("value_signs", value_signs, "[D]", D)
    if sinks is not None:
        check.table("sinks", sinks, "[HQ]", HQ)
    return o_partials.new_empty((B, HQ, L, D), dtype=check.result_dtype(dtype))


@torch.library.register_fake("gdn::aura_attention")
def aura_attention(
    q: Tensor,
    key_codes: Tensor,
    key_norms: Tensor,
    key_codebook: Tensor,
    key_signs: Tensor,
    value_codes: Tensor,
    value_norms: Tensor,
    value_codebook: Tensor,
    value_signs: Tensor,
    key_means: Tensor | None = None,
    value_means: Tensor | None = None,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int | None = None,
    window: int = 0,
    block_size: int | None = None,
) -> Tensor:
    check = AuraCheck("aura_attention", "q", q)
    check.activation("q", q)
    keys = (key_codes, key_norms, key_codebook, key_means)
    values = (value_codes, value_norms, value_codebook, value_means)
    B, HQ, L, _, D = check_queries(check, "q", q, keys, values, starts, causal, q_offset, window)
    check.table("key_signs", key_signs, "[D]", D)
    check.table("value_signs", value_signs, "[D]", D)
    if sinks is not None:
        check.table("sinks", sinks, "[HQ]", HQ)
    if block_size is not None:
        check_block_size(check, block_size)
    return q.new_empty((B, HQ, L, D))
