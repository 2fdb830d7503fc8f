"""Runs the convolution and the delta rule of one layer's batch in place on the engine's pools, without using vLLM.

The table maps the engine's metadata (vLLM's GDNAttentionMetadata) to our arguments:

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
from torch_gdn import self_test
from torch_gdn.integrations import serving

NULL_BLOCK = 0


@dataclass
class LayerState:
    """A layer's parameters and its view of the pools, with which its batches are computed."""

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
    norm: dict[str, Any] | None = None  # of the gated norm behind the rule, what gdn_decode_ takes

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

    @cached_property
    def step_options(self) -> dict[str, Any] | None:
        """The arguments of gdn_decode_ other than projections and indices, or None if it does not take the layer."""
        if self.norm is None:
            return None
        options: dict[str, Any] = {
            "conv_weight": self.conv_weight,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "state_pool": self.state_pool,
            "null_index": NULL_BLOCK,
            "conv_bias": self.conv_bias,
            "activation": self.activation,
            "allow_neg_eigval": self.allow_neg_eigval,
            "state_v_first": True,
            **self.norm,
        }
        shared: dict[str, Any] = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in options.items()}
        D, HV, V = self.conv_weight.shape[0], self.value_heads, self.value_size
        sizes = {"qkv": D, "z": HV * V, "b": HV, "a": HV}
        rows: dict[str, Any] = {
            name: self.conv_pool.new_empty(1, 1, size, device="meta") for name, size in sizes.items()
        }
        try:
            torch_gdn.gdn_decode_(**rows, **shared, conv_pool=self.conv_pool.to("meta"))
        except (TypeError, ValueError):  # a head that is too long
            return None
        return options


def decode(
    layer: LayerState, metadata: Any, qkv: Tensor, z: Tensor | None, b: Tensor, a: Tensor | None
) -> Tensor | None:
    """Runs the layer between its input and output projections [T, ..], which are passed in the order of `gdn_decode_`.

    Returns [T, HV, V], normed and gated; None for a batch that has prompts or is part draft, and for a layer that
    gdn_decode_ does not take.
    """
    tokens, options = metadata.num_actual_tokens, layer.step_options
    is_mixed = metadata.num_prefills > 0 or (metadata.spec_sequence_masks is not None and metadata.num_decodes > 0)
    if options is None or is_mixed or tokens == 0 or "gdn_decode_" in self_test.on_cpu:
        return None
    o = qkv.new_empty(len(qkv), layer.value_heads, layer.value_size)
    zero_padding(o, metadata.num_decodes if metadata.spec_sequence_masks is None else tokens)
    projections: dict[str, Tensor | None] = {"qkv": qkv, "z": z, "b": b, "a": a}
    if metadata.spec_sequence_masks is None:
        N = metadata.num_decodes
        rows: dict[str, Any] = {name: None if x is None else x[:N, None] for name, x in projections.items()}
        rows["conv_pool"] = layer.conv_pool[:, :, : layer.conv_weight.shape[1] - 1]  # those behind are for drafts
        rows |= {"state_indices": metadata.non_spec_state_indices_tensor[:N], "out": o[:N, None]}
    else:
        N = metadata.num_spec_decodes
        rows = {name: None if x is None else x[None, :tokens] for name, x in projections.items()}
        rows |= {"conv_pool": layer.conv_pool, "state_indices": metadata.spec_state_indices_tensor[:N]}
        rows |= {"cu_seqlens": metadata.spec_query_start_loc[: N + 1], "out": o[None, :tokens]}
        rows["num_accepted_tokens"] = metadata.num_accepted_tokens[:N]
    torch_gdn.gdn_decode_(**rows, **options)
    return o


def zero_padding(out: Tensor, first: int) -> None:
    """Clears the rows from `first` on, because the norms, routers and experts behind the layer read all rows."""
    if first < out.shape[0]:
        out[first:].zero_()


def forward(layer: LayerState, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """mixed_qkv [T, D], b and a [T, HV], the projections; out [T, HV, V] takes the first num_actual_tokens rows.

    Rows of padding are zero.
    """
    tokens = metadata.num_actual_tokens
    zero_padding(out, tokens)
    if tokens == 0:
        return
    mixed_qkv, b, a, out = mixed_qkv[:tokens], b[:tokens], a[:tokens], out[:tokens]
    if metadata.spec_sequence_masks is None:
        compute(layer, batch_of(metadata), mixed_qkv, b, a, out)
    elif metadata.num_prefills == 0 and metadata.num_decodes == 0:
        compute(layer, batch_of_drafts(metadata), mixed_qkv, b, a, out)
    else:
        drafts = batch_of_drafts(metadata), metadata.spec_token_indx
        for batch, rows in (drafts, (batch_of(metadata), metadata.non_spec_token_indx)):
            part = out.new_empty(rows.shape[0], *out.shape[1:])
            compute(layer, batch, mixed_qkv[rows], b[rows], a[rows], part)
            out[rows] = part


def compute(layer: LayerState, batch: serving.Batch, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Computes decodes, one token each and first in the batch, then prefills. A batch without prefills may end in
    padding. Or computes drafts, from the state after the last accepted token.
    """
    columns = layer.conv_pool
    if batch.num_accepted_tokens is None:
        columns = columns[:, :, : layer.conv_weight.shape[1] - 1]  # those behind are for drafts
        if batch.decodes == batch.sequences:
            zero_padding(out, batch.sequences)
            mixed_qkv, b, a, out = (x[: batch.sequences] for x in (mixed_qkv, b, a, out))
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


def batch_of_drafts(metadata: Any) -> serving.Batch:
    n = metadata.num_spec_decodes
    state_indices, cu_seqlens = metadata.spec_state_indices_tensor[:n], metadata.spec_query_start_loc[: n + 1]
    accepted = metadata.num_accepted_tokens[:n]
    return serving.Batch(state_indices, n, 0, NULL_BLOCK, cu_seqlens=cu_seqlens, num_accepted_tokens=accepted)
