"""Codes keys and values in other projects' formats. They are coded as stored, so the tensors' sizes are the bits.

    fp8         vLLM's `--kv-cache-dtype fp8_e4m3`: one float32 scale for the whole tensor, from its largest magnitude
    q8_0 ...    llama.cpp's blocks of 32 neighbours: a float16 scale, in q4_1 a float16 minimum too
    4 or 2 bits by 64    transformers' QuantizedCache with quanto: affine, groups of 64 neighbours, scale and shift
                float16; the newest tokens, which that cache leaves as they are, are not counted

Codes of b bits are stored as b planes of one bit each. The place of a bit changes no number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK, GROUP = 32, 64
LARGEST_FP8 = 448.0  # the largest number of e4m3 without infinities
PLACES = (1 << torch.arange(8)).to(torch.uint8)


class Stored(NamedTuple):
    """The stored form of a tensor, and the float32 tensor that it stands for."""

    tensors: tuple[Tensor, ...]
    decoded: Tensor

    @property
    def bits(self) -> float:
        """Returns the bits per value, with scales."""
        return 8 * sum(x.nbytes for x in self.tensors) / self.decoded.numel()


Format = Callable[[Tensor], Stored]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs integers [.., n] of `bits` bits each into bytes [.., bits, n / 8]."""
    planes = codes.to(torch.uint8).unsqueeze(-2) >> torch.arange(bits, dtype=torch.uint8)[:, None] & 1
    return (planes.unflatten(-1, (-1, 8)) * PLACES).sum(-1, dtype=torch.uint8)


def unpack(planes: Tensor) -> Tensor:
    """Unpacks bytes [.., bits, n / 8] into integers [.., n]."""
    ones = (planes[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    return (ones << torch.arange(ones.shape[-2], dtype=torch.uint8)[:, None]).sum(-2)


def fp8(x: Tensor) -> Stored:
    scale = x.abs().max() / LARGEST_FP8
    codes = (x / scale).to(torch.float8_e4m3fn)
    return Stored((codes, scale), codes.float() * scale)


def symmetric_8(x: Tensor) -> Stored:
    """Codes q8_0: numbers from -127 to 127 times a scale."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks * reciprocal(scale)).round().to(torch.int8)
    kept = scale.half()
    return Stored((codes, kept), (codes * kept.float()).flatten(-2))


def symmetric(x: Tensor, bits: int) -> Stored:
    """Codes q4_0 and q5_0: the value of the largest magnitude, with its sign, becomes the lowest code."""
    blocks, half = x.unflatten(-1, (-1, BLOCK)), 1 << (bits - 1)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -half
    codes = (blocks * reciprocal(scale) + half + 0.5).floor().clamp(0, 2 * half - 1)
    return store_blocks(codes, bits, scale.half(), zero=-half)


def affine(x: Tensor, bits: int, size: int) -> Stored:
    """Codes q4_1 and quanto's groups: the smallest value becomes 0, the largest 2^bits - 1."""
    blocks, top = x.unflatten(-1, (-1, size)), 2**bits - 1
    low = blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - low) / top
    codes = ((blocks - low) * reciprocal(scale) + 0.5).floor().clamp(0, top)
    return store_blocks(codes, bits, scale.half(), low=low.half())


def reciprocal(scale: Tensor) -> Tensor:
    """Returns 0 for 0, so that a block of equal values has the code of zero."""
    return torch.where(scale == 0, 0.0, 1 / scale)


def store_blocks(codes: Tensor, bits: int, scale: Tensor, zero: int = 0, low: Tensor | None = None) -> Stored:
    """Stores codes [.., blocks, size] with a scale and perhaps a minimum [.., blocks, 1], and decodes it."""
    planes = pack(codes, bits)
    decoded = (unpack(planes) + zero) * scale.float()
    if low is None:
        return Stored((planes, scale), decoded.flatten(-2))
    return Stored((planes, scale, low), (decoded + low.float()).flatten(-2))


FORMATS: dict[str, Format] = {
    "fp8 e4m3": fp8,
    "q8_0": symmetric_8,
    "q5_0": partial(symmetric, bits=5),
    "q4_1": partial(affine, bits=4, size=BLOCK),
    "q4_0": partial(symmetric, bits=4),
    "4 bits by 64": partial(affine, bits=4, size=GROUP),
    "2 bits by 64": partial(affine, bits=2, size=GROUP),
}
