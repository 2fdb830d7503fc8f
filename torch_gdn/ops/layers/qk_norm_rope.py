from __future__ import annotations

import torch
from torch import Tensor


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    zero_centered: bool = False,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalises each head of q and k, and rotates its first 2 P elements by the angles of the token.

    The norm is x * rsqrt(mean of x^2 + eps) * weight. Then the pair (x[i], x[i + P]) becomes
    (x[i] cos[i] - x[i + P] sin[i], x[i + P] cos[i] + x[i] sin[i]) for i < P, and the elements from 2 P on stay. This is
    how Qwen, Llama and GPT-NeoX place their pairs. The caller's tables decide the angles, so that scaled positions and
    sections of positions (mrope) need nothing else. Computed in float32 and rounded once. On `mps` this is one launch.

    Args:
        q: [B, T, HQ, D], bfloat16, float16 or float32. Any strides, so that it can be a part of a projection. Copied if
            its last stride is not 1.
        k: [B, T, HK, D], q's dtype. Any strides; copied as q is.
        cos: [B, T, P], bfloat16, float16 or float32. P is from 1 to D / 2. Any strides; a stride of 0 repeats the
            angles for each sequence. Tables of transformers have each angle twice: pass the first half.
        sin: cos's shape and dtype.
        q_weight: [D], bfloat16, float16 or float32. Default: q and k are rotated without a norm.
        k_weight: [D], q_weight's dtype. Default: None; there are two weights or none.
        eps: Added to the mean. With 0, a head of zeros returns NaN. Default: 1e-6.
        zero_centered: Whether to multiply by 1 + weight, as Qwen3-Next and Qwen3.5 do. Default: False.
        heads_first: Whether q_out and k_out are [B, H, T, D], contiguous, as attention takes them. Default: False.

    Returns:
        q_out: [B, T, HQ, D] ([B, HQ, T, D] with heads_first), q's dtype. Contiguous.
        k_out: [B, T, HK, D] ([B, HK, T, D] with heads_first), q's dtype. Contiguous.

    Raises:
        ValueError: If there is one weight, or if zero_centered is set without weights.

    Example:
        >>> import torch, torch_gdn
        >>> q = torch.tensor([3.0, 0.0, 5.0, 1.0]).view(1, 1, 1, 4)
        >>> torch_gdn.qk_norm_rope(q, q, torch.zeros(1, 1, 1), torch.ones(1, 1, 1))[0].flatten()
        tensor([0., 3., 5., 1.])
    """
    found: tuple[Tensor, Tensor] = torch.ops.gdn.qk_norm_rope(
        q, k, cos, sin, q_weight, k_weight, eps, zero_centered, heads_first
    )
    return found
