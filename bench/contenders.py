"""Who is timed: torch_gdn and its peers, each given the same case and brought to the same answer."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import torch_gdn
from bench import ggml
from bench.timing import Call
from torch_gdn.testing.cases import Case


class Unavailable(Exception):
    """Why a contender does not take part."""


class Prepared(NamedTuple):
    call: Call
    output: Callable[[], tuple[Tensor, Tensor]]  # o and the final state, on the CPU; calls once where it has to


Prepare = Callable[[Case, torch.device], Prepared]


def of_function(function: Callable[[], tuple[Tensor, Tensor]]) -> Prepared:
    return Prepared(function, function)


def prefill_by(op: Callable[..., Any]) -> Prepare:
    def prepare(case: Case, device: torch.device) -> Prepared:
        there = case.to(device)
        return of_function(lambda: op(*there.qkv, **there.options))

    return prepare


def decode_by(op: Callable[..., Tensor]) -> Prepare:
    """As a server decodes: the state of each sequence in its slot of a pool, updated in place."""

    def prepare(case: Case, device: torch.device) -> Prepared:
        there = case.to(device)
        assert there.initial_state is not None
        first, pool = there.initial_state, there.initial_state.clone()
        gates = {"g": there.g, "beta": there.beta}

        def call() -> Tensor:
            return op(*there.qkv, **gates, state_pool=pool)

        def output() -> tuple[Tensor, Tensor]:
            pool.copy_(first)
            return call(), pool

        return Prepared(call, output)

    return prepare


torch_gdn_prefill = prefill_by(torch_gdn.chunk_gated_delta_rule)


def transformers_function(name: str, model: str = "qwen3_next") -> Callable[..., Any]:
    """The PyTorch loop, under the decorator that would prefer FLA's kernels."""
    try:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ImportError as error:
        raise Unavailable(f"{error}; pip install 'transformers>=5.23,<5.24'") from error
    return inspect.unwrap(getattr(module, name))


def transformers(name: str, model: str = "qwen3_next") -> Prepare:
    def prepare(case: Case, device: torch.device) -> Prepared:
        function, there = transformers_function(name, model), case.to(device)
        options = {key: x for key, x in there.options.items() if key != "cu_seqlens"}
        names = ("query", "key", "value")
        return of_function(lambda: function(**dict(zip(names, there.qkv, strict=True)), **options))

    return prepare


def mlx(case: Case, device: torch.device) -> Prepared:
    """On the GPU of a Mac, on the CPU elsewhere: MLX has one device for each."""
    if (device.type == "mps") != (sys.platform == "darwin"):
        raise Unavailable(f"MLX would not run on {device.type} here")
    try:
        import mlx.core as mx
    except ImportError as error:
        raise Unavailable(f"{error}; pip install mlx") from error
    if not hasattr(mx.fast, "gated_delta_update"):
        raise Unavailable("this MLX has no mx.fast.gated_delta_update; 0.32.4 has")
    dtypes = {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}
    q, k, v = (mx.array(x.float().numpy()).astype(dtypes[case.dtype]) for x in (case.q, case.k, case.v))
    q = q * case.q.size(-1) ** -0.5
    decay, beta = (mx.array(x.numpy()).astype(dtypes[case.dtype]) for x in (case.g.exp(), case.beta))
    assert case.initial_state is not None
    state = mx.array(case.initial_state.transpose(-1, -2).contiguous().numpy())
    mx.eval(q, k, v, decay, beta, state)

    def call() -> Any:
        results = mx.fast.gated_delta_update(q, k, v, decay, beta, state)
        mx.eval(*results)
        return results

    def output() -> tuple[Tensor, Tensor]:
        o, after = (torch.from_numpy(np.array(x.astype(mx.float32))) for x in call())
        return o, after.transpose(-1, -2)

    return Prepared(call, output)


def of_ggml(case: Case, device: torch.device) -> Prepared:
    if device.type != "cpu":
        raise Unavailable("its Metal op is no function that can be called alone")
    if case.dtype != torch.float32 or case.q.size(-1) != case.v.size(-1):
        raise Unavailable("ggml's op takes float32 and square states only")
    try:
        op = ggml.GatedDeltaNet(case, torch.get_num_threads())
    except ImportError as error:
        raise Unavailable(str(error)) from error

    def output() -> tuple[Tensor, Tensor]:
        op.call()
        return op.output()

    return Prepared(op.call, output)


def fla(name: str) -> Prepare:
    def prepare(case: Case, device: torch.device) -> Prepared:
        try:
            gated_delta_rule = importlib.import_module("fla.ops.gated_delta_rule")
        except ImportError as error:
            raise Unavailable(f"{error}; FLA needs Triton") from error
        if device.type == "cpu":
            raise Unavailable("FLA's kernels need a GPU that Triton knows")
        there = case.to(device)
        return of_function(lambda: getattr(gated_delta_rule, name)(*there.qkv, **there.options))

    return prepare


PREFILL: dict[str, Prepare] = {
    "torch_gdn": torch_gdn_prefill,
    "transformers": transformers("torch_chunk_gated_delta_rule"),
    "MLX": mlx,
    "ggml": of_ggml,
    "FLA": fla("chunk_gated_delta_rule"),
}
DECODE: dict[str, Prepare] = {
    "torch_gdn": decode_by(torch.ops.gdn.fused_recurrent_gated_delta_rule_),
    "transformers": transformers("torch_recurrent_gated_delta_rule"),
    "MLX": mlx,
    "ggml": of_ggml,
    "FLA": fla("fused_recurrent_gated_delta_rule"),
}
KDA_PREFILL: dict[str, Prepare] = {
    "torch_gdn": prefill_by(torch_gdn.chunk_kda),
    "transformers": transformers("chunk_kimi_delta_attention", "kimi_linear"),
}
KDA_DECODE: dict[str, Prepare] = {
    "torch_gdn": decode_by(torch_gdn.fused_recurrent_kda_),
    "transformers": transformers("recurrent_kimi_delta_attention", "kimi_linear"),
}
