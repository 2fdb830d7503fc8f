from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The short causal convolution of each channel by itself, over tokens in rows.

        y[t] = activation(bias + sum over j < W of weight[W - 1 - j] x[t - j]) + residual[t]

    Before the first token come the state's last W - 1 columns, or zeros. Everything is computed in float32.

    FLA: `fla.modules.convolution.causal_conv1d`. Dao's layout, [B, D, T], is that of
    `torch_gdn.causal_conv1d_interface`.

    Args:
        x: [B, T, D], bfloat16, float16 or float32, any strides: a transposed [B, D, T] is not copied. More dimensions
            behind T are taken as D, as [B, T, H, K].
        weight: [D, W], W from 2 to 4, bfloat16, float16 or float32, any strides.
        bias: [D], dtype of weight. Default: None.
        residual: x's shape and dtype, any strides; added last, before y is rounded to its dtype. Default: None.
        initial_state: [N, D, S], the columns before the first token, S at least W - 1 (FLA: W, Dao: W - 1), any float
            dtype of x's kinds, any strides; N is B or the number of packed sequences. Default: zeros, with S = W.
        output_final_state: whether the last S of the columns before and the tokens are returned. Default: False.
        activation: "silu" ("swish" is the same) or None. Default: None.
        backend: taken and not used: FLA's choice of a kernel. Default: None.
        cu_seqlens: [N + 1] int32 or int64, boundaries of sequences packed along T (B is 1), on the CPU or on x's
            device. A sequence may be empty; [0] is no sequence, with T 0. Default: None.
        cu_seqlens_cpu: used where cu_seqlens is None, otherwise not: FLA's copy on the host. Default: None.
        chunk_indices: taken and not used: the kernel finds its blocks of tokens itself. Default: None.

    Returns:
        y, contiguous, of x's shape and dtype, and the final state [N, D, S] (dtype of initial_state, else of x), or
        None where it was not asked for.

    Raises:
        ValueError: a shape, W, S, activation, device or content of cu_seqlens that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> x, weight = torch.ones(1, 3, 2), torch.ones(2, 4)
        >>> y, state = torch_gdn.causal_conv1d(x, weight, output_final_state=True)
        >>> y[0, :, 0], state.shape
        (tensor([1., 2., 3.]), torch.Size([1, 2, 4]))
    """
    check_cu_seqlens("causal_conv1d", cu_seqlens)
    if x.dim() > 3 and residual is not None:
        residual = residual.flatten(2)
    rows = x.flatten(2) if x.dim() > 3 else x
    boundaries = cu_seqlens_cpu if cu_seqlens is None else cu_seqlens
    y, final_state = torch.ops.gdn.causal_conv1d(
        rows, weight, bias, initial_state, output_final_state, None, activation, boundaries, residual=residual
    )
    return y.view(x.shape), final_state if output_final_state else None
