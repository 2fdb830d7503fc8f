"""The functions of Dao-AILab's causal_conv1d, by name and in its layout, [B, D, T]: those that transformers calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    """The short causal convolution of each channel by itself, over tokens in columns.

    Dao: `causal_conv1d.causal_conv1d_fn`. `torch_gdn.causal_conv1d` has the formula, and tokens in rows.

    Args:
        x: [B, D, T], bfloat16, float16 or float32, any strides: a transposed [B, T, D] is not copied.
        weight: [D, W], W from 2 to 4, any strides.
        bias: [D], dtype of weight. Default: None.
        seq_idx: [B, T] int32 or int64, on x's device: tokens with different numbers do not see each other, and those
            with a negative one (padding) give zeros. Not together with a state. Default: None.
        initial_states: [B, D, W - 1], the columns before the first token, any strides; wider ones (transformers keeps
            W columns) are taken too. Default: zeros.
        return_final_states: whether the columns before the next token are returned, as many as initial_states has, or
            W - 1. Default: False.
        final_states_out: where to put them. Default: a new tensor.
        activation: "silu" ("swish" is the same) or None. Default: None.

    Returns:
        y of x's shape and dtype, channel-last whatever x is: y.transpose(1, 2) is contiguous, and its parts [B, T, ...]
        go to the delta rule without a copy. With return_final_states: y and the final states.

    Raises:
        ValueError: a shape, W, activation or device that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch, torch_gdn
        >>> y = torch_gdn.causal_conv1d_fn(torch.ones(1, 2, 5), torch.ones(2, 4), activation="silu")
        >>> y.shape, y.transpose(1, 2).is_contiguous()
        (torch.Size([1, 2, 5]), True)
    """
    if x.dim() != 3:
        raise ValueError(
            f"causal_conv1d_fn: x: expected 3 dimensions [B, D, T], got {x.dim()} of shape {list(x.shape)}"
        )
    width = weight.shape[-1] - 1 if initial_states is None else None
    y, final_states = torch.ops.gdn.causal_conv1d(
        x.transpose(1, 2), weight, bias, initial_states, return_final_states, width, activation, None, seq_idx
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
    """The next tokens of each sequence; the state of columns is updated in place.

    Dao: `causal_conv1d.causal_conv1d_update`.

    Args:
        x: [B, D] or [B, D, T], any strides, dtypes as `causal_conv1d_fn`'s.
        conv_state: [B, D, S], S at least W - 1 (transformers: W), any strides.
        weight: [D, W], W from 2 to 4, any strides.
        bias: [D], dtype of weight. Default: None.
        activation: "silu" ("swish" is the same) or None. Default: None.
        cache_seqlens: None: a circular conv_state is not taken. Default: None.
        conv_state_indices: [B] int32 or int64: the row of conv_state that each sequence has; a negative one has none,
            and gives zeros. Default: sequence b has row b.

    Returns:
        y of x's shape and dtype, channel-last as `causal_conv1d_fn`'s.

    Raises:
        ValueError: a shape, W, S, activation, device or index that is not as above; a cache_seqlens.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

    Example:
        >>> import torch
        >>> from torch_gdn.causal_conv1d_interface import causal_conv1d_update
        >>> state = torch.zeros(1, 2, 3)
        >>> causal_conv1d_update(torch.ones(1, 2), state, torch.ones(2, 4)), state[0, 0]
        (tensor([[1., 1.]]), tensor([0., 0., 1.]))
    """
    if cache_seqlens is not None:
        raise ValueError("causal_conv1d_update: cache_seqlens: expected None (a circular state is not taken), got one")
    if x.dim() not in (2, 3):
        raise ValueError(f"causal_conv1d_update: x: expected shape [B, D] or [B, D, T], got {list(x.shape)}")
    rows = x[:, None] if x.dim() == 2 else x.transpose(1, 2)
    y = torch.ops.gdn.causal_conv1d_update_(
        rows, weight, conv_state, conv_state_indices, bias=bias, activation=activation
    )
    return y[:, 0] if x.dim() == 2 else y.transpose(1, 2)
