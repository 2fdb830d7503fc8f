from __future__ import annotations

import torch
from torch import Tensor


def aura_decode(
    codes: Tensor,
    norms: Tensor,
    codebook: Tensor,
    signs: Tensor,
    rotated: bool = False,
    dtype: torch.dtype | None = None,
    tile_means: Tensor | None = None,
) -> Tensor:
    """Dequantises codes: norm * Pi^T codebook[codes] + mean. `aura_encode` defines Pi.

    Source: AURA (Kryski and Turney, working draft, 2026), section 2; metaltile-std's `aura_dequant_rotated`.

    Args:
        codes: [..., ceil(D * bits / 32)], int32. Any strides; a last stride other than 1 costs a copy.
        norms: [...], float16. Any strides.
        codebook: [2 ** bits] or [2 ** bits, 2 ** (6 - bits)], float32. The one of `aura_encode`.
        signs: [D], float32. 1 or -1. D is 64, 80, 96, 128, 256 or 512.
        rotated: Whether to leave out Pi^T and return Pi times the vector. Default: False.
        dtype: Dtype of the result: bfloat16, float16 or float32. Default: None, for float32.
        tile_means: [B, HK, tiles, D], float16. The means that `aura_encode_` subtracted, for codes [B, HK, T, ..]. Any
            strides; a last stride other than 1 costs a copy. Default: zeros.

    Returns:
        x: [..., D], dtype, or float32. Contiguous.

    Example:
        >>> import torch, torch_gdn
        >>> codebook, signs = torch.tensor([-0.19, -0.06, 0.06, 0.19]), torch.ones(64)
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> x = torch.randn(3, 64)
        >>> codes, norms = torch_gdn.aura_encode(x, signs, boundaries, codebook)
        >>> y = torch_gdn.aura_decode(codes, norms, codebook, signs)
        >>> bool((y - x).norm() < 0.5 * x.norm())
        True
    """
    return torch.ops.gdn.aura_decode(codes, norms, codebook, signs, rotated, dtype, tile_means)
