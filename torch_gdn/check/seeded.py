"""Inputs from a seed, held against float64: what FLA's recorded outputs do not cover, or all there is without them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from torch_gdn import reference
from torch_gdn.check import bounds, stages
from torch_gdn.check.calls import Call
from torch_gdn.check.cases import END_TO_END_OPS, Case, bounds_of, make_case
from torch_gdn.check.steps import Outcome, judged
from torch_gdn.tune import prefill_algorithm

IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "chunk_gated_delta_rule": torch_gdn.chunk_gated_delta_rule_,
    "fused_recurrent_gated_delta_rule": torch_gdn.fused_recurrent_gated_delta_rule_,
}
CHUNK, RECURRENT = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"


def unaligned(x: Tensor) -> Tensor:
    """The same values, one element into their storage."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    storage[1:] = x.flatten()
    return storage[1:].view(x.shape)


def inputs(op: str, wanted: Call, tokens: int) -> tuple[Case, dict[str, Any]]:
    """A case and options for such a call."""
    case = make_case(tokens, wanted.K, wanted.V, dtype=wanted.dtype, normal=not wanted.normalise)
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": wanted.normalise}
    if wanted.state_v_first:
        assert case.initial_state is not None
        case = replace(case, initial_state=case.initial_state.transpose(-1, -2).contiguous())
        options["state_v_first"] = True
    if wanted.pool != torch.float32:
        assert case.initial_state is not None
        case = replace(case, initial_state=case.initial_state.to(wanted.pool))
    if wanted.channels and op == RECURRENT:
        options |= channels_of(case)
    return case, options


def channels_of(case: Case, seed: int = 1) -> dict[str, Tensor]:
    """gk and gv, weak and strong ones: the gates of the case are drawn for one number a head."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"gk": case.q.shape[-1], "gv": case.v.shape[-1]}
    draws = {name: torch.randn(*case.g.shape, size, generator=random) for name, size in sizes.items()}
    return {name: -draw.exp() * 0.1 for name, draw in draws.items()}


def call(op: str, wanted: Call, case: Case, options: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    there = case.to(device)
    if not wanted.aligned:
        there = replace(there, q=unaligned(there.q), k=unaligned(there.k), v=unaligned(there.v))
    if op == CHUNK:
        options = options | {"chunk_size": wanted.chunk_size}
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    if wanted.pool != torch.float32:
        assert there.initial_state is not None
        pool = there.initial_state.clone()  # what it becomes is rounded to its dtype
        o = IN_PLACE[op](*there.qkv, there.g, there.beta, pool, **options)
        return o.cpu(), pool.cpu()
    o, state = END_TO_END_OPS[op](*there.qkv, **(there.options | options))
    assert state is not None
    return o.cpu(), state.cpu()


def cost_of_rounded_norms(case: Case, exact: tuple[Tensor, Tensor], options: dict[str, Any]) -> tuple[float, float]:
    """The error of handing normalised q and k on in their own dtype, as FLA does before it chunks; 0 in float32."""
    q, k = (reference.l2norm(x.double()).to(x.dtype) for x in (case.q, case.k))
    o, state = replace(case, q=q, k=k).exact(**(options | {"use_qk_l2norm_in_kernel": False}))
    return bounds.relative_error(o, exact[0]), bounds.relative_error(state, exact[1])


def check_call(device: torch.device, op: str, wanted: Call, tokens: int, algorithm: str | None = None) -> Outcome:
    """algorithm: that a prefill is made to take."""
    case, options = inputs(op, wanted, tokens)
    with prefill_algorithm(algorithm):
        o, state = call(op, wanted, case, options, device)
    exact = case.exact(**options)
    o_bound, state_bound = bounds_of(op, case, exact, **options)
    if op == CHUNK and wanted.normalise:
        o_rounding, state_rounding = cost_of_rounded_norms(case, exact, options)  # independent of the other errors
        o_bound, state_bound = math.hypot(o_bound, o_rounding), math.hypot(state_bound, state_rounding)
    parts = bounds.compare("o", o, exact[0], o_bound, head_dim=2)
    return judged(parts + bounds.compare("final_state", state, exact[1], state_bound, head_dim=1))


def stage_inputs(dtype: torch.dtype, tokens: int = 130) -> tuple[Case, dict[str, Tensor]]:
    """What each stage is fed, by the names of tests/golden."""
    case = make_case(tokens, 128, 128, dtype=dtype)
    tensors = {name: x for name, x in (asdict(case) | asdict(stages.stages_of(case))).items() if x is not None}
    return case, tensors


def exact_stage(op: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stage in float64 from the very tensors that the op is fed."""
    return stages.on_inputs(reference, op, {name: tensor.double() for name, tensor in tensors.items()})


def check_stage(device: torch.device, op: str, dtype: torch.dtype) -> Outcome:
    case, tensors = stage_inputs(dtype)
    in_f32 = bounds.chunk_f32(case.largest_g_cumsum())
    parts = []
    exact = exact_stage(op, tensors)
    for tensor, ours in stages.call(op, tensors, device).items():
        bound = max(in_f32, bounds.STAGE_OUTPUT.get(ours.dtype, 0))
        parts += bounds.compare(tensor, ours, exact[tensor], bound)
    return judged(parts)
