"""What both end-to-end ops return, without computing it (see fakes.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_gdn.fakes import Check, check_initial_state, check_q_k_v, chunk_rows, final_state, state_pattern, state_sizes
from torch_gdn.fakes_modules import check_slots


class GateOptions(NamedTuple):
    """How g and beta become log decay and step."""

    use_gate: bool
    A_log: Tensor | None
    dt_bias: Tensor | None
    use_sigmoid: bool
    allow_neg_eigval: bool


class Sizes(NamedTuple):
    B: int
    T: int
    HV: int
    K: int
    V: int

    @property
    def gates(self) -> Sequence[int]:
        return self.B, self.T, self.HV


def check_inputs(
    check: Check,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    options: GateOptions,
    output_dtype: torch.dtype | None,
    head_grouping: str,
    chunk_size: int | None = None,
) -> Sizes:
    sizes = Sizes(*check_q_k_v(check, q, k, v, chunk_size))
    if g is not None:
        check.floating("g", g)
        check.shape("g", g, "[B, T, HV]", sizes.gates)
    if beta is not None:
        check.floating("beta", beta)
    check_gates(check, sizes, g, beta, options)
    allowed = output_dtype in (None, torch.float32, q.dtype)
    check.value(allowed, "output_dtype", "float32 or the dtype of q", output_dtype)
    check.value(head_grouping in ("block", "tiled"), "head_grouping", "'block' or 'tiled'", repr(head_grouping))
    return sizes


def check_gates(check: Check, sizes: Sizes, g: Tensor | None, beta: Tensor | None, options: GateOptions) -> None:
    with_gate, with_sigmoid = (f"a tensor where use_{name}_in_kernel is set" for name in ("gate", "beta_sigmoid"))
    check.value(not options.use_gate or g is not None, "g", with_gate, None)
    check.value(not options.use_gate or options.A_log is not None, "A_log", with_gate, None)
    check.value(not options.use_sigmoid or beta is not None, "beta", with_sigmoid, None)
    expected = "False where use_beta_sigmoid_in_kernel is False"
    check.value(not options.allow_neg_eigval or options.use_sigmoid, "allow_neg_eigval", expected, True)
    if not options.use_gate:
        return
    for name, x in (("A_log", options.A_log), ("dt_bias", options.dt_bias)):
        if x is not None:
            check.floating(name, x)
            check.shape(name, x, "[HV]", (sizes.HV,))


def check_channels(check: Check, sizes: Sizes, beta: Tensor | None, gk: Tensor | None, gv: Tensor | None) -> None:
    if beta is not None and beta.dim() == 4:
        check.shape("beta", beta, "[B, T, HV, V]", (*sizes.gates, sizes.V))
    elif beta is not None:
        check.shape("beta", beta, "[B, T, HV]", sizes.gates)
    if gk is not None:
        check.floating("gk", gk)
        check.shape("gk", gk, "[B, T, HV, K]", (*sizes.gates, sizes.K))
    if gv is not None:
        check.floating("gv", gv)
        check.shape("gv", gv, "[B, T, HV, V]", (*sizes.gates, sizes.V))


def output(q: Tensor, sizes: Sizes, dtype: torch.dtype | None) -> Tensor:
    return q.new_empty((*sizes.gates, sizes.V), dtype=q.dtype if dtype is None else dtype)


def chunk_states(q: Tensor, sizes: Sizes, NT: int, state_v_first: bool, asked_for: bool) -> Tensor:
    dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
    h_sizes = (sizes.B, *state_sizes(NT, sizes.HV, sizes.K, sizes.V, state_v_first))
    return q.new_empty(h_sizes if asked_for else (0,), dtype=dtype)


def check_pool(
    check: Check,
    sizes: Sizes,
    N: int,
    state_pool: Tensor,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    null_index: int,
    state_v_first: bool,
) -> None:
    pattern = state_pattern("slots", state_v_first)
    check.activation("state_pool", state_pool)
    check.dimensions("state_pool", state_pool, pattern)
    expected = state_sizes(state_pool.shape[0], sizes.HV, sizes.K, sizes.V, state_v_first)
    check.shape("state_pool", state_pool, pattern, expected)
    check_slots(check, N, state_pool, state_indices, has_initial_state, null_index)


@torch.library.register_fake("gdn::chunk_gated_delta_rule")
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    return_intermediate_states: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    check = Check("chunk_gated_delta_rule", "q", q)
    options = GateOptions(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    sizes = check_inputs(check, q, k, v, g, beta, options, output_dtype, head_grouping, chunk_size)
    check.shape("beta", beta, "[B, T, HV]", sizes.gates)
    N = check.sequences(sizes.B, cu_seqlens, chunk_indices)
    final_sizes = state_sizes(N, sizes.HV, sizes.K, sizes.V, state_v_first)
    check_initial_state(check, initial_state, final_sizes, state_v_first)
    NT = chunk_rows(sizes.T, chunk_size, cu_seqlens, chunk_indices)
    return (
        output(q, sizes, output_dtype),
        final_state(q, final_sizes, output_final_state),
        chunk_states(q, sizes, NT, state_v_first, return_intermediate_states),
    )


@torch.library.register_fake("gdn::fused_recurrent_gated_delta_rule")
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
) -> tuple[Tensor, Tensor]:
    check = Check("fused_recurrent_gated_delta_rule", "q", q)
    options = GateOptions(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    sizes = check_inputs(check, q, k, v, g, beta, options, output_dtype, head_grouping)
    check_channels(check, sizes, beta, gk, gv)
    N = check.sequences(sizes.B, cu_seqlens, None)
    final_sizes = state_sizes(N, sizes.HV, sizes.K, sizes.V, state_v_first)
    check_initial_state(check, initial_state, final_sizes, state_v_first)
    return output(q, sizes, output_dtype), final_state(q, final_sizes, output_final_state)


@torch.library.register_fake("gdn::chunk_gated_delta_rule_")
def chunk_gated_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
    return_intermediate_states: bool = False,
) -> tuple[Tensor, Tensor]:
    check = Check("chunk_gated_delta_rule_", "q", q)
    options = GateOptions(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    sizes = check_inputs(check, q, k, v, g, beta, options, output_dtype, head_grouping, chunk_size)
    check.shape("beta", beta, "[B, T, HV]", sizes.gates)
    N = check.sequences(sizes.B, cu_seqlens, chunk_indices)
    check_pool(check, sizes, N, state_pool, state_indices, has_initial_state, null_index, state_v_first)
    NT = chunk_rows(sizes.T, chunk_size, cu_seqlens, chunk_indices)
    return output(q, sizes, output_dtype), chunk_states(q, sizes, NT, state_v_first, return_intermediate_states)


@torch.library.register_fake("gdn::fused_recurrent_gated_delta_rule_")
def fused_recurrent_gated_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state_pool: Tensor,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_index: int = -1,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    output_dtype: torch.dtype | None = None,
    head_grouping: str = "block",
) -> Tensor:
    check = Check("fused_recurrent_gated_delta_rule_", "q", q)
    options = GateOptions(use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    sizes = check_inputs(check, q, k, v, g, beta, options, output_dtype, head_grouping)
    check_channels(check, sizes, beta, gk, gv)
    N = check.sequences(sizes.B, cu_seqlens, None)
    check_pool(check, sizes, N, state_pool, state_indices, has_initial_state, null_index, state_v_first)
    return output(q, sizes, output_dtype)
