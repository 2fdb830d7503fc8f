from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.layers import CausalConv1d
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
    """Convolves each channel causally over the last W tokens; tokens are rows.

        y[t] = activation(bias + sum over j < W of weight[W - 1 - j] x[t - j]) + residual[t]

    The last W - 1 columns of the state precede the first token. All arithmetic is in float32.

    FLA: `fla.modules.convolution.causal_conv1d`. `torch_gdn.causal_conv1d_interface` has Dao's layout, [B, D, T].

    Args:
        x: [B, T, D], bfloat16, float16 or float32. Any strides; a transposed [B, D, T] is not copied. Dimensions after
            T are flattened into D, as in [B, T, H, K].
        weight: [D, W], bfloat16, float16 or float32. W is 2, 3 or 4. Any strides.
        bias: [D], weight's dtype. Default: zeros.
        residual: x's shape and dtype. Added to y before y is rounded. Any strides. Default: zeros.
        initial_state: [N, D, S], bfloat16, float16 or float32. The S columns before the first token, with S at least W
            - 1 (FLA has W, Dao W - 1). Any strides. N is B without cu_seqlens. Default: zeros.
        output_final_state: Whether to return the last S columns. Default: False.
        activation: "silu", its synonym "swish", or None. Default: None.
        backend: FLA's choice of a kernel. It has no effect. Default: None.
        cu_seqlens: [N + 1], int32 or int64. The boundaries of N sequences packed along T; B must be 1. On the CPU or on
            x's device. A sequence may be empty. Pass [0] for no sequences, with T = 0. Default: None.
        cu_seqlens_cpu: [N + 1], int32 or int64. FLA's copy on the host, used only if cu_seqlens is None. Default: None.
        chunk_indices: [NT, 2], int32 or int64. FLA's list of blocks. It has no effect. Default: None.

    Returns:
        y: x's shape and dtype. Contiguous.
        final_state: [N, D, S], initial_state's dtype, or x's dtype; None unless output_final_state. S is W without
            initial_state.

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
    y, final_state = convolve(
        rows, weight, bias, residual, initial_state, output_final_state, None, activation, boundaries, None
    )
    return y.view(x.shape), final_state if output_final_state else None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    """Calls the op, or its Function, with all arguments by place."""
    run = CausalConv1d.apply if needs_grad(x, weight, bias, *others[:2]) else torch.ops.gdn.causal_conv1d
    y, final_state = run(x, weight, bias, *others)
    return y, final_state
