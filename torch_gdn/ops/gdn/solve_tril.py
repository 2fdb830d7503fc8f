from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def solve_tril(A: Tensor, cu_seqlens: Tensor | None = None, *, chunk_indices: Tensor | None = None) -> Tensor:
    """Inverts I + A for the strictly lower triangular A of each chunk and head.

    FLA: `fla.ops.utils.solve_tril`, without its `output_dtype`. The kernel uses forward substitution, never a Neumann
    series, so that repeated keys with beta up to 2 lose no digits.

    Args:
        A: [B, T, HV, C], float32. C is the chunk size: 16, 32 or 64. Only the strictly lower triangle is read.
        cu_seqlens, chunk_indices: See `chunk_fwd_h`.

    Returns:
        A_inv: [B, T, HV, C], float32. Columns past the end of a short chunk are 0.

    Example:
        >>> import torch, torch_gdn
        >>> A = torch.zeros(1, 2, 1, 16)
        >>> A[0, 1, 0, 0] = 0.5
        >>> torch_gdn.solve_tril(A)[0, :, 0, :2]
        tensor([[ 1.0000,  0.0000],
                [-0.5000,  1.0000]])
    """
    check_cu_seqlens("solve_tril", cu_seqlens)
    return torch.ops.gdn.solve_tril(A, cu_seqlens, chunk_indices)
