"""The keyword arguments that change nothing about what an end-to-end function returns, for its overloads."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor


class RuleOptions(TypedDict, total=False):
    """Of `chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule` and their in-place twins."""

    scale: float | None
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    A_log: Tensor | None
    dt_bias: Tensor | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    cu_seqlens: Tensor | None
    output_dtype: torch.dtype | None
    head_grouping: str


class FlaOptions(RuleOptions, total=False):
    """Of the two that return a new state."""

    initial_state: Tensor | None
    transpose_state_layout: bool | None
    head_first: bool | None


class ChunkOptions(FlaOptions, total=False):
    cu_seqlens_cpu: Tensor | None
    chunk_indices: Tensor | None
    cp_context: None
    chunk_size: int


class KdaOptions(RuleOptions, total=False):
    """Of Kimi Delta Attention in chunks."""

    initial_state: Tensor | None
    output_final_state: bool
    safe_gate: bool
    lower_bound: float | None
    disable_recompute: bool
    cu_seqlens_cpu: Tensor | None
    cp_context: None
    use_graph: bool
    max_num_seqs: int | None
    chunk_size: int
    transpose_state_layout: bool | None


class ChunkPoolOptions(RuleOptions, total=False):
    chunk_indices: Tensor | None
    chunk_size: int
    checkpoint_offsets: Tensor | None
    checkpoint_indices: Tensor | None
    out: Tensor | None
