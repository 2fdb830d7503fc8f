"""One valid call of each op, as keyword arguments of torch.ops.gdn.<op>, and what changes of it the layers' refuse."""

from __future__ import annotations

from collections.abc import Callable
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
    "rms_norm",
    "rms_norm_gated",
    "gdn_gating",
    "fused_kda_gate",
    "chunk_gated_delta_rule_",
    "fused_recurrent_gated_delta_rule_",
    "chunk_kda",
    "chunk_kda_",
)
UNPACKED = ("l2norm", "rms_norm", "rms_norm_gated", "gdn_gating", "fused_kda_gate")  # have no cu_seqlens
CHUNKED = (*OPS[:6], "chunk_gated_delta_rule", "chunk_gated_delta_rule_")  # and chunk_indices
IN_PLACE = tuple(op for op in OPS if op.endswith("_"))
KDA = ("chunk_kda", "chunk_kda_")
END_TO_END = tuple(op for op in OPS if op in KDA or "gated_delta_rule" in op)
STATEFUL = ("chunk_fwd_h", *(op for op in END_TO_END if op not in IN_PLACE))  # have an initial_state
COPY = "batch_copy_"  # takes bytes, not activations: it is in none of the above
T = 20
CU_SEQLENS = [0, 5, 5, 20]

Change = Callable[[dict[str, Any]], dict[str, Any]]


def valid_call(op: str, device: torch.device, *, packed: bool = False, dtype: torch.dtype = torch.float32) -> dict:
    """B 2 (1 when packed), T 20, H 2, HV 4, K 64, V 32, chunks of 16, from a state where the op takes one.

    Of the convolution D 32, W 4; of a pool 5 slots, no slot for the last sequence.
    """
    if op.startswith("causal_conv1d") or op == COPY:
        call = copy_call() if op == COPY else convolution_call(op, packed, dtype)
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
        "rms_norm": {"x": case.v, "weight": case.v[0, 0, 0].clone(), "residual": case.v.flip(0), "zero_centered": True},
        "rms_norm_gated": {"x": case.v, "g": case.v.flip(0), "weight": case.v[0, 0, 0].clone()},
        "chunk_gated_delta_rule": {"q": case.q} | k_v | {"g": case.g, "beta": case.beta, "chunk_size": 16} | state,
        "fused_recurrent_gated_delta_rule": {"q": case.q} | k_v | {"g": case.g, "beta": case.beta} | state,
    }
    channels = case.g[..., None] * torch.linspace(0.5, 1.5, 64)
    arguments["fused_kda_gate"] = {"g": channels, "A_log": case.g[0, 0].clone(), "dt_bias": channels[0, 0].clone()}
    arguments["chunk_kda"] = arguments["chunk_gated_delta_rule"] | {"g": channels}
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda"):
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
    shapes: dict[str, tuple[int, ...]] = {"x": (B, T, D), "weight": (D, W), "bias": (D,), "initial_state": (N, D, W)}
    shapes |= {"state_pool": (5, D, W), "residual": (B, T, D)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    call: dict[str, Any] = {name: tensors[name] for name in ("x", "weight", "bias", "residual")}
    call["activation"] = "silu"
    if op == "causal_conv1d":
        call |= {"initial_state": tensors["initial_state"], "output_final_state": True}
    else:
        call |= slots_call(tensors["state_pool"], N)
    return call | ({"cu_seqlens": torch.tensor(CU_SEQLENS)} if packed else {})


def copy_call() -> dict[str, Any]:
    """One range that slides, one that is copied, and an empty one."""
    offsets = {"source_offsets": torch.tensor([20, 40, 3]), "destination_offsets": torch.tensor([10, 60, 9])}
    return {"pool": torch.arange(80, dtype=torch.uint8)} | offsets | {"sizes": torch.tensor([16, 20, 0])}


def slots_call(state_pool: Tensor, N: int) -> dict[str, Tensor]:
    indices, flags = torch.tensor([4, 1, -1][-N:]), torch.tensor([True, False, True][-N:])
    return {"state_pool": state_pool, "state_indices": indices, "has_initial_state": flags}


def tensors_of(call: dict[str, Any]) -> list[str]:
    return [name for name, value in call.items() if isinstance(value, Tensor)]


def run_op(op: str, call: dict[str, Any]) -> Any:
    return getattr(torch.ops.gdn, op)(**call)


def put(name: str, value: Any) -> Change:
    return lambda call: call | {name: value}


def change(name: str, how: Callable[[Tensor], Any]) -> Change:
    return lambda call: call | {name: how(call[name])}


def flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def short(x: Tensor) -> Tensor:
    return x[:, :-1]


def refused_by_layers(bad: Callable[..., None]) -> None:
    """Calls `bad` with op, argument, error, what is wrong, and the change that makes it so."""
    bad_norms(bad)
    bad_gates(bad)
    bad_convolutions(bad)


def bad_norms(bad: Callable[..., None]) -> None:
    for op, second, too_long in (("rms_norm", "residual", 16385), ("rms_norm_gated", "g", 1025)):
        for size in (0, too_long):
            rows = dict.fromkeys(("x", second), torch.zeros(2, size))
            bad(op, "x", ValueError, f"D of {size}", lambda call, rows=rows: call | rows)
        bad(op, "x", TypeError, "float64", change("x", torch.Tensor.double))
        bad(op, second, ValueError, "three dimensions", change(second, flat))
        bad(op, "weight", TypeError, "integers", change("weight", torch.Tensor.int))
        bad(op, "weight", ValueError, "too short", change("weight", lambda w: w[1:]))
        bad(op, "eps", ValueError, "negative", put("eps", -1e-6))
    bad("rms_norm", "residual", TypeError, "another dtype", change("residual", torch.Tensor.half))
    bad("rms_norm", "zero_centered", ValueError, "no weight", put("weight", None))
    bad("rms_norm_gated", "g", TypeError, "integers", change("g", torch.Tensor.int))
    bad("rms_norm_gated", "activation", ValueError, "tanh", put("activation", "tanh"))


def bad_gates(bad: Callable[..., None]) -> None:
    op = "gdn_gating"
    bad(op, "A_log", ValueError, "two dimensions", change("A_log", lambda x: x[None]))
    bad(op, "A_log", ValueError, "no heads", change("A_log", lambda x: x[:0]))
    bad(op, "A_log", TypeError, "float64", change("A_log", torch.Tensor.double))
    for name in ("a", "b", "dt_bias"):
        bad(op, name, TypeError, "integers", change(name, torch.Tensor.int))
        bad(op, name, ValueError, "a head too few", change(name, lambda x: x[..., 1:]))
    bad(op, "b", ValueError, "a token too few", change("b", short))
    op = "fused_kda_gate"
    bad(op, "g", ValueError, "one dimension", change("g", torch.Tensor.flatten))
    bad(op, "g", TypeError, "integers", change("g", torch.Tensor.int))
    bad(op, "lower_bound", ValueError, "zero", put("lower_bound", 0.0))
    bad(op, "lower_bound", ValueError, "nan", put("lower_bound", torch.nan))
    bad(op, "output_dtype", TypeError, "an integer", put("output_dtype", torch.int32))
    for name in ("A_log", "dt_bias"):
        bad(op, name, TypeError, "integers", change(name, torch.Tensor.int))
        bad(op, name, ValueError, "a value too few", change(name, lambda x: x.flatten()[1:]))


def bad_convolutions(bad: Callable[..., None]) -> None:
    for op, state in (("causal_conv1d", "initial_state"), ("causal_conv1d_update_", "state_pool")):
        bad(op, "weight", TypeError, "integers", change("weight", torch.Tensor.int))
        bad(op, "weight", ValueError, "a third dimension", change("weight", lambda w: w[:, None]))
        bad(op, "weight", ValueError, "too few channels", change("weight", lambda w: w[1:]))
        bad(op, "weight", ValueError, "W of 1", change("weight", lambda w: w[:, :1]))
        bad(op, "weight", ValueError, "W of 5", change("weight", lambda w: w.new_zeros(len(w), 5)))
        bad(op, "bias", TypeError, "another dtype", change("bias", torch.Tensor.half))
        bad(op, "bias", ValueError, "too short", change("bias", lambda b: b[1:]))
        bad(op, "residual", TypeError, "another dtype", change("residual", torch.Tensor.half))
        bad(op, "residual", ValueError, "too few tokens", change("residual", lambda r: r[:, 1:]))
        bad(op, "activation", ValueError, "gelu", put("activation", "gelu"))
        bad(op, state, TypeError, "integers", change(state, torch.Tensor.int))
        bad(op, state, ValueError, "two dimensions", change(state, flat))
        bad(op, state, ValueError, "too few channels", change(state, short))
        bad(op, state, ValueError, "two columns", change(state, lambda s: s[..., :2]))
    op = "causal_conv1d"
    bad(op, "initial_state", ValueError, "one for three", change("initial_state", lambda s: s[:1]), packed=True)
    bad(op, "state_width", ValueError, "not that of the state", put("state_width", 3))
    bad(op, "state_width", ValueError, "two columns", lambda call: without_state(call) | {"state_width": 2})
    runs = torch.zeros(2, 20, dtype=torch.int64)
    bad(op, "seq_idx", TypeError, "floats", lambda call: without_state(call) | {"seq_idx": runs.float()})
    bad(op, "seq_idx", ValueError, "too short", lambda call: without_state(call) | {"seq_idx": runs[:, 1:]})


def without_state(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"initial_state": None, "output_final_state": False}
