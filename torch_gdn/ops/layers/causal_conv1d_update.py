from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


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
    if x.dim() not in (2, 3) or (x.dim() == 3 and 1 not in x.shape[:2]):
        raise ValueError(f"causal_conv1d_update: x: expected shape [N, D], [1, N, D] or [N, 1, D], got {list(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        shapes = f"the shape of x, {list(x.shape)}, got {list(residual.shape)}"
        raise ValueError(f"causal_conv1d_update: residual: expected {shapes}")

    def as_rows(x: Tensor) -> Tensor:
        rows = x[:, None] if x.dim() == 2 else x
        return rows if rows.shape[1] == 1 else rows.transpose(0, 1)

    added = None if residual is None else as_rows(residual)
    y: Tensor = torch.ops.gdn.causal_conv1d_update_(
        as_rows(x), weight, cache, bias=bias, activation=activation, residual=added
    )
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
    y: Tensor = torch.ops.gdn.causal_conv1d_update_(
        x,
        weight,
        state_pool,
        state_indices,
        has_initial_state,
        null_index,
        bias,
        activation,
        cu_seqlens,
        num_accepted_tokens,
        checkpoint_offsets,
        checkpoint_indices,
        out,
        residual,
    )
    return y if out is None else out
