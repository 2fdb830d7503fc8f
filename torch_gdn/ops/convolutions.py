"""The short causal convolution before the delta rules."""

from typing import Any

import torch
from torch import Tensor

from torch_gdn.autograd import needs_grad
from torch_gdn.autograd.layers import CausalConv1d, keep_call
from torch_gdn.ops.arguments import check_cu_seqlens, check_tensor

__all__ = ["causal_conv1d", "causal_conv1d_update", "causal_conv1d_update_"]


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
    check_tensor("causal_conv1d", "x", x)
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
    if not needs_grad(x, weight, bias, *others[:2]):
        return torch.ops.gdn.causal_conv1d(x, weight, bias, *others)
    y, final_state = CausalConv1d.apply(x, weight, bias, *others)
    keep_call(y, (x, weight, bias, *others))
    return y, final_state


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs `causal_conv1d` on one more token of each sequence and updates the cache of columns in place.

    FLA: `fla.modules.convolution.causal_conv1d_update`. `torch_gdn.causal_conv1d_interface` has Dao's function of this
    name, which transformers calls.

    Args:
        x: [N, D], [1, N, D] or [N, 1, D], bfloat16, float16 or float32. Any strides.
        cache: [N, D, S], bfloat16, float16 or float32. S is at least W - 1 (FLA has W). The columns move back by one
            and x becomes the last one. Any strides.
        residual: x's shape and dtype. Added to y before y is rounded. Any strides. Default: zeros.
        weight: [D, W], bfloat16, float16 or float32. W is 2, 3 or 4. Required; only FLA's signature has a default here.
        bias: [D], weight's dtype. Default: zeros.
        activation: "silu", its synonym "swish", or None. Default: None.

    Returns:
        y: x's shape and dtype. Contiguous.
        cache: cache's shape and dtype. The argument itself.

    Example:
        >>> import torch, torch_gdn
        >>> cache = torch.zeros(1, 2, 4)
        >>> y, cache = torch_gdn.causal_conv1d_update(torch.ones(1, 2), cache, weight=torch.ones(2, 4))
        >>> y, cache[0, 0]
        (tensor([[1., 1.]]), tensor([0., 0., 0., 1.]))
    """
    if weight is None:
        raise ValueError("causal_conv1d_update: weight: expected a tensor of shape [D, W], got None")
    check_tensor("causal_conv1d_update", "x", x)
    if x.dim() not in (2, 3) or (x.dim() == 3 and 1 not in x.shape[:2]):
        raise ValueError(f"causal_conv1d_update: x: expected shape [N, D], [1, N, D] or [N, 1, D], got {list(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        shapes = f"the shape of x, {list(x.shape)}, got {list(residual.shape)}"
        raise ValueError(f"causal_conv1d_update: residual: expected {shapes}")

    def as_rows(x: Tensor) -> Tensor:
        rows = x[:, None] if x.dim() == 2 else x
        return rows if rows.shape[1] == 1 else rows.transpose(0, 1)

    added = None if residual is None else as_rows(residual)
    y = torch.ops.gdn.causal_conv1d_update_(as_rows(x), weight, cache, bias=bias, activation=activation, residual=added)
    return y.view(x.shape), cache


def causal_conv1d_update_(
    x: Tensor,
    weight: Tensor,
    state_pool: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    out: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Runs `causal_conv1d` on states in a server's pool and updates them in place, for prefill and decoding.

    Args:
        x: [B, T, D], bfloat16, float16 or float32. Any strides.
        weight: [D, W], bfloat16, float16 or float32. W is 2, 3 or 4. Any strides.
        state_pool: [slots, D, S], bfloat16, float16 or float32. S is at least W - 1. Any strides, so slots may be
            padded. The slot of each sequence receives its last columns. Other slots do not change.
        state_indices: [N], int32 or int64. The slot of each sequence. Any stride, on the CPU or on x's device. N is B
            without cu_seqlens. Default: sequence n has slot n.
        has_initial_state: [N], bool. Pass False for a new request; its state then starts from zeros. On x's device.
            Default: all True.
        null_index: -1 or 0. A sequence whose index is not above null_index has no slot. Its rows of y are zeros, and
            decoding does not read its rows of x. With 0, slot 0 is never used. Default: -1.
        bias: [D], weight's dtype. Default: zeros.
        activation: "silu", its synonym "swish", or None. Default: None.
        cu_seqlens: [N + 1], int32 or int64. The boundaries of N sequences packed along T; B must be 1. On the CPU or on
            x's device. Pass [0] for no sequences, with T = 0. Default: None.
        num_accepted_tokens: [N], int32 or int64. For speculative decoding, the number of tokens of the previous step
            that were accepted. On the CPU or on x's device. A slot then starts with the W - 2 columns before the first
            token of that step, and the step's tokens follow, as in vLLM. If `a` tokens were accepted, the next token
            continues from the W - 1 columns that start at column a - 1. S is at least W - 2 plus the tokens of a
            sequence. Prefill a prompt into `state_pool[..., : W - 1]` without this argument; the first step then passes
            1. Default: None; the last columns of a slot are then the last tokens.
        checkpoint_offsets: [N], int32 or int64. Store the columns after this many tokens of each sequence in a second
            slot too. Pass any number up to the sequence's tokens, or 0 to store no checkpoint for it. On the CPU or on
            x's device. Not allowed with num_accepted_tokens. Default: None.
        checkpoint_indices: [N], int32 or int64. The slot of each checkpoint, which no other sequence or checkpoint may
            have. An index that is not above null_index stores no checkpoint. On the CPU or on x's device. Required with
            checkpoint_offsets. Default: None.
        out: [B, T, D], y's dtype. The function writes y here and returns it; several calls can fill parts of one
            buffer. The last stride must be 1. Default: a new tensor.
        residual: x's shape and dtype. Added to y before y is rounded, but not for a sequence without a slot. Any
            strides. Default: zeros.

    Returns:
        y: [B, T, D], x's dtype. Contiguous unless it is `out`.

    Raises:
        ValueError: If two sequences have one slot.
        RuntimeError: On `mps`, at the next synchronisation, if an index or cu_seqlens given on the device is wrong.

    Example:
        >>> import torch, torch_gdn
        >>> pool = torch.zeros(3, 2, 3)
        >>> indices = torch.tensor([2, -1])
        >>> torch_gdn.causal_conv1d_update_(torch.ones(2, 1, 2), torch.ones(2, 4), pool, indices)[:, 0]
        tensor([[1., 1.],
                [0., 0.]])
        >>> pool[2, 0]
        tensor([0., 0., 1.])
    """
    check_cu_seqlens("causal_conv1d_update_", cu_seqlens)
    slots = (state_pool, state_indices, has_initial_state, null_index)
    more = (num_accepted_tokens, checkpoint_offsets, checkpoint_indices, out, residual)
    y = torch.ops.gdn.causal_conv1d_update_(x, weight, *slots, bias, activation, cu_seqlens, *more)
    return y if out is None else out
