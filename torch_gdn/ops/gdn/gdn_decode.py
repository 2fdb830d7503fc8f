from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.ops.arguments import check_cu_seqlens


def gdn_decode_(
    qkv: Tensor,
    z: Tensor | None,
    b: Tensor,
    a: Tensor | None,
    conv_weight: Tensor,
    conv_pool: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state_pool: Tensor,
    norm_weight: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    *,
    conv_bias: Tensor | None = None,
    activation: str | None = "silu",
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    norm_activation: str = "silu",
    norm_eps: float = 1e-6,
    round_norm: bool = False,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decodes a Gated DeltaNet layer between its projections, in place on both of its pools of states.

    It computes `causal_conv1d_update_`, then `fused_recurrent_gated_delta_rule_` with raw gates and normalised q and k,
    then `rms_norm_gated`. On `mps` this takes two launches, and the outputs of the rule are not rounded before the
    norm. Use it for a few tokens of each sequence. No other library has this function.

    Args:
        qkv: [B, T, D] ([B, T, D + HV * V] without z), bfloat16, float16 or float32. What the layer projects for q of
            all H key heads, then k, then v of all HV value heads: D is 2 * H * K + HV * V. Without z it is in
            Qwen3-Next's order: for each key head its q, its k, the v of its HV / H value heads, and their z.
        z: [B, T, HV * V], bfloat16, float16 or float32. The gate of the norm. None: it is in qkv.
        b: [B, T, HV] ([B, T, HV * 2] without a), any floating dtype. Beta is its sigmoid. Without a it has for each key
            head the b of its value heads, then their a.
        a: [B, T, HV], any floating dtype. The raw decays. None if and only if z is None: they are in b.
        conv_weight: [D, W], bfloat16, float16 or float32. W is 2, 3 or 4.
        conv_pool: [slots, D, S], bfloat16, float16 or float32. The convolution's states, updated in place. S is at
            least W - 1; with num_accepted_tokens it is at least W - 2 plus the tokens of a step.
        A_log: [HV], any floating dtype.
        dt_bias: [HV], any floating dtype. None: zeros.
        state_pool: [slots, HV, K, V] ([slots, HV, V, K] with state_v_first), bfloat16, float16 or float32. Updated in
            place. K is at most 128 and V at most 192, so that one threadgroup has all columns of a head.
        norm_weight: [V], bfloat16, float16 or float32. Default: ones.
        state_indices: [N] or [N, tokens], int32 or int64. See `fused_recurrent_gated_delta_rule_`. With [N, tokens]
            the convolution's state is in the slot of the first column. N is B without cu_seqlens. Default: sequence n
            has slot n.
        has_initial_state: [N], bool. False: the sequence starts from zeros, whatever its slots hold. Default: all True.
        null_index: -1, or 0 as in vLLM. A sequence whose index is not above it has no slot: its output is zeros, its
            tokens are not read, and no state is written. Default: -1.
        conv_bias: [D], conv_weight's dtype. Default: None.
        activation: "silu" or "swish" of the convolution, or None. Default: "silu".
        allow_neg_eigval: Double beta. Default: False.
        state_v_first: The last two dimensions of the states are V and K. Default: False.
        norm_activation: "silu" (or "swish") or "sigmoid" of z. Default: "silu".
        norm_eps: Added to the mean of squares. Default: 1e-6.
        round_norm: See `rms_norm_gated`. Default: False.
        cu_seqlens: [N + 1], int32 or int64. Boundaries of sequences packed along T. Default: None.
        num_accepted_tokens: [N], int32 or int64. See `fused_recurrent_gated_delta_rule_` and `causal_conv1d_update_`.
            Default: None.
        out: [B, T, HV, V], qkv's dtype. Takes the result. Default: a new tensor.

    Returns:
        o: [B, T, HV, V], qkv's dtype. Zeros for a sequence without a slot.

    Raises:
        RuntimeError: At the next synchronisation, if an index on the device is wrong. It counts as no slot.

    Example:
        >>> import torch, torch_gdn
        >>> H, HV, K, V = 2, 4, 64, 32
        >>> D = 2 * H * K + HV * V
        >>> qkv, z, b, a = (torch.randn(3, 1, n) for n in (D, HV * V, HV, HV))
        >>> conv_pool, state_pool = torch.zeros(3, D, 4), torch.zeros(3, HV, K, V)
        >>> o = torch_gdn.gdn_decode_(qkv, z, b, a, torch.randn(D, 4), conv_pool, torch.zeros(HV), None, state_pool)
        >>> o.shape, bool(state_pool.flatten(1).any(1).all())
        (torch.Size([3, 1, 4, 32]), True)
    """
    check_cu_seqlens("gdn_decode_", cu_seqlens)
    projections, slots = (qkv, z, b, a), (state_indices, has_initial_state, null_index)
    parameters = (conv_weight, conv_pool, A_log, dt_bias, state_pool, norm_weight)
    options = (conv_bias, activation, allow_neg_eigval, state_v_first, norm_activation, norm_eps, round_norm)
    o: Tensor = torch.ops.gdn.gdn_decode_(
        *projections, *parameters, *slots, *options, cu_seqlens, num_accepted_tokens, out
    )
    return o if out is None else out
