"""The functions of Dao-AILab's causal_conv1d that transformers calls, with its names and its layout [B, D, T]."""

from typing import Any

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_tensor
from torch_gdn.ops.convolutions import convolve


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Convolves each channel causally over the last W tokens; tokens are columns.

    Dao: `causal_conv1d.causal_conv1d_fn`. `torch_gdn.causal_conv1d` has the formula, with tokens as rows.

    Args:
        x: [B, D, T], bfloat16, float16 or float32. Any strides; a transposed [B, T, D] is not copied.
        weight: [D, W], bfloat16, float16 or float32. W is 2, 3 or 4. Any strides.
        bias: [D], weight's dtype. Default: zeros.
        seq_idx: [B, T], int32 or int64. Tokens with different numbers do not see each other. Tokens with a negative
            number (padding) return zeros. On x's device. Not allowed with a state. Default: None.
        initial_states: [B, D, S], bfloat16, float16 or float32. The S columns before the first token, with S at least W
            - 1 (Dao has W - 1, transformers W). Any strides. Default: zeros.
        return_final_states: Whether to return the S columns before the next token. Default: False.
        final_states_out: [B, D, S], any dtype. The function writes the final states here. Default: a new tensor.
        activation: "silu", its synonym "swish", or None. Default: None.

    Returns:
        y: x's shape and dtype. It is always channel-last: y.transpose(1, 2) is contiguous, and its parts [B, T, ...] go
            to the delta rule without a copy.
        final_states: [B, D, S], final_states_out's dtype, or initial_states' dtype, or x's dtype; only with
            return_final_states. S is W - 1 without initial_states.

    Example:
        >>> import torch, torch_gdn
        >>> y = torch_gdn.causal_conv1d_fn(torch.ones(1, 2, 5), torch.ones(2, 4), activation="silu")
        >>> y.shape, y.transpose(1, 2).is_contiguous()
        (torch.Size([1, 2, 5]), True)
    """
    check_tensor("causal_conv1d_fn", "x", x)
    if x.dim() != 3:
        raise ValueError(
            f"causal_conv1d_fn: x: expected 3 dimensions [B, D, T], got {x.dim()} of shape {list(x.shape)}"
        )
    width = weight.shape[-1] - 1 if initial_states is None else None
    y, final_states = convolve(
        x.transpose(1, 2), weight, bias, None, initial_states, return_final_states, width, activation, None, seq_idx
    )
    y = y.transpose(1, 2)
    if not return_final_states:
        return y
    return y, final_states if final_states_out is None else final_states_out.copy_(final_states)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Runs `causal_conv1d_fn` on the next tokens of each sequence and updates the state of columns in place.

    Dao: `causal_conv1d.causal_conv1d_update`.

    Args:
        x: [B, D] or [B, D, T], bfloat16, float16 or float32. Any strides.
        conv_state: [rows, D, S], bfloat16, float16 or float32. S is at least W - 1 (transformers has W). Any strides.
        weight: [D, W], bfloat16, float16 or float32. W is 2, 3 or 4. Any strides.
        bias: [D], weight's dtype. Default: zeros.
        activation: "silu", its synonym "swish", or None. Default: None.
        cache_seqlens: None. A circular conv_state is not supported.
        conv_state_indices: [B], int32 or int64. The row of conv_state that each sequence has. A sequence with a
            negative number has no row and returns zeros. Default: sequence b has row b.

    Returns:
        y: x's shape and dtype. Channel-last, as from `causal_conv1d_fn`.

    Raises:
        ValueError: If there is a cache_seqlens.

    Example:
        >>> import torch
        >>> from torch_gdn.causal_conv1d_interface import causal_conv1d_update
        >>> state = torch.zeros(1, 2, 3)
        >>> causal_conv1d_update(torch.ones(1, 2), state, torch.ones(2, 4)), state[0, 0]
        (tensor([[1., 1.]]), tensor([0., 0., 1.]))
    """
    if cache_seqlens is not None:
        raise ValueError(
            "causal_conv1d_update: cache_seqlens: expected None (circular states are not supported), got a tensor"
        )
    check_tensor("causal_conv1d_update", "x", x)
    if x.dim() not in (2, 3):
        raise ValueError(f"causal_conv1d_update: x: expected shape [B, D] or [B, D, T], got {list(x.shape)}")
    rows = x[:, None] if x.dim() == 2 else x.transpose(1, 2)
    y = torch.ops.gdn.causal_conv1d_update_(
        rows, weight, conv_state, conv_state_indices, bias=bias, activation=activation
    )
    return y[:, 0] if x.dim() == 2 else y.transpose(1, 2)
