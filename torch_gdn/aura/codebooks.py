"""The centroids that code rotated coordinates, and the rotations' signs.

The default tables have the Lloyd-Max centroids of a coordinate of a random unit vector in R^D
(`evidence.lab.studies.lloyd_max` in a checkout). FFAI and mlx-swift-lm, where AURA comes from, use the table "origin".
It is right at 2 and 3 bits, but has twice the mean squared error at 4 bits and nearly four times at 8. It is here so
that you can read their caches. The table "trellis" (`torch_gdn.aura.trellis`) has a label for each window of 6 bits.
"""

import torch
from torch import Tensor

from torch_gdn.aura import trellis
from torch_gdn.aura.tables import read, require
from torch_gdn.reference.aura import MASK, aura_signs

__all__ = ["BITS", "DIMENSIONS", "TABLES", "aura_signs", "boundaries", "codebook", "origin_signs"]

DIMENSIONS = (64, 80, 96, 128, 256, 512)
BITS = (2, 3, 4, 5, 8)
TABLES = ("lloyd-max", "origin")  # for codes without a trellis
WINDOW = 6  # bits of a trellis code's window


def codebook(bits: int, D: int, table: str = "lloyd-max") -> Tensor:
    """Returns the 2^bits centroids of vectors of D values, or the 64 labels of a trellis code.

    Args:
        bits: 2, 3, 4, 5 or 8. The table "origin" lacks 5 bits, and "trellis" has 2, 3 and 4.
        D: 64, 80, 96, 128, 256 or 512.
        table: "lloyd-max", or "origin", that of FFAI and mlx-swift-lm, for D other than 128 scaled by sqrt(128 / D) as
            there, or "trellis". Default: "lloyd-max".

    Returns:
        codebook: [2 ** bits], float32. In ascending order, on the CPU. A trellis has [2 ** bits, 2 ** (6 - bits)]:
            entry w, row by row, is the label of window w.

    Raises:
        ValueError: bits, D or table that is not one of those.

    Example:
        >>> from torch_gdn.aura import codebooks
        >>> codebooks.codebook(2, 128)
        tensor([-0.1330, -0.0400,  0.0400,  0.1330])
        >>> codebooks.codebook(4, 128).max(), codebooks.codebook(4, 128, "origin").max()
        (tensor(0.2377), tensor(0.1739))
    """
    require("codebook: bits", bits, BITS)
    require("codebook: D", D, DIMENSIONS)
    require("codebook: table", table, (*TABLES, "trellis"))
    if table == "trellis":
        require("codebook: bits of a trellis", bits, trellis.RATES[WINDOW])
        return trellis.table(WINDOW, bits).view(2**bits, -1) / D**0.5
    if table == "origin":
        require("codebook: bits of the table 'origin'", bits, (2, 3, 4, 8))
        at_128 = torch.tensor(read("origin_codebooks.json")[str(bits)])
        return at_128 if D == 128 else at_128 * (128 / D) ** 0.5
    positive = torch.tensor(read("codebooks.json")[str(D)][str(bits)])
    return torch.cat([-positive.flip(0), positive])


def boundaries(codebook: Tensor) -> Tensor | None:
    """Returns the midpoints between neighbours of a codebook.

    Args:
        codebook: [2^bits] float32, ascending; or that of a trellis, of two dimensions.

    Returns:
        boundaries: [2 ** bits - 1], float32. None for a trellis.

    Example:
        >>> import torch
        >>> from torch_gdn.aura import codebooks
        >>> codebooks.boundaries(torch.tensor([-3.0, -1.0, 1.0, 3.0]))
        tensor([-2.,  0.,  2.])
    """
    if codebook.dim() == 2:
        return None
    in_f64 = codebook.double()
    return ((in_f64[:-1] + in_f64[1:]) / 2).float()


def origin_signs(D: int, seed: int) -> Tensor:
    """Returns the signs of FFAI's rotation (its AURARotation.swift), to read its caches. If D is a power of 2, their
    rotation differs from ours only in these signs.

    Args:
        D: how many.
        seed: as there, the layer's index.

    Returns:
        signs: [D], float32. 1 or -1, by the low bit of xorshift64 (Marsaglia 2003) from a state that SplitMix64 mixed.

    Example:
        >>> from torch_gdn.aura import codebooks
        >>> codebooks.origin_signs(4, seed=0)
        tensor([-1.,  1.,  1., -1.])
    """
    z = (seed + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    state = (z ^ z >> 31) | 1
    signs = []
    for _ in range(D):
        state ^= state << 13 & MASK
        state ^= state >> 7
        state ^= state << 17 & MASK
        signs.append(1.0 if state & 1 else -1.0)
    return torch.tensor(signs)
