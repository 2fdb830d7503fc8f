"""Gives torch_gdn's ops, and PyTorch's, the names and arguments of the Triton kernels that SGLang's models call.

The table maps SGLang's pools and metadata to our arguments:

    convolution pool [slots, D, W - 1], state pool [slots, HV, V, K]       one layer of the pools of all layers
    a slot of -1 belongs to no request                                     null_index=-1
    the state's slot is cleared for a new request, the columns' is not     has_initial_state of the convolution alone

This module imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import torch_gdn
from torch_gdn.integrations import serving
from torch_gdn.integrations.experts import fused_experts, matrix_in

CHUNK = 64  # tokens after which SGLang may keep a state of a prompt


def split_by_key_head(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits Qwen3-Next's columns. Key heads follow each other, each with q, k, its values and their gates."""
    values = num_heads_v // num_heads_qk * head_v
    q, k, v, z = mixed_qkvz.unflatten(-1, (num_heads_qk, -1)).split([head_qk, head_qk, values, values], dim=-1)
    b, a = mixed_ba.unflatten(-1, (num_heads_qk, -1)).chunk(2, dim=-1)
    mixed_qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1)
    return mixed_qkv, z.reshape(-1, num_heads_v, head_v), b.flatten(1), a.flatten(1)


def split_contiguous(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits Qwen3.5's columns: all q, all k, all values, all gates."""
    values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], dim=-1)
    b, a = mixed_ba.chunk(2, dim=-1)
    return mixed_qkv, z.unflatten(-1, (num_heads_v, head_v)), b, a


def activation_of(name: str | bool | None) -> str | None:
    return ("silu" if name else None) if isinstance(name, bool) else name


# Arguments of SGLang's kernels without a meaning here: a pool's rows have no other layout, padding has the slot -1, and
# checkpoints come as track_state and track_chunk_idx.
WITHOUT_MEANING = {
    "extend_prefix_lens",
    "layer_id",
    "metadata",
    "num_state_checkpoints",
    "output",
    "pad_slot_id",
    "state_checkpoint_cu_starts",
    "state_checkpoint_every_n_tokens",
    "validate_data",
}


def refuse_unknown(function: str, others: dict[str, Any]) -> None:
    """Raises if an argument is given that torch_gdn's kernel would ignore. SGLang's own kernel needs Triton."""
    for name, value in others.items():
        if value is not None and name not in WITHOUT_MEANING:
            raise NotImplementedError(f"{function}: {name}: torch_gdn's SGLang plugin does not know this argument")


def convolve_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int] | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    **others: Any,
) -> Tensor:
    """Convolves x [D, T]. Returns [D, T]."""
    refuse_unknown("causal_conv1d_fn", others)
    if cache_indices is None:
        cache_indices = torch.arange(query_start_loc.shape[0] - 1, device=x.device)
    batch = serving.Batch(
        state_indices=cache_indices,
        sequences=cache_indices.shape[0],
        decodes=0,
        has_initial_state=has_initial_state,
        cu_seqlens=query_start_loc,
    )
    columns = conv_states[..., : weight.shape[1] - 1]
    return serving.convolve(batch, x.t(), weight, columns, bias, activation_of(activation)).t()


def convolve_tokens(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Convolves x [N, D], one token of each sequence."""
    refuse_unknown("causal_conv1d_update", others)  # those of drafts
    if x.dim() != 2 or cache_seqlens is not None:
        raise NotImplementedError(
            f"causal_conv1d_update: expected x of shape [N, D] without drafts, got {list(x.shape)}"
        )
    if conv_state_indices is None:
        conv_state_indices = torch.arange(x.shape[0], device=x.device)
    batch = serving.Batch(conv_state_indices, sequences=x.shape[0], decodes=x.shape[0])
    columns = conv_state[..., : weight.shape[1] - 1]
    return serving.convolve(batch, x, weight, columns, bias, activation_of(activation))


def gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    g, step = torch_gdn.gdn_gating(A_log, a, b, dt_bias)
    return g[None], step[None]


class DeltaRule:
    """Replaces SGLang's TritonGDNKernel, whose base class `hooks` adds."""

    supports_packed_decode = False  # nor ReplaySSM, which needs it
    supports_track_state_snapshot = True

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        **others: Any,
    ) -> Tensor:
        """Takes q [1, N, H, K], one token of each sequence. Returns [1, N, HV, V]."""
        refuse_unknown("TritonGDNKernel.decode", others)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        serving.delta_rule(
            serving.Batch(cache_indices, sequences=q.shape[1], decodes=q.shape[1]),
            *(q[0], k[0], v[0], a, b, ssm_states, out[0]),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
        )
        return out

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        inplace_update: bool = True,
        track_state: Tensor | None = None,
        track_chunk_idx: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None, None]:
        """Takes q [1, T, H, K], the tokens of all sequences. track_state [N, HV, V, K] takes each sequence's state
        after track_chunk_idx [N] chunks, if that is above 0.
        """
        refuse_unknown("TritonGDNKernel.extend", others)
        if not inplace_update:
            raise NotImplementedError("multi-item scoring: torch_gdn's SGLang plugin does not support it")
        pool, slots, sequences = ssm_states, cache_indices, cache_indices.shape[0]
        checkpoints: dict[str, Any] = {}
        if track_state is not None and track_chunk_idx is not None:
            pool, slots, checkpoints = pool_with_checkpoints(ssm_states, cache_indices, track_chunk_idx)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        batch = serving.Batch(
            slots, sequences, decodes=0, cu_seqlens=query_start_loc, prefill_cu_seqlens=query_start_loc, **checkpoints
        )
        options = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}
        serving.delta_rule(batch, q[0], k[0], v[0], g[0], beta[0], pool, out[0], **options)
        if track_state is not None and pool is not ssm_states:
            store(ssm_states, cache_indices, pool[:sequences])
            is_padding = (cache_indices < 0).view(-1, 1, 1, 1)
            track_state.copy_(torch.where(is_padding, track_state, pool[sequences:]))
        return out, None, None


def pool_with_checkpoints(
    ssm_states: Tensor, cache_indices: Tensor, chunks: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Returns a pool of the sequences' states followed by the kept ones, its slots, and the arguments.

    If a sequence keeps a state at its start, it keeps its initial state. Padding has no slot here either.
    """
    states = ssm_states[cache_indices.clamp(min=0).repeat(2)]
    numbers = torch.arange(states.shape[0], dtype=torch.int32, device=states.device)
    slots, kept = numbers.chunk(2)
    checkpoints = {
        "checkpoint_offsets": chunks.clamp(min=0).to(torch.int32) * CHUNK,
        "checkpoint_indices": torch.where(chunks > 0, kept, -1),
    }
    return states, torch.where(cache_indices < 0, -1, slots), checkpoints


def store(ssm_states: Tensor, cache_indices: Tensor, states: Tensor) -> None:
    """Writes states [N, ..] to their slots.

    PyTorch takes an index of -1 for the last slot. Padding therefore repeats what the sequence with the highest slot
    writes. If all is padding, it writes back what `pool_with_checkpoints` read from slot 0.
    """
    numbers = torch.arange(states.shape[0], device=states.device)
    rows = torch.where(cache_indices < 0, cache_indices.argmax(), numbers)
    ssm_states[cache_indices[rows].clamp(min=0)] = states[rows]


def gated_norm(
    self: Any,
    x: Tensor,
    g: Tensor,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor:
    """Replaces FusedRMSNormGated.forward, which Qwen3-Next calls."""
    if residual is not None or prenorm:
        raise NotImplementedError("FusedRMSNormGated: expected no residual and no prenorm")
    return torch_gdn.rms_norm_gated(x, g, self.weight, eps=self.eps, activation=self.activation)


def gated_norm_or_plain(theirs: Callable[..., Tensor], self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    """Replaces RMSNorm.forward of layernorm_gated, which Qwen3.5 calls."""
    if z is None or self.group_size is not None or not self.norm_before_gate:
        return theirs(self, x, z)
    return torch_gdn.rms_norm_gated(x, z, self.weight, eps=self.eps, activation=self.activation)


def zero_centered_norm(
    self: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None
) -> Any:
    """Replaces GemmaRMSNorm.forward_native."""
    if residual is not None and post_residual_addition is not None:
        residual = residual + post_residual_addition
    return torch_gdn.rms_norm(
        x, self.weight, residual=residual, eps=self.variance_epsilon, prenorm=residual is not None, zero_centered=True
    )


def sigmoid_mul(attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False) -> Tensor:
    """Multiplies attention's output [T, heads * D] by its gate, which may be [T, heads, D]."""
    if quant:
        raise NotImplementedError("fused_sigmoid_mul: expected quant=False on mps")
    gated = attn_output * torch.sigmoid(gate.reshape(attn_output.shape).float())
    return attn_output.copy_(gated) if inplace else gated.to(attn_output.dtype)


def gate_sigmoid_mul(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor) -> Tensor:
    """Multiplies the shared expert's output by its gate."""
    gate = torch.sigmoid(linear(hidden_states, gate_weight[None]).float())
    return (shared_output * gate).to(shared_output.dtype)


def gate_sigmoid_mul_add(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, output: Tensor) -> None:
    output.add_(gate_sigmoid_mul(hidden_states, gate_weight, shared_output))


def router(
    theirs: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
    scoring_func: str = "softmax",
    **others: Any,
) -> tuple[Tensor, Tensor]:
    is_plain = correction_bias is None and all(each is None for each in others.values())
    if not is_plain or scoring_func != "softmax":
        more = {"correction_bias": correction_bias, "scoring_func": scoring_func, **others}
        return theirs(hidden_states, gating_output, topk, renormalize, **more)
    return torch_gdn.moe_router(gating_output, topk, renormalize=renormalize)


def experts(theirs: Callable[..., Tensor], layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
    """Replaces moe_forward_native, without reading a tensor on the host."""
    has_bias = any(getattr(layer, f"{name}_weight_bias", None) is not None for name in ("w13", "w2"))
    if has_bias or not are_plain_experts(config):
        return theirs(layer, x, topk_output, config)
    weights, ids, _ = topk_output
    return routed_experts(layer, x, weights, ids)


def are_plain_experts(config: Any) -> bool:
    is_silu = config.activation == "silu" and config.gemm1_alpha is None and config.gemm1_clamp_limit is None
    return is_silu and not config.apply_router_weight_on_input


def routed_experts(layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Computes the routed experts. If the layer's weights are packed, it has scales and biases too."""
    w13, w2 = (matrix_in(layer, f"{name}_weight", f"{name}_") for name in ("w13", "w2"))
    return fused_experts(x, w13, w2, weights, ids)
