from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def solve_tril(A: Tensor, cu_seqlens: Tensor | None = None, *, chunk_indices: Tensor | None = None) -> Tensor:
    """Inverts I + A for the strictly lower triangular A of each chunk and head.

    FLA: `fla.ops.utils.solve_tril`, without its `output_dtype`. Only the strictly lower part of A is read. Solved by
    forward substitution, never by a Neumann series, so repeated keys with beta up to 2 lose no digits.

    Args:
        A: [B, T, HV, chunk_size] float32; its last dimension, 16, 32 or 64, is the chunk size.
        cu_seqlens: [N + 1] int32 or int64, boundaries of packed sequences (B is 1). Default: None.
        chunk_indices: [NT, 2], of `prepare_chunk_indices`. Default: None.

    Returns:
        [B, T, HV, chunk_size] float32; columns past the end of a short chunk are 0.

    Raises:
        ValueError: a shape, device or content of cu_seqlens that is not as above.
        TypeError: A is not float32.
        RuntimeError: A requires grad under grad mode.

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
