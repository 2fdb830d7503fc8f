"""Packs codes of 4 and 8 bits into words of 32 bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 256  # rows that are unpacked at a time, so that no conversion holds all codes of a matrix


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
    words = as_int32("unpack: words", words)
    return torch.stack([words >> shift & mask_of(bits) for shift in range(0, 32, bits)], dim=-1).flatten(-2)


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
