"""One valid call of each op, as keyword arguments of torch.ops.gdn.<op>, for tests that change one of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.cases import make_case
from tests.helpers.stages import stages_of

OPS = (
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt",
    "solve_tril",
    "recompute_w_u",
    "chunk_fwd_h",
    "chunk_fwd_o",
    "l2norm",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "causal_conv1d",
    "causal_conv1d_update_",
    "rms_norm_gated",
    "gdn_gating",
    "chunk_gated_delta_rule_",
    "fused_recurrent_gated_delta_rule_",
)
UNPACKED = ("l2norm", "rms_norm_gated", "gdn_gating")  # have no cu_seqlens
CHUNKED = (*OPS[:6], "chunk_gated_delta_rule", "chunk_gated_delta_rule_")  # and chunk_indices
IN_PLACE = tuple(op for op in OPS if op.endswith("_"))
T = 20
CU_SEQLENS = [0, 5, 5, 20]


def valid_call(op: str, device: torch.device, *, packed: bool = False, dtype: torch.dtype = torch.float32) -> dict:
    """B 2 (1 when packed), T 20, H 2, HV 4, K 64, V 32, chunks of 16, from a state where the op takes one.

    Of the convolution D 32, W 4; of a pool 5 slots, no slot for the last sequence.
    """
    if op.startswith("causal_conv1d"):
        call = convolution_call(op, packed, dtype)
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}
    case = make_case(T, 64, 32, B=1 if packed else 2, H=2, HV=4, dtype=dtype, cu_seqlens=CU_SEQLENS if packed else None)
    stages = stages_of(case, 16)
    state = {"initial_state": case.initial_state, "output_final_state": True}
    k_v = {"k": case.k, "v": case.v}
    arguments: dict[str, dict[str, Any]] = {
        "chunk_local_cumsum": {"g": case.g, "chunk_size": 16},
        "chunk_scaled_dot_kkt": {"k": case.k, "g": stages.g_cumsum, "beta": case.beta, "chunk_size": 16},
        "solve_tril": {"A": stages.A},
        "recompute_w_u": k_v | {"beta": case.beta, "A": stages.A_inv, "g": stages.g_cumsum},
        "chunk_fwd_h": {"k": case.k, "w": stages.w, "u": stages.u, "g": stages.g_cumsum, "chunk_size": 16} | state,
        "chunk_fwd_o": {
            "q": case.q,
            "k": case.k,
            "v": stages.v_new,
            "h": stages.h,
            "g": stages.g_cumsum,
            "chunk_size": 16,
        },
        "l2norm": {"x": case.q},
        "gdn_gating": {"A_log": case.g[0, 0].clone(), "a": case.g, "b": case.beta, "dt_bias": case.beta[0, 0].clone()},
        "rms_norm_gated": {"x": case.v, "g": case.v.flip(0), "weight": case.v[0, 0, 0].clone()},
        "chunk_gated_delta_rule": {"q": case.q} | k_v | {"g": case.g, "beta": case.beta, "chunk_size": 16} | state,
        "fused_recurrent_gated_delta_rule": {"q": case.q} | k_v | {"g": case.g, "beta": case.beta} | state,
    }
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        inputs = {argument: x for argument, x in arguments[name].items() if argument not in state}
        arguments[name + "_"] = inputs | slots_call(torch.randn(5, 4, 64, 32), 3 if packed else 2)
    call = arguments[op]
    if packed and op not in UNPACKED:
        call["cu_seqlens"] = case.cu_seqlens
        if op in CHUNKED:
            call["chunk_indices"] = stages.chunk_indices
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}


def convolution_call(op: str, packed: bool, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    N, B, D, W = (3, 1, 32, 4) if packed else (2, 2, 32, 4)
    shapes = {"x": (B, T, D), "weight": (D, W), "bias": (D,), "initial_state": (N, D, W), "state_pool": (5, D, W)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    call: dict[str, Any] = {name: tensors[name] for name in ("x", "weight", "bias")} | {"activation": "silu"}
    if op == "causal_conv1d":
        call |= {"initial_state": tensors["initial_state"], "output_final_state": True}
    else:
        call |= slots_call(tensors["state_pool"], N)
    return call | ({"cu_seqlens": torch.tensor(CU_SEQLENS)} if packed else {})


def slots_call(state_pool: Tensor, N: int) -> dict[str, Tensor]:
    indices, flags = torch.tensor([4, 1, -1][-N:]), torch.tensor([True, False, True][-N:])
    return {"state_pool": state_pool, "state_indices": indices, "has_initial_state": flags}


def tensors_of(call: dict[str, Any]) -> list[str]:
    return [name for name, value in call.items() if isinstance(value, Tensor)]


def run_op(op: str, call: dict[str, Any]) -> Any:
    return getattr(torch.ops.gdn, op)(**call)
