from __future__ import annotations

import torch
from torch import Tensor


def aura_encode(
    x: Tensor, signs: Tensor, boundaries: Tensor, codebook: Tensor, with_means: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors as codes: each is normalised, rotated by Pi, and each coordinate is replaced by the nearest centroid.

    Pi = H diag(signs) / sqrt(D), H a Hadamard matrix (Sylvester's; times Paley's of order 20 or 12 for D 80 or 96). A
    vector that has a NaN or an infinity gets codes 0 and a norm that is not finite.

    Source: AURA (Kryski and Turney, working draft, 2026), section 2; metaltile-std's `aura_encode`.

    Args:
        x: [.., D], bfloat16, float16 or float32; D is 64, 80, 96, 128, 256 or 512. Any strides; a last stride other
            than 1 costs a copy.
        signs: [D] float32, 1 or -1.
        boundaries: [2^bits - 1] float32, ascending: a coordinate's code is the number of boundaries below it.
        codebook: [2^bits] float32, the centroid of each code; bits is 2, 3, 4 or 8.
        with_means: take the mean of each vector off first and keep it. Default: False.

    Returns:
        codes [.., ceil(D * bits / 32)] int32, whose bits are a little-endian stream of D codes; norms [..] float32, by
        which a decoder multiplies the centroids; means [..] float32, or [0] without with_means.

    Raises:
        ValueError: a shape, size or device that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> codebook = torch.tensor([-0.19, -0.06, 0.06, 0.19])
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> codes, norms, _ = torch_gdn.aura_encode(torch.ones(2, 3, 64), torch.ones(64), boundaries, codebook)
        >>> codes.shape, norms.shape
        (torch.Size([2, 3, 4]), torch.Size([2, 3]))
    """
    return torch.ops.gdn.aura_encode(x, signs, boundaries, codebook, with_means)


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
    """`aura_encode` straight into a cache: token t of batch row b goes to slot slots[t], or slots[b, t].

    Args:
        x: [B, HK, T, D], else as for `aura_encode`.
        slots: [T] or [B, T], int32 or int64, on x's device; a token with a negative slot is not stored. Slots of one
            row must differ from each other.
        signs: [D], boundaries: [2^bits - 1], codebook: [2^bits], as for `aura_encode`.
        codes: [B, HK, S, ceil(D * bits / 32)] int32, S the capacity, written in place. Any strides but a last one of 1.
        norms: [B, HK, S] float32, written in place.
        means: [B, HK, S] float32, written in place; given, the mean of each vector is taken off first. Default: None.

    Returns:
        nothing; codes, norms and means are changed.

    Raises:
        ValueError: a shape, size or device that is not as above, or a slot that is not below S; on `mps` nothing is
            stored for such a slot, and the error is a RuntimeError of the next synchronisation.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> codebook = torch.tensor([-0.19, -0.06, 0.06, 0.19])
        >>> boundaries = (codebook[1:] + codebook[:-1]) / 2
        >>> codes, norms = torch.zeros(1, 2, 8, 4, dtype=torch.int32), torch.zeros(1, 2, 8)
        >>> x, slots = torch.ones(1, 2, 1, 64), torch.tensor([5])
        >>> torch_gdn.aura_encode_(x, slots, torch.ones(64), boundaries, codebook, codes, norms)
        >>> norms[0, 0].nonzero().flatten()
        tensor([5])
    """
    torch.ops.gdn.aura_encode_(x, slots, signs, boundaries, codebook, codes, norms, means)
