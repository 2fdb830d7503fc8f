"""Counts the work before anything is timed: floating-point operations, and bytes that must move once.

An operation is an addition or a multiplication; a fused multiply-add is two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bench.shapes import Attention, Layer

CHUNK = 32  # needs about the fewest operations per token while products are still wide


class Work(NamedTuple):
    operations: int
    bytes: int

    def floor(self, operations_a_second: float, bytes_a_second: float) -> float:
        """Returns the least seconds that this work can take on a machine with these rates."""
        return max(self.operations / operations_a_second, self.bytes / bytes_a_second)


def recurrence(layer: Layer, tokens: int) -> int:
    """Counts the recurrence token by token: decay (1), read (2), write (2) and output (2) per element of the state."""
    return 7 * tokens * layer.HV * layer.K * layer.V


def chunked(layer: Layer, tokens: int) -> int:
    """Counts the work in chunks, with v_new computed without w. Each key head has k k^T and q k^T. Each value head has
    k S, q S, the state's update, the inverse times v and the scores times v_new. Zeros above diagonals count too.
    """
    key_head_work = 2 * 2 * CHUNK * layer.K * layer.H
    value_head_work = (3 * 2 * layer.K * layer.V + 2 * 2 * CHUNK * layer.V) * layer.HV
    return tokens * (key_head_work + value_head_work)


def activations(layer: Layer, tokens: int, dtype: torch.dtype) -> int:
    """Returns the bytes of q, k, v and o in `dtype`, and of g and beta in float32."""
    elements = 2 * layer.H * layer.K + 2 * layer.HV * layer.V
    return tokens * (elements * dtype.itemsize + 2 * layer.HV * 4)


def state(layer: Layer) -> int:
    return layer.HV * layer.K * layer.V * 4


def prefill(layer: Layer, tokens: int, dtype: torch.dtype) -> Work:
    """Counts a prefill from an initial state to a final one, in the form that takes fewer operations."""
    operations = min(recurrence(layer, tokens), chunked(layer, tokens))
    return Work(operations, activations(layer, tokens, dtype) + 2 * state(layer))


def decode(layer: Layer, batch: int, dtype: torch.dtype) -> Work:
    """Counts one token of each sequence. The state is updated in place: read once, written once."""
    return Work(recurrence(layer, batch), activations(layer, batch, dtype) + 2 * batch * state(layer))


def kda(layer: Layer, tokens: int, batch: int, dtype: torch.dtype) -> Work:
    """Counts a delta rule with one g per key channel: the products are the same, with K - 1 more gates."""
    operations = min(recurrence(layer, tokens), chunked(layer, tokens))
    gates = 4 * tokens * layer.HV * (layer.K - 1)
    return Work(batch * operations, batch * (activations(layer, tokens, dtype) + gates + 2 * state(layer)))


def attention(layer: Attention, tokens: int, bytes_of_cache: int) -> Work:
    """Counts one query of each head over a cache of `tokens` tokens and `bytes_of_cache` bytes."""
    return Work(4 * layer.HQ * tokens * layer.D, bytes_of_cache)
