"""Runs vLLM's rotary embeddings, SwiGLU and Qwen's gated attention on mps in fewer launches than vLLM's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding, apply_interleaved_rope

from torch_gdn.integrations import plain
from torch_gdn_engines.vllm.attention import PagedAttention
from torch_gdn_engines.vllm.layers import TorchGdnGemmaRMSNorm

Angles = tuple[Tensor, Tensor]
ANGLES = "torch_gdn_angles"  # attribute of a step's forward context


class TorchGdnSiluAndMul(SiluAndMul):
    def forward_oot(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.ops.gdn.act_and_mul(gate, up)


def rotate(query: Tensor, key: Tensor, angles: Angles, head_size: int) -> tuple[Tensor, Tensor]:
    """Rotates q and k [T, heads * D] by the angles [T, P]."""
    heads = [x.view(1, x.shape[0], -1, head_size) for x in (query, key)]
    q, k = torch.ops.gdn.qk_norm_rope(*heads, *(x[None] for x in angles))
    return q.view(query.shape), k.view(key.shape)


class RotatesOnce:
    """A base class that precedes an embedding of vLLM's."""

    def forward_oot(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None, *others: Any) -> Any:
        if key is None or query.dim() != 2 or not self.takes(positions):
            return self.forward_native(positions, query, key, *others)
        return rotate(query, key, angles_of_step(self, positions, query), self.head_size)


class TorchGdnRotaryEmbedding(RotatesOnce, RotaryEmbedding):
    def takes(self, positions: Tensor) -> bool:
        return self.is_neox_style

    def angles(self, positions: Tensor, x: Tensor) -> Angles:
        """Returns cos and sin [T, P] in a dtype that goes with x."""
        cos, sin = self._match_cos_sin_cache_dtype(x).index_select(0, positions.flatten()).chunk(2, dim=-1)
        return cos, sin


class TorchGdnMRotaryEmbedding(RotatesOnce, MRotaryEmbedding):
    """Takes positions [T] of text, or [3, T] of a model that also takes images."""

    def takes(self, positions: Tensor) -> bool:
        return self.is_neox_style and (positions.dim() == 1 or self.mrope_interleaved)

    def angles(self, positions: Tensor, x: Tensor) -> Angles:
        cos, sin = self._match_cos_sin_cache_dtype(x)[positions].chunk(2, dim=-1)
        if positions.dim() == 2:
            cos, sin = (apply_interleaved_rope(x, self.mrope_section) for x in (cos, sin))
        return cos, sin


ROTATIONS = (TorchGdnRotaryEmbedding, TorchGdnMRotaryEmbedding)


def angles_of_step(rotary: TorchGdnRotaryEmbedding | TorchGdnMRotaryEmbedding, positions: Tensor, x: Tensor) -> Angles:
    """Returns the angles of a step's tokens, which the step's first layer computes and the others find."""
    if not is_forward_context_available():
        return rotary.angles(positions, x)
    known: dict[object, tuple[Angles, Tensor]] = vars(get_forward_context()).setdefault(ANGLES, {})
    key = (rotary, positions.data_ptr(), positions.shape, x.dtype)
    if key not in known:
        known[key] = rotary.angles(positions, x), positions  # kept alive, so that no other positions get its address
    return known[key][0]


# ---- Qwen's attention, whose projection of q has a gate for the output ----


def is_taken(layer: Any, positions: Tensor) -> bool:
    """Returns whether the layer's norms and rotation, which are not called, are those that the op computes."""
    q_norm, k_norm = layer.q_norm, layer.k_norm
    changes = [plain.change_of(each, (TorchGdnGemmaRMSNorm,)) for each in (q_norm, k_norm)]
    if not layer.attn_output_gate or any(changes) or plain.change_of(layer.rotary_emb, ROTATIONS):
        return False
    is_same = q_norm.variance_epsilon == k_norm.variance_epsilon and q_norm.weight.dtype == k_norm.weight.dtype
    takes: bool = is_same and layer.rotary_emb.takes(positions)
    return takes


def slots_of_step(attention: Any) -> Tensor | None:
    """Returns where the step's keys and values go. A profiling run has no such slots."""
    mapping = get_forward_context().slot_mapping if is_forward_context_available() else None
    return mapping.get(attention.layer_name) if isinstance(mapping, dict) else None


def pages_of(attention: Any, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns keys, values and slots to write to, or None if only the backend can write: its pages hold codes."""
    if slots is None or type(attention.impl) is not PagedAttention:
        return None
    return *attention.impl.keys_and_values(attention.kv_cache), slots


def project(
    layer: Any, qkv: Tensor, positions: Tensor, slots: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Returns q, k, v [T, heads * D], q and k normalised and rotated, and the gate [1, T, heads, D].

    k and v are None if they are in their slots. This is one launch.
    """
    q_and_gate, k, v = qkv.split([2 * layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
    q, gate = q_and_gate.view(1, -1, layer.num_heads, 2, layer.head_dim).unbind(3)
    k, values = (x.view(1, -1, layer.num_kv_heads, layer.head_dim) for x in (k, v))
    cos, sin = (x[None] for x in angles_of_step(layer.rotary_emb, positions, qkv))
    norm = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.variance_epsilon, True
    pages = pages_of(layer.attn, slots)
    if pages is not None:
        q = torch.ops.gdn.qk_norm_rope_and_cache_(q, k, values, cos, sin, *pages, *norm)
        return q[0].flatten(1), None, None, gate
    q, k = torch.ops.gdn.qk_norm_rope(q, k, cos, sin, *norm)
    return q[0].flatten(1), k[0].flatten(1), v, gate


def gated(o: Tensor, gate: Tensor) -> Tensor:
    result: Tensor = torch.ops.gdn.act_and_mul(gate, o.view(gate.shape), "sigmoid")
    return result[0].flatten(1)


def gated_attention(theirs: Callable[..., Tensor], layer: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    """Wraps the forward of vLLM's Qwen3NextAttention, which calls eight operators around the attention itself."""
    if not is_taken(layer, positions):
        return theirs(layer, positions, hidden_states)
    q, k, v, gate = project(layer, layer.qkv_proj(hidden_states)[0], positions, slots_of_step(layer.attn))
    y: Tensor = layer.o_proj(gated(layer.attn(q, k, v), gate))[0]
    return y


def register() -> None:
    SiluAndMul.register_oot(TorchGdnSiluAndMul)
    RotaryEmbedding.register_oot(TorchGdnRotaryEmbedding)
    MRotaryEmbedding.register_oot(TorchGdnMRotaryEmbedding)
    for owner in (TorchGdnGemmaRMSNorm, *ROTATIONS):
        plain.learn(owner)
