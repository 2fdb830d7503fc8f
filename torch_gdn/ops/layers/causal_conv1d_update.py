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
    """One more token of each sequence through `causal_conv1d`; the cache of columns is updated in place.

    FLA: `fla.modules.convolution.causal_conv1d_update`. Dao's function of this name, which transformers calls, is that
    of `torch_gdn.causal_conv1d_interface`.

    Args:
        x: [N, D], [1, N, D] or [N, 1, D], any strides, dtypes as `causal_conv1d`'s.
        cache: [N, D, S], S at least W - 1 (FLA: W), any strides; its columns shift by one and x becomes the last.
        residual: x's shape and dtype, any strides; added last, before y is rounded to its dtype. Default: None.
        weight: [D, W], W from 2 to 4; there is no call without one.
        bias: [D], dtype of weight. Default: None.
        activation: "silu" ("swish" is the same) or None. Default: None.

    Returns:
        y, contiguous, of x's shape and dtype, and the cache.

    Raises:
        ValueError: a shape, W, S or activation that is not as above.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode.

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
    """`causal_conv1d` from states in a pool, updated in place: for servers, prefill and decoding alike.

    Args:
        x: [B, T, D], any strides, dtypes as `causal_conv1d`'s.
        weight: [D, W], W from 2 to 4, any strides.
        state_pool: [slots, D, S], S at least W - 1, any strides (a slot may be padded), any dtype of x's kinds. The
            slot of each sequence takes its last columns; others keep their bits.
        state_indices: [N] int32 or int64, any stride, on the CPU or on x's device: the slot of each sequence. Default:
            sequence n has slot n.
        has_initial_state: [N] bool on x's device; a sequence with False starts from zeros, whatever its slot holds.
            Default: all True.
        null_index: a sequence whose index is at or below it has no slot: its rows of y are zeros, and those of x are
            not read when decoding. -1 or 0, where slot 0 is never used. Default: -1.
        bias: [D], dtype of weight. Default: None.
        activation: "silu" ("swish" is the same) or None. Default: None.
        cu_seqlens: [N + 1] int32 or int64, boundaries of sequences packed along T (B is 1), on the CPU or on x's
            device; [0] is no sequence, with T 0. Default: None.
        num_accepted_tokens: [N] int32 or int64, on the CPU or on x's device, for speculative decoding: how many tokens
            of the step before were accepted. A slot's first W - 2 columns are then those before the step's first token,
            and its tokens follow, as in vLLM: with `a` of them accepted, the history of the next token is the W - 1
            columns from a - 1 on. S is at least W - 2 and a sequence's tokens. Prefill a prompt into
            `state_pool[..., : W - 1]`, without this argument: its columns are then where a first step with 1 accepted
            token expects them. Default: None; the slot's last columns are the last tokens.
        checkpoint_offsets: [N] int32 or int64, on the CPU or on x's device: the columns as they are after so many
            tokens of each sequence go to a second slot too, as of `chunk_gated_delta_rule_`; any number up to the
            tokens of the sequence, 0: of this one not. Not with num_accepted_tokens. Default: of none.
        checkpoint_indices: [N] int32 or int64, on the CPU or on x's device: that slot, which is no other's; up to
            null_index none. Given with checkpoint_offsets. Default: None.
        out: [B, T, D], dtype of x, any strides but a last one of 1: y goes there, as into a part of a buffer for
            several calls, and is returned. Default: a new tensor.
        residual: as `causal_conv1d`'s; a sequence without a slot has zeros without it. Default: None.

    Returns:
        y [B, T, D], contiguous, dtype of x.

    Raises:
        ValueError: a shape, W, S, activation, device, index or content of cu_seqlens that is not as above; two
            sequences with one slot.
        TypeError: a dtype that is not as above.
        RuntimeError: an input requires grad under grad mode; on `mps`, at the next synchronisation, a wrong index or
            cu_seqlens on the device.

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
