"""The six stages of the chunked op: the inputs of each, and each called on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from torch_gdn import prepare_chunk_indices, reference
from torch_gdn.check.cases import Case

OUTPUTS = {
    "chunk_local_cumsum": ("g_cumsum",),
    "chunk_scaled_dot_kkt": ("A",),
    "solve_tril": ("A_inv",),
    "recompute_w_u": ("w", "u"),
    "chunk_fwd_h": ("h", "v_new"),
    "chunk_fwd_o": ("chunk_o",),
}


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
    exact = case.map(torch.Tensor.double)
    g_cumsum = reference.chunk_local_cumsum(exact.g, chunk_size, cu).float()
    A = reference.chunk_scaled_dot_kkt(exact.k, g_cumsum.double(), exact.beta, cu, chunk_size).float()
    A_inv = reference.solve_tril(A.double(), cu).float()
    w, u = reference.recompute_w_u(exact.k, exact.v, exact.beta, A_inv.double(), g_cumsum.double(), cu)
    w, u = w.to(dtype), u.to(dtype)
    state = exact.initial_state
    if state is not None and state_v_first:
        state = state.transpose(-1, -2).contiguous()
    h, v_new, _ = reference.chunk_fwd_h(
        exact.k,
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


def call(op: str, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The stage's op on these tensors, by the names of tests/golden; its outputs under theirs."""
    x = {name: tensor.to(device) for name, tensor in tensors.items()}
    cu = x.get("cu_seqlens")
    packed: dict[str, Any] = {"cu_seqlens": cu, "chunk_indices": None if cu is None else prepare_chunk_indices(cu)}
    results: Tensor | tuple[Tensor | None, ...]
    if op == "chunk_local_cumsum":
        results = torch_gdn.chunk_local_cumsum(x["g"], **packed)
    elif op == "chunk_scaled_dot_kkt":
        results = torch_gdn.chunk_scaled_dot_kkt(x["k"], x["g_cumsum"], x["beta"], **packed)
    elif op == "solve_tril":
        results = torch_gdn.solve_tril(x["A"], **packed)
    elif op == "recompute_w_u":
        results = torch_gdn.recompute_w_u(x["k"], x["v"], x["beta"], x["A_inv"], x["g_cumsum"], **packed)
    elif op == "chunk_fwd_h":
        state = x.get("initial_state")
        results = torch_gdn.chunk_fwd_h(x["k"], x["w"], x["u"], x["g_cumsum"], initial_state=state, **packed)
    else:
        results = torch_gdn.chunk_fwd_o(x["q"], x["k"], x["v_new"], x["h"], x["g_cumsum"], **packed)
    outputs = results if isinstance(results, tuple) else (results,)
    return {name: each for name, each in zip(OUTPUTS[op], outputs, strict=False) if each is not None}
