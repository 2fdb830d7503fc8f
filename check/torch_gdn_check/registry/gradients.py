"""Entries of the ops that compute gradients, and exact gradients: autograd through the recurrence, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from torch_gdn.reference.common import chunks
from torch_gdn_check.registry import bounds, invalid
from torch_gdn_check.registry.gdn import (
    FLOAT64_GATES,
    SMALL,
    RulePoint,
    draw_rule,
    draw_stage,
    outside,
    stage_entry,
)
from torch_gdn_check.registry.inputs import Call
from torch_gdn_check.registry.models import BF16, DTYPES, F16, F32, MODEL_SIZES, OTHER_SIZES
from torch_gdn_check.registry.registry import Invalid, Named, OpEntry, register

NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def draw_backward(point: RulePoint, per_channel: bool) -> Call:
    call = draw_rule(point, chunked=True, in_place=False, per_channel=per_channel)
    call = {name: x for name, x in call.items() if name not in ("chunk_size", "chunk_indices", "output_final_state")}
    state = call.pop("initial_state", None)
    call["do"] = torch.randn(call["v"].shape).to(point.dtype)
    if state is not None:
        call |= {"dht": torch.randn(state.shape).to(state.dtype), "initial_state": state}
    return call


def backward_bounds(point: RulePoint, call: Call, exact: Named) -> dict[str, float]:
    """Everything is computed in float32, and only dq, dk and dv may be rounded."""
    g = call["g"].double()
    sums = [
        g[b, first:last].cumsum(0)
        for _, b, first, last, _ in chunks(g.shape[0], g.shape[1], 64, call.get("cu_seqlens"))
    ]
    in_f32 = bounds.chunk_f32(max(each.abs().max().item() for each in sums))
    rounded = max(in_f32, bounds.ROUNDING.get(point.dtype, 0))
    return {name: rounded if name in ("dq", "dk", "dv") else in_f32 for name in exact}


def wrong_backward(entry: OpEntry[RulePoint]) -> Iterator[Invalid]:
    yield from [*invalid.sizes("q", "v"), *invalid.packing(), *invalid.states("initial_state")]


def backward_points() -> Iterator[RulePoint]:
    for dtype, (K, V) in itertools.product(DTYPES, ((128, 128), (33, 65))):
        yield RulePoint(dtype, K=K, V=V, state_v_first=K == 33, normalise=dtype == BF16)
    yield RulePoint(F32, K=64, V=64, tokens=84, boundaries=(0, 17, 17, 20, 84), H=2, HV=4)
    yield RulePoint(F32, K=64, V=64, repeated_keys=True)
    yield RulePoint(BF16, K=256, V=96, aligned=False, tokens=40)
    yield RulePoint(F16, K=60, V=256, from_state=False, tokens=40)


def compiled_backward() -> Iterator[RulePoint]:
    for dtype, (K, V) in itertools.product(DTYPES, (*MODEL_SIZES, *OTHER_SIZES)):
        yield RulePoint(dtype, K=K, V=V, tokens=2)
    yield from (RulePoint(BF16, K=K, V=V, tokens=2, H=80, HV=80) for K, V in MODEL_SIZES)  # a head for each core


for name in ("chunk_gated_delta_rule_bwd", "chunk_kda_bwd"):
    register(
        OpEntry(
            name,
            draw=partial(draw_backward, per_channel=name == "chunk_kda_bwd"),
            small=SMALL,
            points=list(backward_points()),
            compiled=compiled_backward,
            bound=backward_bounds,
            heads={"dinitial_state": 1},
            launches=None,
            scratch=True,
            takes=FLOAT64_GATES | {"do": "float", "dht": "float64", "initial_state": "float64"},
            invalid=wrong_backward,
            hostile=outside(),
        )
    )


# ---- stages ----------------------------------------------------------------------------------------------------------


def draw_gradient_stage(point: RulePoint, inputs: str) -> Call:
    return draw_stage(replace(point, dtype=F32, chunk_size=16), inputs, sized=False)


def wrong_stage(entry: OpEntry[RulePoint], sizes: tuple[str, str]) -> Iterator[Invalid]:
    yield from [*invalid.sizes(*sizes), *invalid.packing(has_indices=True)]
    if "chunk_size" in entry.arguments:
        yield Invalid("chunk_size", ValueError, "64", invalid.put("chunk_size", 64))


def gradient_stage_points() -> Iterator[RulePoint]:
    yield RulePoint(F32, H=2, HV=4)
    yield RulePoint(F32, K=33, V=65, tokens=84, boundaries=(0, 17, 17, 20, 84), H=2, HV=4)
    yield RulePoint(F32, K=256, V=96, aligned=False, tokens=40, repeated_keys=True)


TAKES = {
    "chunk_bwd_dv_local": {"do": "3-"},
    "chunk_gated_delta_rule_bwd_dhu": {"h0": "float64", "dht": "float64"},
    "prepare_wy_repr_bwd": {"k": "2-"},
}


def gradient_stage(name: str, inputs: str, result: str = "", sizes: tuple[str, str] = ("k", "v")) -> OpEntry[RulePoint]:
    return stage_entry(
        name,
        inputs,
        result,
        draw=partial(draw_gradient_stage, inputs=inputs),
        points=list(gradient_stage_points()),
        compiled=lambda: (RulePoint(F32, K=K, V=V, tokens=2) for K, V in (*MODEL_SIZES, *OTHER_SIZES)),
        heads={"dh0": 1},
        scratch=True,
        takes=TAKES.get(name, {}),
        invalid=partial(wrong_stage, sizes=sizes),
    )


register(
    gradient_stage("chunk_bwd_dv_local", "q k do:d.v g:g_cumsum", "dv", sizes=("q", "do")),
    gradient_stage(
        "chunk_gated_delta_rule_bwd_dhu",
        "q k w do:d.v dv:d.v g:g_cumsum h0:initial_state dht:d.initial_state",
        sizes=("q", "do"),
    ),
    gradient_stage("prepare_wy_repr_bwd", "k v beta dw:d.w du:d.v g:g_cumsum"),
    gradient_stage("chunk_bwd_dqkwg", "q k v:v_new do:d.v h dh:d.h dv:d.v g:g_cumsum", sizes=("q", "v")),
)
