"""Says why an op would not take a call. The op's own checks run on meta tensors, and their answers are kept.

The tensors have one token, because no op limits the number of tokens. One answer therefore serves prompts of every
length, and a compiled graph needs no guard on it. What several tensors share is given once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Sizes = tuple[int, ...]


def kept(refusal: Callable[..., str]) -> Callable[..., str]:
    """Keeps the answer for the same arguments. torch.compile takes the answer as a constant."""

    @functools.lru_cache(maxsize=256)
    def cached(*call: Any) -> str:
        with _disable_current_modes():  # a mode that counts ops must not see the question
            return refusal(*call)

    @torch.compiler.assume_constant_result
    def ask(*call: Any) -> str:
        return cached(*call)

    return ask


def refused(op: str, **call: Any) -> str:
    """Returns the op's error about the call without the op's name, or ""."""
    try:
        getattr(torch.ops.gdn, op)(**call)
    except (TypeError, ValueError) as error:
        return str(error).removeprefix(f"{op}: ")
    return ""


def meta(sizes: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


@kept
def rule_refusal(
    op: str,
    heads: tuple[Sizes, Sizes, Sizes],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype, torch.dtype],
    state_dtype: torch.dtype | None,
    packed_batch: int | None,
    chunk_size: int | None,
    decay_channels: Sizes | None = None,
) -> str:
    """Returns the refusal. `heads` are (heads, size) of query, key and value; `dtypes` are theirs, g's and beta's.

    `decay_channels`: [K] where g has a decay for each channel of the key.
    """
    batch = 1 if packed_batch is None else packed_batch
    q, k, v = (meta((batch, 1, *sizes), dtype) for sizes, dtype in zip(heads, dtypes[:3], strict=True))
    g = meta((batch, 1, *heads[2][:1], *(decay_channels or ())), dtypes[3])
    beta = meta((batch, 1, *heads[2][:1]), dtypes[4])
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "g" if decay_channels is None else "gk": g, "beta": beta}
    if op == "chunk_gated_delta_rule":
        call["chunk_size"] = chunk_size
    if packed_batch is not None:
        call["cu_seqlens"] = meta((2,), torch.int64)
    if state_dtype is not None:
        call["initial_state"] = meta((batch, *heads[2][:1], *heads[0][1:], *heads[2][1:]), state_dtype)
    return refused(op, **call)


@kept
def convolution_refusal(
    op: str,
    x: tuple[Sizes, torch.dtype],
    weight: tuple[Sizes, torch.dtype],
    bias: tuple[Sizes, torch.dtype] | None,
    state_dtype: torch.dtype | None,
    seq_idx_dtype: torch.dtype | None,
    activation: str | None,
) -> str:
    """Returns the refusal. `x` has the sizes between batch and tokens, which are [D], and the dtype."""
    channels, dtype = x
    call: dict[str, Any] = {"x": meta((1, 1, *channels), dtype), "weight": meta(*weight), "activation": activation}
    if bias is not None:
        call["bias"] = meta(*bias)
    if state_dtype is not None:
        name = "initial_state" if op == "causal_conv1d" else "state_pool"
        call[name] = meta((1, *weight[0]), state_dtype)
    if seq_idx_dtype is not None:
        call["seq_idx"] = meta((1, 1), seq_idx_dtype)
    return refused(op, **call)


@kept
def norm_refusal(
    row: Sizes,
    dtypes: tuple[torch.dtype, torch.dtype],
    weight: tuple[Sizes, torch.dtype],
    activation: str,
) -> str:
    """Returns the refusal. `dtypes` are those of the input and of the gate."""
    if row[-1] > 1024:  # kRmsNormGatedLargestRow, the limit on mps
        return f"x: expected a last dimension from 1 to 1024, got {row[-1]}"
    x, gate = (meta(row, dtype) for dtype in dtypes)
    return refused("rms_norm_gated", x=x, g=gate, weight=meta(*weight), activation=activation)


Weight = tuple[Sizes, Sizes, torch.dtype]  # sizes, strides and dtype


@kept
def experts_refusal(
    x: tuple[Sizes, torch.dtype],
    choice: tuple[Sizes, torch.dtype, torch.dtype],
    router: tuple[Sizes, torch.dtype, int, int] | None,
    gate_up: Weight,
    down: Weight,
    *shared: Weight,
) -> str:
    """Returns the refusal. `x` is [D], and `choice` is [k] with the dtypes of ids and weights. `shared` has gate, up,
    down, and `router` [E] and groups.
    """
    (row, dtype), (chosen, ids_dtype, weights_dtype) = x, choice
    w_gate_up, w_down, *shared_weights = (
        torch.empty_strided(sizes, strides, dtype=weight_dtype, device="meta")
        for sizes, strides, weight_dtype in (gate_up, down, *shared)
    )
    call: dict[str, Any] = {"topk_ids": meta((1, *chosen), ids_dtype)}
    down_call = {"hidden": meta((1, *chosen, *down[0][2:]), dtype), "topk_weights": meta((1, *chosen), weights_dtype)}
    if shared_weights:
        down_call |= {"shared_hidden": meta((1, *shared[2][0][1:]), dtype), "shared_down_proj": shared_weights[2]}
    given = dict(zip(("shared_gate_proj", "shared_up_proj"), shared_weights, strict=False))
    refusal = refused("moe_gate_up", x=meta((1, *row), dtype), w_gate_up=w_gate_up, **call, **given)
    refusal = refusal or refused("moe_down", w_down=w_down, **call, **down_call)
    if refusal or router is None:
        return refusal
    row, dtype, n_group, topk_group = router
    groups = {"n_group": n_group, "topk_group": topk_group}
    return refused("moe_router", router_logits=meta((1, *row), dtype), top_k=chosen[0], **groups)
