"""The form of packed weights that torch_gdn's ops read: codes of 4 and 8 bits in words of 32 bits, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import torch_gdn.reference.quantized as reference
from torch_gdn.reference.quantized import BLOCK

GROUPS = (128, 64, 32)  # columns that share a scale, as the ops take them
ROWS = 256  # rows that are unpacked at a time, so that no conversion holds all codes of a matrix


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [N, K], or one for each expert [E, N, K], in codes of 4 or 8 bits, in e4m3 numbers, or in MXFP4.

    `w[n, k] = scales[n, k / group_size] * code[n, k] + biases[n, k / group_size]`. Code k of a row is in word
    `k * bits / 32`, the first code in the lowest bits. E4m3 numbers and MXFP4 are as `quantized_linear` takes them.

    Args:
        weight: int32 [..., N, K * bits / 32], or uint8 [..., N, K] for e4m3.
        scales: [..., N, K / group_size], and for MXFP4 exponents in uint8 [..., N, K / 32]. E4m3 numbers have
            [..., R, G] with R of ceil(N / 128), N or 1, and G of ceil(K / 128) or 1.
        biases: like scales, and None for e4m3 and MXFP4. With scales of 16 bits they may be uint8: zero points, which
            stand for -zero point * scale.
        bits: 4 or 8. 8 for e4m3.
        order: which column of the matrix column k is, [K], where columns were sorted by group; x is gathered by it
            before it is multiplied. Default: None, the columns are in their own order.

    Raises:
        ValueError: bits, dtypes or shapes that do not fit together, or a group size other than 32, 64 and 128.
    """

    weight: Tensor
    scales: Tensor
    biases: Tensor | None
    bits: int
    order: Tensor | None = None

    def __post_init__(self) -> None:
        expect_bits("PackedWeight", self.bits)
        is_known = self.weight.dtype in (torch.int32, torch.uint8)
        expect("PackedWeight: weight", is_known, "int32 or uint8", self.weight.dtype)
        expect("PackedWeight: weight", self.weight.dim() >= 2, "at least 2 dimensions", list(self.weight.shape))
        *rows, K = self.shape
        shape = self.scales.shape
        if self.is_mxfp4:
            alone = self.biases is None and self.bits == 4 and self.order is None
            expect("PackedWeight: biases", alone, "None, and neither order nor 8 bits, for MXFP4", "others")
            fits = (*shape[:-1], 32 * shape[-1]) == self.shape
            expect("PackedWeight: scales", fits, f"{rows} rows of {K} / 32 groups", list(shape))
            return
        expect("PackedWeight: scales", self.scales.is_floating_point(), "a floating dtype", self.scales.dtype)
        if self.biases is None or self.is_e4m3:
            self.expect_e4m3()
            return
        fits = list(shape[:-1]) == rows and shape[-1] > 0 and K % shape[-1] == 0 and K // shape[-1] in GROUPS
        expect("PackedWeight: scales", fits, f"{rows} rows of {K} / 32, / 64 or / 128 groups", list(shape))
        dtypes = [self.scales.dtype, *([torch.uint8] if self.scales.dtype.itemsize == 2 else [])]
        alike = self.biases.shape == shape and self.biases.dtype in dtypes
        got = f"{self.biases.dtype} {list(self.biases.shape)}"
        expect("PackedWeight: biases", alike, f"{' or '.join(map(str, dtypes))} {list(shape)}", got)
        order = self.order
        expect("PackedWeight: order", order is None or order.shape == (K,), f"[{K}]", order is not None and order.shape)

    def expect_e4m3(self) -> None:
        is_whole = self.biases is None and self.is_e4m3 and self.bits == 8 and self.order is None
        expect("PackedWeight: biases", is_whole, "None, and neither order nor 4 bits, for e4m3 in uint8", "others")
        *experts, N, K = self.shape
        *scale_experts, rows, groups = self.scales.shape
        fits = scale_experts == experts and rows in (-(-N // BLOCK), N, 1) and groups in (-(-K // BLOCK), 1)
        expected = f"scales of blocks of {BLOCK} x {BLOCK}, of rows or of all of {list(self.shape)}"
        expect("PackedWeight: scales", fits, expected, list(self.scales.shape))

    @property
    def is_e4m3(self) -> bool:
        return self.weight.dtype == torch.uint8

    @property
    def is_mxfp4(self) -> bool:
        return not self.is_e4m3 and self.scales.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        """Returns [..., N, K]."""
        if self.is_e4m3:
            return self.weight.shape
        return torch.Size([*self.weight.shape[:-1], self.weight.shape[-1] * 32 // self.bits])

    @property
    def group_size(self) -> int:
        if self.is_e4m3:
            return BLOCK if self.scales.shape[-1] == -(-self.shape[-1] // BLOCK) else self.shape[-1]
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype | None]:
        """Returns the dtypes of the scales and of the biases."""
        return self.scales.dtype, None if self.biases is None else self.biases.dtype

    def biases_in(self, dtype: torch.dtype) -> Tensor | None:
        """Returns the biases themselves, computed in this dtype, even if zero points stand for them."""
        if self.biases is None:
            return None
        biases = self.biases.to(dtype)
        return -biases * self.scales.to(dtype) if self.biases.dtype == torch.uint8 else biases

    def in_float32(self) -> PackedWeight:
        """Returns the weight with scales and biases of float32, which are exact."""
        return replace(self, scales=self.scales.float(), biases=self.biases_in(torch.float32))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix with its columns in their own order, computed in float32, or in float64 for that dtype."""
        computed = torch.promote_types(dtype, torch.float32)
        w = reference.unpack(self.weight, self.scales, self.biases, self.bits, computed).to(dtype)
        return w if self.order is None else w.index_select(-1, self.order.argsort())

    def by_row(self) -> PackedWeight:
        """Returns e4m3 numbers with a row of scales for each of their rows."""
        return replace(self, scales=scales_of_rows(self.scales, self.shape[-2]))

    def in_blocks(self) -> PackedWeight:
        """Returns e4m3 numbers with a row of scales for each 128 of theirs, if they have the same."""
        N, blocks = self.shape[-2], self.scales[..., ::BLOCK, :]
        if self.scales.shape[-2] != N or not torch.equal(scales_of_rows(blocks, N), self.scales):
            return self
        return replace(self, scales=blocks.contiguous())


def scales_of_rows(scales: Tensor, rows: int) -> Tensor:
    """Repeats the scales [..., R, G] of blocks of rows, or of all rows, for each row."""
    return reference.along(scales, -2, rows).expand(*scales.shape[:-2], rows, -1)


def stack(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Makes one packed weight of several experts'.

    Args:
        weights: of one shape, bits and group size.

    Raises:
        ValueError: weights that differ, or columns that were sorted by group.
    """
    first = weights[0]
    for weight in weights:
        alike = (weight.shape, weight.bits, weight.group_size) == (first.shape, first.bits, first.group_size)
        alike = alike and (weight.is_e4m3, weight.is_mxfp4) == (first.is_e4m3, first.is_mxfp4)
        expect("stack: weights", alike, "experts of one shape, bits and group size", "others")
        expect("stack: weights", weight.order is None, "experts without act-order (desc_act)", "sorted columns")
    return combined(weights, torch.stack)


def combined(weights: Sequence[PackedWeight], combine: Callable[[list[Tensor]], Tensor]) -> PackedWeight:
    """Makes one weight of several. Scales and biases become float32 if their dtypes differ."""
    expect("combined: weights", len({x.is_mxfp4 for x in weights}) == 1, "all MXFP4, or none", "some")
    alike = weights if len({x.dtypes for x in weights}) == 1 else [x.in_float32() for x in weights]
    if alike[0].is_e4m3:  # blocks of rows end with each matrix
        alike = [x.by_row() for x in alike]
    weight, scales = (combine([getattr(x, part) for x in alike]) for part in ("weight", "scales"))
    biases = None if alike[0].biases is None else combine([x.biases for x in alike if x.biases is not None])
    result = PackedWeight(weight, scales, biases, weights[0].bits)
    return result.in_blocks() if result.is_e4m3 else result


def assemble(
    name: str, weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, g_idx: Tensor | None = None
) -> PackedWeight:
    """Makes one packed weight of packed rows, scales and zero points [..., N, K / group]. None means half the codes.

    Zero points stay what they are with scales of 16 bits, in which biases would not be exact.
    """
    points = torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8) if zeros is None else zeros.to(torch.uint8)
    biases = points if scales.dtype.itemsize == 2 else -(points * scales)
    K = weight.shape[-1] * 32 // bits
    groups = scales.shape[-1]
    expect(f"{name}: scales", groups > 0 and K % groups == 0, f"a scale for each group of {K} columns", groups)
    order = sorting(name, g_idx, K, groups)
    if order is not None:
        weight = permute_columns(weight, order, bits)
    size = K // groups
    fitting = fitting_group(name, size)
    if fitting != size:
        scales, biases = (x.repeat_interleave(size // fitting, dim=-1) for x in (scales, biases))
    return PackedWeight(weight, in_rows(scales), in_rows(biases), bits, order)


def in_rows(x: Tensor) -> Tensor:
    """Returns contiguous rows, also of a single column, which `contiguous` leaves with any stride."""
    return x if x.is_contiguous() and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def fitting_group(name: str, size: int) -> int:
    """Returns the largest of the ops' groups that divides a file's group size."""
    fitting = next((group for group in GROUPS if size % group == 0), None)
    if fitting is None:
        raise ValueError(f"{name}: group size: expected 32, 64, 128 or a multiple of one, got {size}")
    return fitting


def sorting(name: str, g_idx: Tensor | None, K: int, groups: int) -> Tensor | None:
    """Returns the order that sorts columns by group, or None if they are sorted.

    Raises:
        ValueError: groups of unequal sizes, or columns of experts that are not sorted.
    """
    if g_idx is None or g_idx.numel() == 0:
        return None
    expect(f"{name}: g_idx", g_idx.shape[-1] == K, f"[{K}]", list(g_idx.shape))
    sorted_groups = torch.arange(K, device=g_idx.device) // (K // groups)
    if bool((g_idx == sorted_groups).all()):
        return None
    expect(f"{name}: g_idx", g_idx.dim() == 1, "experts without act-order (desc_act)", "columns that are not sorted")
    order = g_idx.argsort(stable=True)
    even = bool((g_idx[order] == sorted_groups).all())
    expect(f"{name}: g_idx", even, f"{K // groups} columns in each of {groups} groups", "groups of other sizes")
    return order


def permute_columns(weight: Tensor, order: Tensor, bits: int) -> Tensor:
    permuted = torch.empty_like(weight)
    for rows in blocks(weight.shape[-2]):
        permuted[..., rows, :] = pack(unpack(weight[..., rows, :], bits).index_select(-1, order), bits)
    return permuted


def checked_words(name: str, argument: str, words: Tensor, bits: int) -> Tensor:
    expect_bits(name, bits)
    expect(f"{name}: {argument}", words.dim() >= 2, "at least 2 dimensions", list(words.shape))
    return as_int32(f"{name}: {argument}", words)


# ---- words -----------------------------------------------------------------------------------------------------------


def expect(argument: str, holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes along the last dimension, the first one in the lowest bits.

    Args:
        codes: integers of at least `bits` bits, [..., K].
        bits: 4 or 8.

    Returns:
        words: int32 [..., K * bits / 32].

    Raises:
        ValueError: other bits, or a K that does not fill words.

    Example:
        >>> import torch
        >>> from torch_gdn.quantized import pack, unpack
        >>> unpack(pack(torch.arange(8), bits=4), bits=4)
        tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.int32)
    """
    expect_bits("pack", bits)
    per_word = 32 // bits
    expect("pack: codes", codes.shape[-1] % per_word == 0, f"a multiple of {per_word} columns", list(codes.shape))
    columns = codes.int().unflatten(-1, (-1, per_word))
    words = columns[..., 0] & mask_of(bits)
    for k in range(1, per_word):
        words = words | (columns[..., k] & mask_of(bits)) << bits * k
    return words


def unpack(words: Tensor, bits: int) -> Tensor:
    """Returns the codes of words that `pack` packed.

    Args:
        words: int32 or uint32, [..., W].
        bits: 4 or 8.

    Returns:
        codes: int32 [..., W * 32 / bits], from 0 to 2 ** bits - 1.

    Raises:
        ValueError: other bits, or words of another dtype.
    """
    expect_bits("unpack", bits)
    return reference.codes_of(as_int32("unpack: words", words), bits)


def mask_of(bits: int) -> int:
    return (1 << bits) - 1


def expect_bits(name: str, bits: int) -> None:
    expect(f"{name}: bits", bits in (4, 8), "4 or 8", bits)


def as_int32(argument: str, words: Tensor) -> Tensor:
    expect(argument, words.dtype in (torch.int32, torch.uint32), "int32 or uint32", words.dtype)
    return words.view(torch.int32)


def blocks(rows: int, multiple: int = 1) -> Iterator[slice]:
    """Yields some rows at a time, a multiple of `multiple` except for the last ones."""
    step = max(multiple, ROWS // multiple * multiple)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
