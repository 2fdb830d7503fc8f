"""The inputs of each chunk stage, as the stage before it would hand them over in the case's dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.helpers.cases import Case
from torch_gdn import prepare_chunk_indices, reference


@dataclass
class Stages:
    g_cumsum: Tensor
    A: Tensor
    A_inv: Tensor
    w: Tensor
    u: Tensor
    h: Tensor
    v_new: Tensor
    chunk_indices: Tensor | None


def stages_of(case: Case, chunk_size: int = 64, state_v_first: bool = False) -> Stages:
    """Each computed in float64 from what was handed over, then rounded to its own dtype."""
    cu, dtype = case.cu_seqlens, case.dtype
    chunk_indices = None if cu is None else prepare_chunk_indices(cu, chunk_size)
    wide = case.map(torch.Tensor.double)
    g_cumsum = reference.chunk_local_cumsum(wide.g, chunk_size, cu).float()
    A = reference.chunk_scaled_dot_kkt(wide.k, g_cumsum.double(), wide.beta, cu, chunk_size).float()
    A_inv = reference.solve_tril(A.double(), cu).float()
    w, u = reference.recompute_w_u(wide.k, wide.v, wide.beta, A_inv.double(), g_cumsum.double(), cu)
    w, u = w.to(dtype), u.to(dtype)
    state = wide.initial_state
    if state is not None and state_v_first:
        state = state.transpose(-1, -2).contiguous()
    h, v_new, _ = reference.chunk_fwd_h(
        wide.k,
        w.double(),
        u.double(),
        g_cumsum.double(),
        state,
        False,
        chunk_size,
        state_v_first,
        cu,
        chunk_indices,
    )
    return Stages(g_cumsum, A, A_inv, w, u, h.to(dtype), v_new.to(dtype), chunk_indices)
