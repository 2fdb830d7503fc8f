"""Extracts and restores what one layer of a transformers cache holds: keys of some tokens, or the states after them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

Piece = dict[str, Tensor]


def extract_piece(layer: Any, start: int, end: int) -> Piece:
    """Copies, on the layer's device, the keys and values of tokens from start to end, or the states after them.

    The layer holds `end` tokens.

    Raises:
        ValueError: If the layer is not of full attention, sliding windows or linear attention.
    """
    if type(layer) is DynamicLayer:
        return {"keys": layer.keys[:, :, start:end].clone(), "values": layer.values[:, :, start:end].clone()}
    if type(layer) is LinearAttentionLayer:
        columns = layer.conv_states[0]
        return {
            "columns": columns[..., max(0, columns.shape[-1] - layer.conv_kernel_size[0]) :].clone(),
            "state": layer.recurrent_states[0].clone(),
        }
    if type(layer) is DynamicSlidingWindowLayer:
        window = layer.sliding_window - 1
        return {"keys": layer.keys[:, :, -window:].clone(), "values": layer.values[:, :, -window:].clone()}
    raise ValueError(
        f"cache: expected layers of full attention, sliding windows or linear attention, got {type(layer).__name__}"
    )


def restore_layer(layer: Any, pieces: Sequence[Piece], tokens: int) -> None:
    """Restores into a new layer what `extract_piece` took. `pieces` are of consecutive tokens, `tokens` in total."""
    last = pieces[-1]
    if type(layer) is LinearAttentionLayer:
        columns, state = last["columns"], last["state"]
        layer.lazy_initialization(conv_states=columns, conv_kernel_size=columns.shape[-1])
        layer.lazy_initialization(recurrent_states=state)
        layer.conv_states[0].copy_(columns)
        layer.recurrent_states[0].copy_(state)
        layer.has_previous_state[0] = True
        return
    sliding = type(layer) is DynamicSlidingWindowLayer
    parts = pieces[-1:] if sliding else pieces
    keys, values = (torch.cat([piece[name] for piece in parts], 2) for name in ("keys", "values"))
    layer.update(keys, values)
    if sliding:
        layer.cumulative_length = tokens
