"""Calls of the delta rules with gradients, and what they are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid

import torch_gdn
from tests.helpers.cases import make_case
from tests.helpers.errors import assert_close, chunk_f32
from torch_gdn import reference
from torch_gdn.reference.common import gradients
from torch_gdn_check.registry.bounds import ROUNDING
from torch_gdn_check.registry.drawing import drawing
from torch_gdn_check.registry.inputs import Call, to_device
from torch_gdn_check.registry.registry import accepted_by

PER_TOKEN = ("q", "k", "v", "g", "beta")
RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "chunk_gated_delta_rule": (torch_gdn.chunk_gated_delta_rule, reference.fused_recurrent_gated_delta_rule),
    "chunk_kda": (torch_gdn.chunk_kda, reference.fused_recurrent_kda),
}
GOLDEN = Path(__file__).parents[1] / "golden" / "gradients"
HEADS = {"initial_state": 1, "A_log": None, "dt_bias": None}


def draw_call(rule: str, T: int, K: int = 32, V: int = 32, raw: bool = False, **options: Any) -> Call:
    """Draws a call that wants every gradient. With `raw`, the op makes the gates and normalises q and k."""
    options = {"B": 2, "H": 2, "HV": 4} | options
    case = make_case(T, K, V, normal=not raw, **options)
    call: Call = {name: getattr(case, name) for name in (*PER_TOKEN, "initial_state")}
    call |= {} if case.cu_seqlens is None else {"cu_seqlens": case.cu_seqlens}
    sizes = (*case.g.shape, K) if rule == "chunk_kda" else case.g.shape
    with drawing(1):
        call["g"] = logsigmoid(torch.randn(sizes) + 1) if rule == "chunk_kda" else call["g"]
        if raw:
            call |= {"g": torch.randn(sizes), "beta": torch.randn(case.beta.shape)}
            call |= {"A_log": torch.randn(sizes[2]) - 1, "dt_bias": torch.randn(sizes[2:]).flatten()}
            call |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
            call |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    return call


def draw_outer(call: Call) -> tuple[Tensor, Tensor]:
    """Draws the gradients that reach o and the final state."""
    with drawing(2):
        return torch.randn(call["v"].shape).to(call["v"].dtype), torch.randn(call["initial_state"].shape)


def differentiable(call: Call) -> list[str]:
    return [name for name in (*PER_TOKEN, "A_log", "dt_bias", "initial_state") if name in call]


def gradients_of(
    rule: Callable[..., Any], call: Call, do: Tensor, dht: Tensor, device: torch.device
) -> dict[str, Tensor]:
    moved = to_device(call, device)
    leaves = {name: moved[name].detach().requires_grad_() for name in differentiable(call)}
    o, state = rule(**(moved | leaves | {"output_final_state": True}))
    result = torch.autograd.grad((o, state), list(leaves.values()), (do.to(o), dht.to(state)))
    return dict(zip(leaves, result, strict=True))


def exact_of(rule: str, call: Call, do: Tensor, dht: Tensor) -> dict[str, Tensor]:
    """Returns the gradients by the argument's name: autograd through the recurrence, in float64."""
    names, exact = differentiable(call), RULES[rule][1]

    def run(*leaves: Tensor) -> Any:
        return exact(**accepted_by(exact, call | dict(zip(names, leaves, strict=True)) | {"output_final_state": True}))

    result = gradients(run, [call[name].double() for name in names], (do, dht))
    return {name: x for name, x in zip(names, result, strict=True) if x is not None}


def largest_g_cumsum(call: Call) -> float:
    """Returns the largest cumulative log decay in a chunk, whose rounding in float32 the decays have."""
    g = call["g"].double()
    if "A_log" in call:
        wide = g if g.dim() == 4 else g[..., None]
        g = reference.fused_kda_gate(wide, call["A_log"], call["dt_bias"], call.get("lower_bound"))
    return reference.chunk_local_cumsum(g.flatten(2), 64, call.get("cu_seqlens")).abs().max().item()


def assert_exact_gradients(result: dict[str, Tensor], exact: dict[str, Tensor], g_cumsum: float = 64.0) -> None:
    """Compares each gradient, and each of its heads. `g_cumsum` is the largest one in a chunk."""
    for name, x in result.items():
        bound = max(chunk_f32(g_cumsum), ROUNDING[x.dtype])
        assert_close(f"d{name}", x, exact[name], bound, HEADS.get(name, 2))


def check(rule: str, call: Call, device: torch.device, growth: float = 1.0) -> None:
    """`growth` is how much more than in a state that forgets errors may grow."""
    do, dht = draw_outer(call)
    result = gradients_of(RULES[rule][0], call, do, dht, device)
    for name, x in result.items():
        assert x.dtype == call[name].dtype and x.shape == call[name].shape, name
    assert_exact_gradients(result, exact_of(rule, call, do, dht), growth * (32 + largest_g_cumsum(call)))


def recorded() -> list[dict[str, Any]]:
    return json.loads((GOLDEN / "index.json").read_text())  # type: ignore[no-any-return]


def load(name: str) -> tuple[Call, Tensor, Tensor]:
    call: Call = dict(load_file(GOLDEN / f"{name}.safetensors"))
    return call, call.pop("do"), call.pop("dht")
