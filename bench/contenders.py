"""Prepares torch_gdn and its peers for timing. Each gets the same case and must give the same answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_gdn
from bench import ggml
from torch_gdn_check.peers import Prepared, mlx_rule, prepared_function, transformers_rule
from torch_gdn_check.registry.cases import Case
from torch_gdn_check.steps import Skipped

Prepare = Callable[[Case, torch.device], Prepared]


def prefill_by(op: Callable[..., Any]) -> Prepare:
    def prepare(case: Case, device: torch.device) -> Prepared:
        on_device = case.to(device)
        return prepared_function(lambda: op(*on_device.qkv, **on_device.options))

    return prepare


def decode_by(op: Callable[..., Tensor]) -> Prepare:
    """Decodes as a server does: each sequence has its state in a slot of a pool, updated in place."""

    def prepare(case: Case, device: torch.device) -> Prepared:
        on_device = case.to(device)
        assert on_device.initial_state is not None
        first, pool = on_device.initial_state, on_device.initial_state.clone()
        gates = {"g": on_device.g, "beta": on_device.beta}

        def call() -> Tensor:
            return op(*on_device.qkv, **gates, state_pool=pool)

        def output() -> tuple[Tensor, Tensor]:
            pool.copy_(first)
            return call(), pool

        return Prepared(call, output)

    return prepare


torch_gdn_prefill = prefill_by(torch_gdn.chunk_gated_delta_rule)


def transformers(name: str, model: str = "qwen3_next") -> Prepare:
    return lambda case, device: transformers_rule(name, inputs_of(case.to(device)), model)


def mlx(case: Case, device: torch.device) -> Prepared:
    inputs = inputs_of(case)
    del inputs["output_final_state"]
    return mlx_rule(**inputs, device=device)


def inputs_of(case: Case) -> dict[str, Any]:
    """Returns inputs by torch_gdn's names, without cu_seqlens: the peers take sequences of one length."""
    inputs = dict(zip("qkv", case.qkv, strict=True)) | case.options
    del inputs["cu_seqlens"]
    return inputs


def ggml_attention(case: Case, device: torch.device) -> Prepared:
    if device.type != "cpu":
        raise Skipped("its Metal op is no function that can be called alone")
    if case.dtype != torch.float32 or case.q.size(-1) != case.v.size(-1):
        raise Skipped("ggml's op takes float32 and square states only")
    try:
        op = ggml.GatedDeltaNet(case, torch.get_num_threads())
    except ImportError as error:
        raise Skipped(str(error)) from error

    def output() -> tuple[Tensor, Tensor]:
        op.call()
        return op.output()

    return Prepared(op.call, output)


PREFILL: dict[str, Prepare] = {
    "torch_gdn": torch_gdn_prefill,
    "transformers": transformers("torch_chunk_gated_delta_rule"),
    "MLX": mlx,
    "ggml": ggml_attention,
}
DECODE: dict[str, Prepare] = {
    "torch_gdn": decode_by(torch.ops.gdn.fused_recurrent_gated_delta_rule_),
    "transformers": transformers("torch_recurrent_gated_delta_rule"),
    "MLX": mlx,
    "ggml": ggml_attention,
}
KDA_PREFILL: dict[str, Prepare] = {
    "torch_gdn": prefill_by(torch_gdn.chunk_kda),
    "transformers": transformers("chunk_kimi_delta_attention", "kimi_linear"),
}
KDA_DECODE: dict[str, Prepare] = {
    "torch_gdn": decode_by(torch_gdn.fused_recurrent_kda_),
    "transformers": transformers("recurrent_kimi_delta_attention", "kimi_linear"),
}
