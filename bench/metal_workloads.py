"""Defines workloads for the simulated device, and the bytes that each must move: all inputs and outputs once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import torch_gdn
from bench.modules import MODULES, module
from bench.shapes import Layer
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.registry.inputs import bytes_of

DEVICE = torch.device("mps")


class Shape(NamedTuple):
    layer: Layer
    tokens: int
    batch: int
    dtype: torch.dtype
    algorithm: str | None = None  # a prefill's; None chooses it by the table


class Workload(NamedTuple):
    call: Callable[[], object]
    compulsory_bytes: int
    tokens: int  # per sequence


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size).to(DEVICE, dtype)


def rule_inputs(shape: Shape, state_v_first: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns q, k, v, raw gates as a layer has them, and the options with their state."""
    (_, H, HV, K, V), T, B, dtype, _ = shape
    heads = [(H, K), (H, K), (HV, V)]
    qkv = [randn(B, T, *size, dtype=dtype) for size in heads]
    a, b = randn(B, T, HV, dtype=dtype), randn(B, T, HV, dtype=dtype)
    state = randn(B, HV, *((V, K) if state_v_first else (K, V)))
    return [*qkv, a, b], {"state_pool": state, "A_log": randn(HV), "dt_bias": randn(HV)}


FUSED = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def rule_workload(op: Callable[..., object], shape: Shape, state_v_first: bool, algorithm: str | None) -> Workload:
    inputs, tensors = rule_inputs(shape, state_v_first)
    return workload(partial(op, state_v_first=state_v_first), shape._replace(algorithm=algorithm), inputs, tensors)


def workload(op: Callable[..., object], shape: Shape, inputs: list[Tensor], tensors: dict[str, Tensor]) -> Workload:
    moved = bytes_of(*inputs, *tensors.values()) + bytes_of(inputs[2]) + bytes_of(tensors["state_pool"])

    def call() -> object:
        forced = shape.algorithm
        context: AbstractContextManager[None] = prefill_algorithm(forced) if forced else nullcontext()
        with context:
            return op(*inputs, **tensors, **FUSED)

    return Workload(call, moved, shape.tokens)


def decode(shape: Shape, state_v_first: bool = False) -> Workload:
    """Decodes one token of each sequence, with its state in a slot: gates, norm of q and k, and the rule."""
    return rule_workload(
        torch.ops.gdn.fused_recurrent_gated_delta_rule_, shape._replace(tokens=1, algorithm=None), state_v_first, None
    )


def decode_v_first(shape: Shape) -> Workload:
    return decode(shape, state_v_first=True)


def prefill(shape: Shape) -> Workload:
    return rule_workload(torch.ops.gdn.chunk_gated_delta_rule_, shape, False, shape.algorithm)


def kda_prefill(shape: Shape) -> Workload:
    """Runs a prefill with raw decays for each key channel. Everything else is as for the delta rule."""
    inputs, tensors = rule_inputs(shape)
    HV, K = shape.layer.HV, shape.layer.K
    inputs[3] = randn(shape.batch, shape.tokens, HV, K, dtype=shape.dtype)
    tensors["dt_bias"] = randn(HV * K)
    return workload(torch_gdn.chunk_kda_, shape, inputs, tensors)


def module_workload(name: str) -> Callable[[Shape], Workload]:
    def make(shape: Shape) -> Workload:
        made = module(name, shape.layer, shape.tokens, shape.dtype, DEVICE)
        return Workload(made.call, made.bytes, shape.tokens)

    return make


def conv_update(shape: Shape) -> Workload:
    """Runs the short convolution of one token of each sequence."""
    channels, B = shape.layer.channels, shape.batch
    x, weight = randn(B, channels, dtype=shape.dtype), randn(channels, 4, dtype=shape.dtype)
    pool = randn(B, channels, 3, dtype=shape.dtype)
    moved = 2 * bytes_of(x) + bytes_of(weight) + 2 * bytes_of(pool)
    return Workload(lambda: torch_gdn.causal_conv1d_update(x, pool, weight=weight, activation="silu"), moved, 1)


WORKLOADS: Mapping[str, Callable[[Shape], Workload]] = {
    "decode": decode,
    "decode-v-first": decode_v_first,
    "prefill": prefill,
    "kda-prefill": kda_prefill,
    "conv-update": conv_update,
    **{name: module_workload(name) for name in MODULES},
}
