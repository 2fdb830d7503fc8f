"""Computes the six stages of the chunked op, with the inputs of each."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from torch_gdn import prepare_chunk_indices, reference
from torch_gdn_check.registry.cases import Case

INPUTS = {
    "chunk_local_cumsum": ("g",),
    "chunk_scaled_dot_kkt": ("k", "g_cumsum", "beta"),
    "solve_tril": ("A",),
    "recompute_w_u": ("k", "v", "beta", "A_inv", "g_cumsum"),
    "chunk_fwd_h": ("k", "w", "u", "g_cumsum"),
    "chunk_fwd_o": ("q", "k", "v_new", "h", "g_cumsum"),
}
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


def stages_of(case: Case, chunk_size: int = 64) -> Stages:
    """Computes each stage in float64 from the previous ones' results, then rounds it to its own dtype."""
    cu, dtype = case.cu_seqlens, case.dtype
    chunk_indices = None if cu is None else prepare_chunk_indices(cu, chunk_size)
    exact = case.map(torch.Tensor.double)
    g_cumsum = reference.chunk_local_cumsum(exact.g, chunk_size, cu).float()
    A = reference.chunk_scaled_dot_kkt(exact.k, g_cumsum.double(), exact.beta, cu, chunk_size).float()
    A_inv = reference.solve_tril(A.double(), cu).float()
    w, u = reference.recompute_w_u(exact.k, exact.v, exact.beta, A_inv.double(), g_cumsum.double(), cu)
    w, u = w.to(dtype), u.to(dtype)
    factors = (exact.k, w.double(), u.double(), g_cumsum.double())
    h, v_new, _ = reference.chunk_fwd_h(*factors, exact.initial_state, False, chunk_size, False, cu, chunk_indices)
    return Stages(g_cumsum, A, A_inv, w, u, h.to(dtype), v_new.to(dtype), chunk_indices)


def on_inputs(module: ModuleType, op: str, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Runs a stage, of torch_gdn or of its reference, on tensors named as in tests/golden. So are its outputs."""
    if op == "chunk_fwd_h":
        options["initial_state"] = tensors.get("initial_state")
    results = getattr(module, op)(*(tensors[name] for name in INPUTS[op]), **options)
    outputs = results if isinstance(results, tuple) else (results,)
    return {name: each for name, each in zip(OUTPUTS[op], outputs, strict=False) if each is not None}


def call(op: str, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    x = {name: tensor.to(device) for name, tensor in tensors.items()}
    cu = x.get("cu_seqlens")
    chunk_indices = None if cu is None else prepare_chunk_indices(cu)
    return on_inputs(torch_gdn, op, x, cu_seqlens=cu, chunk_indices=chunk_indices)
