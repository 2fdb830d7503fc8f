from __future__ import annotations

import torch
from torch import Tensor


def aura_encode(x: Tensor, signs: Tensor, boundaries: Tensor | None, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Encodes vectors: normalises each, rotates it by Pi, and replaces each coordinate by the nearest centroid.

    Pi = H diag(signs) / sqrt(D), where H is a Hadamard matrix: Sylvester's, multiplied by Paley's of order 20 or 12 for
    D of 80 or 96. A vector with a NaN or an infinity gets codes of 0 and a norm that is not finite.

    With a codebook of two dimensions, codes are those of a trellis. The 6 bits of the stream from a value's code on
    choose its entry of the codebook. The stream is a ring: behind its last bit comes its first one. Viterbi's algorithm
    (1967) finds the codes whose vector is nearest to x, among those whose state at the ring's joint is the best one for
    the 16 values on each side.

    Source: AURA (Kryski and Turney, working draft, 2026), section 2; metaltile-std's `aura_encode`.

    Args:
        x: [..., D], bfloat16, float16 or float32. D is 64, 80, 96, 128, 256 or 512. Any strides; a last stride other
            than 1 costs a copy.
        signs: [D], float32. 1 or -1.
        boundaries: [2 ** bits - 1], float32. In ascending order. The code of a coordinate is the number of boundaries
            below it. None for a trellis.
        codebook: [2 ** bits] or [2 ** bits, 2 ** (6 - bits)], float32. The centroid of each code, for 2, 3, 4, 5 or 8
            bits. The second is a trellis, for 2, 3 or 4 bits: entry w, row by row, is the label of window w.

    Returns:
        codes: [..., ceil(D * bits / 32)], int32. Each row is a little-endian stream of D codes. The rest of its last
            word has zeros, or for a trellis the first bits again.
        norms: [...], float16. The factors that a decoder multiplies the centroids by. A norm above 65504, which float16
            cannot hold, is infinite.

    Example:
        >>> import torch, torch_gdn
        >>> codebook = torch.tensor([-0.19, -0.06, 0.06, 0.19])
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> codes, norms = torch_gdn.aura_encode(torch.ones(2, 3, 64), torch.ones(64), boundaries, codebook)
        >>> codes.shape, norms.shape
        (torch.Size([2, 3, 4]), torch.Size([2, 3]))
    """
    return torch.ops.gdn.aura_encode(x, signs, boundaries, codebook)


def aura_encode_(
    x: Tensor,
    slots: Tensor,
    signs: Tensor,
    boundaries: Tensor | None,
    codebook: Tensor,
    codes: Tensor,
    norms: Tensor,
    tile_means: Tensor | None = None,
) -> None:
    """Runs `aura_encode` and writes token t of batch row b into slot slots[t] or slots[b, t] of a cache.

    Args:
        x: [B, HK, T, D], bfloat16, float16 or float32. D is 64, 80, 96, 128, 256 or 512. Any strides; a last stride
            other than 1 costs a copy.
        slots: [T] or [B, T], int32 or int64. A token with a negative slot is not stored. The other slots of a row must
            differ from each other. On x's device.
        signs, boundaries, codebook: See `aura_encode`.
        codes: [B, HK, S, ceil(D * bits / 32)], int32. Written in place. S is the capacity. The last stride must be 1.
        norms: [B, HK, S], float16. Written in place.
        tile_means: [B, HK, tiles, D], float16. Vector i of tiles is subtracted from the tokens in slots 128 i to
            128 i + 127 before anything else. There is one for each 128 slots. Any strides; a last stride other than 1
            costs a copy. Default: None, for none.

    Raises:
        ValueError: If a slot is not below S. On `mps`, such a slot raises a RuntimeError at the next synchronisation,
            and nothing is stored for it.

    Example:
        >>> import torch, torch_gdn
        >>> codebook = torch.tensor([-0.19, -0.06, 0.06, 0.19])
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> codes, norms = torch.zeros(1, 2, 8, 4, dtype=torch.int32), torch.zeros(1, 2, 8, dtype=torch.float16)
        >>> x, slots = torch.ones(1, 2, 1, 64), torch.tensor([5])
        >>> torch_gdn.aura_encode_(x, slots, torch.ones(64), boundaries, codebook, codes, norms)
        >>> norms[0, 0].nonzero().flatten()
        tensor([5])
    """
    torch.ops.gdn.aura_encode_(x, slots, signs, boundaries, codebook, codes, norms, tile_means)
