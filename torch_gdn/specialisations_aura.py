"""Which specialisations of the AURA kernels calls ask for, as specialisations.py has it of Gated DeltaNet's.

tests/aura/test_aura_specialisations.py holds what stands here against what the host (csrc/aura/) launches.
"""

from __future__ import annotations

import torch

from torch_gdn.specialisations import DTYPES, METAL_TYPES, Specialisation

HEAD_SIZES = (64, 80, 96, 128, 256, 512)
BITS = (2, 3, 4, 8)
SCHEMES = ((8, 8), (8, 4), (4, 4), (4, 2), (3, 3), (2, 2))  # bits of keys and of values
# Pass 1 multiplies 8x8 blocks from this many rows (queries times query heads of a KV head) on: 32 rows a threadgroup.
MATRIX_ROWS = 17
KERNELS = (
    "aura_encode",
    "aura_decode",
    "aura_rotate",
    "aura_flash_p1",
    "aura_flash_p1_matrix",
    "aura_flash_p2",
)


def encoding(dtype: torch.dtype, bits: int, D: int) -> Specialisation:
    return Specialisation("aura_encode", (METAL_TYPES[dtype], str(bits), str(D)))


def decoding(dtype: torch.dtype, bits: int, D: int, rotated: bool = False) -> Specialisation:
    """`dtype` is the result's."""
    return Specialisation("aura_decode", (METAL_TYPES[dtype], str(bits), str(D), "true" if rotated else "false"))


def rotating(dtype: torch.dtype, D: int, inverse: bool = False) -> Specialisation:
    return Specialisation("aura_rotate", (METAL_TYPES[dtype], str(D), "true" if inverse else "false"))


def first_pass(key_bits: int, value_bits: int, D: int, rows: int) -> Specialisation:
    """`rows`: queries times query heads of a KV head."""
    sizes = (str(key_bits), str(value_bits), str(D))
    if rows >= MATRIX_ROWS:
        return Specialisation("aura_flash_p1_matrix", sizes)
    together = next((size for size in (1, 2, 4) if rows <= size), 8)
    return Specialisation("aura_flash_p1", (*sizes, str(together)))


def second_pass(dtype: torch.dtype, D: int) -> Specialisation:
    """`dtype` is the result's."""
    return Specialisation("aura_flash_p2", (METAL_TYPES[dtype], str(D)))


def attention(dtype: torch.dtype, key_bits: int, value_bits: int, D: int, rows: int) -> list[Specialisation]:
    """What aura_attention launches, in order."""
    return [rotating(dtype, D), first_pass(key_bits, value_bits, D, rows), second_pass(dtype, D)]


def table(quick: bool = False) -> list[Specialisation]:
    """Those that are checked: every dtype and size, and the bits of the schemes; each once.

    `quick`: what the scheme 8v4 asks for in bfloat16 with vectors of 128.
    """
    dtypes = [torch.bfloat16] if quick else list(DTYPES)
    sizes = [128] if quick else list(HEAD_SIZES)
    schemes = [(8, 4)] if quick else list(SCHEMES)
    bits = sorted({each for scheme in schemes for each in scheme})
    found = [encoding(dtype, b, D) for dtype in dtypes for b in bits for D in sizes]
    found += [
        decoding(dtype, b, D, rotated) for dtype in dtypes for b in bits for D in sizes for rotated in (False, True)
    ]
    found += [rotating(dtype, D, inverse) for dtype in dtypes for D in sizes for inverse in (False, True)]
    found += [first_pass(*scheme, D, rows) for scheme in schemes for D in sizes for rows in (1, 2, 4, 8, MATRIX_ROWS)]
    return found + [second_pass(dtype, D) for dtype in dtypes for D in sizes]
