"""The convolution and the delta rule of one layer's batch, in place on the engine's pools. Knows no device and no vLLM.

What the engine's metadata (vLLM's GDNAttentionMetadata) says, and which argument takes it:

    convolution pool [slots, D, S], S = W - 1 + draft tokens
    state pool [slots, HV, V, K]; both                                                  strided by the page
    block 0, the null block                                                             null_index=0
    blocks are not cleared for a new request                                            has_initial_state
    the state after each draft token has a block of its own                             state_indices [N, 1 + drafts]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

import torch_gdn
from torch_gdn.integrations import serving

NULL_BLOCK = 0


@dataclass
class LayerState:
    """What a layer's batch is computed with: parameters, and the layer's view of the pools."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_weight: Tensor  # [D, W]
    conv_bias: Tensor | None
    activation: str | None
    A_log: Tensor
    dt_bias: Tensor
    allow_neg_eigval: bool
    conv_pool: Tensor  # [slots, D, S]
    state_pool: Tensor  # [slots, HV, V, K]

    def split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[.., D] to q, k [.., H, K] and v [.., HV, V], as views."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        return (
            q.unflatten(-1, (self.key_heads, self.key_size)),
            k.unflatten(-1, (self.key_heads, self.key_size)),
            v.unflatten(-1, (self.value_heads, self.value_size)),
        )

    @cached_property
    def rule_options(self) -> dict[str, Any]:
        return {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "state_v_first": True,
        }


def forward(layer: LayerState, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """mixed_qkv [T, D], b and a [T, HV], the projections; out [T, HV, V] takes the first num_actual_tokens rows."""
    tokens = metadata.num_actual_tokens
    if tokens == 0:
        return
    mixed_qkv, b, a, out = mixed_qkv[:tokens], b[:tokens], a[:tokens], out[:tokens]
    if metadata.spec_sequence_masks is None:
        forward_non_spec(layer, metadata, mixed_qkv, b, a, out)
    elif metadata.num_prefills == 0 and metadata.num_decodes == 0:
        forward_spec_decode(layer, metadata, mixed_qkv, b, a, out)
    else:
        spec_decodes, others = metadata.spec_token_indx, metadata.non_spec_token_indx
        for rows, compute in ((spec_decodes, forward_spec_decode), (others, forward_non_spec)):
            part = out.new_empty(rows.shape[0], *out.shape[1:])
            compute(layer, metadata, mixed_qkv[rows], b[rows], a[rows], part)
            out[rows] = part


def forward_non_spec(layer: LayerState, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Decodes, one token each and first in the batch, then prefills. A batch without prefills may end in padding."""
    batch = batch_of(metadata)
    if metadata.num_prefills == 0:
        mixed_qkv, b, a, out = (x[: batch.sequences] for x in (mixed_qkv, b, a, out))
    width = layer.conv_weight.shape[1]
    columns = layer.conv_pool[:, :, : width - 1]  # those behind are for speculative decoding
    mixed = serving.convolve(batch, mixed_qkv, layer.conv_weight, columns, layer.conv_bias, layer.activation)
    serving.delta_rule(batch, *layer.split_heads(mixed), a, b, layer.state_pool, out, **layer.rule_options)


def batch_of(metadata: Any) -> serving.Batch:
    decodes, sequences = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
    state_indices = metadata.non_spec_state_indices_tensor[:sequences]
    if metadata.num_prefills == 0:
        return serving.Batch(state_indices, sequences, decodes, NULL_BLOCK)
    cu_seqlens = metadata.non_spec_query_start_loc[: sequences + 1]
    return serving.Batch(
        state_indices,
        sequences,
        decodes,
        NULL_BLOCK,
        metadata.has_initial_state[:sequences],
        cu_seqlens,
        cu_seqlens[decodes:] - decodes if decodes else cu_seqlens,
    )


def forward_spec_decode(layer: LayerState, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Of each sequence a token and its draft tokens, from the state after the last token that was accepted."""
    sequences = metadata.num_spec_decodes
    state_indices = metadata.spec_state_indices_tensor[:sequences]
    cu_seqlens = metadata.spec_query_start_loc[: sequences + 1]
    accepted = metadata.num_accepted_tokens[:sequences]
    mixed = torch_gdn.causal_conv1d_update_(
        mixed_qkv[None],
        layer.conv_weight,
        layer.conv_pool,
        state_indices[:, 0],
        None,
        NULL_BLOCK,
        layer.conv_bias,
        layer.activation,
        cu_seqlens,
        num_accepted_tokens=accepted,
    )
    q, k, v = layer.split_heads(mixed)
    torch_gdn.fused_recurrent_gated_delta_rule_(
        q,
        k,
        v,
        a[None],
        b[None],
        layer.state_pool,
        state_indices,
        cu_seqlens=cu_seqlens,
        num_accepted_tokens=accepted,
        out=out[None],
        null_index=NULL_BLOCK,
        **layer.rule_options,
    )
