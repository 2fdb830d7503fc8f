"""Times experts and weights of 4 bits next to the kernels that PyTorch itself has for mps."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_gdn.quantized import pack
from torch_gdn_check.peers import Prepared
from torch_gdn_check.registry.inputs import doubled
from torch_gdn_check.registry.on_the_cpu import on_the_cpu
from torch_gdn_check.steps import Outcome, Skipped
from torch_gdn_check.timing import compared, refuse_simulated

GROUP, TILES = 64, 2  # columns per group; tiles of PyTorch's packing


def need(op: str, since: str, device: torch.device) -> None:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", device.type.upper()):
        raise Skipped(f"torch {torch.__version__} has no aten::{op} for {device.type}; it has one since {since}")


def one_output(call: Any) -> Prepared:
    return Prepared(call, lambda: (call(), torch.empty(0)))


def check_experts(device: torch.device, tokens: int, sizes: tuple[int, int, int] = (64, 2048, 512)) -> Outcome:
    """`sizes` has the number of experts, of which a token takes 8, and the sizes of x and of a hidden vector."""
    refuse_simulated(device)
    need("_grouped_mm", "2.15", device)
    E, D, size = sizes
    random = torch.Generator().manual_seed(0)
    call = {
        "x": torch.randn(tokens, D, generator=random).bfloat16(),
        "gate_up": (torch.randn(E, 2 * size, D, generator=random) * D**-0.5).bfloat16(),
        "down": (torch.randn(E, D, size, generator=random) * size**-0.5).bfloat16(),
        "weights": torch.rand(tokens, 8, generator=random),
        "ids": torch.rand(tokens, E, generator=random).topk(8).indices.int(),
    }
    with on_the_cpu():
        exact = one_by_one(**{name: doubled(x) for name, x in call.items()})
    on_device = {name: x.to(device) for name, x in call.items()}
    result: dict[str, Prepared | str] = {
        "torch_gdn": one_output(partial(ours, **on_device)),
        "pytorch": one_output(partial(grouped, **on_device)),
    }
    return compared(result, exact, device, repeats=7, calls=8, tokens=tokens)


def ours(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    hidden, _ = torch.ops.gdn.moe_gate_up(x, gate_up, ids)
    y: Tensor = torch.ops.gdn.moe_down(hidden, down, weights, ids)
    return y


def grouped(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Sorts the pairs of tokens and experts, so that an expert's rows are adjacent. Nothing waits for the host."""
    experts = torch.arange(len(gate_up), device=ids.device)
    pairs = ids.flatten()
    order = pairs.argsort()
    tokens, ends = order // ids.shape[1], (pairs[:, None] == experts).sum(0).cumsum(0).int()
    gate, up = torch._grouped_mm(x[tokens], gate_up.mT, offs=ends).chunk(2, -1)
    y = torch._grouped_mm(silu(gate) * up, down.mT, offs=ends) * weights.flatten()[order, None]
    return torch.zeros(x.shape, device=x.device).index_add_(0, tokens, y.float()).to(x.dtype)


def one_by_one(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for t, (own, chosen) in enumerate(zip(weights, ids.tolist(), strict=True)):
        for weight, expert in zip(own, chosen, strict=True):
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            y[t] += weight * (down[expert] @ (silu(gate) * up))
    return y


def check_packed(device: torch.device, rows: int, size: int = 4096) -> Outcome:
    """Multiplies by a square matrix of 4 bits. Biases are -8 scales, so that both forms have the same numbers."""
    refuse_simulated(device)
    for op in ("_weight_int4pack_mm", "_convert_weight_to_int4pack"):
        need(op, "2.5", device)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, size, generator=random).bfloat16()
    codes = torch.randint(16, (size, size), generator=random, dtype=torch.int32)
    scales = (torch.rand(size, size // GROUP, generator=random) * size**-0.5).bfloat16()
    with on_the_cpu():
        numbers = (codes - 8) * scales.double().repeat_interleave(GROUP, 1)
        exact = x.double() @ numbers.mT
    bytes_of_codes = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    words = torch._convert_weight_to_int4pack(bytes_of_codes.to(device), TILES)
    pairs = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()
    packed = [each.to(device) for each in (x, pack(codes, 4), scales, -8 * scales)]
    theirs = partial(torch._weight_int4pack_mm, packed[0], words, GROUP, pairs.to(device))
    result: dict[str, Prepared | str] = {
        "torch_gdn": one_output(partial(torch.ops.gdn.quantized_linear, *packed)),
        "pytorch": one_output(theirs),
    }
    return compared(result, exact, device, repeats=7, calls=24, rows=rows)
