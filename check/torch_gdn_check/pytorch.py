"""Compares PyTorch's own product and attention on this device with float64, before anything of torch_gdn runs.

Apple's graphs compute other numbers on macOS 26 than on macOS 15 with the same PyTorch (actions/runner-images#14380,
pytorch/pytorch#181742). A wrong token of a model then need not be torch_gdn's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from torch_gdn_check.registry.bounds import Part, relative_error
from torch_gdn_check.registry.on_the_cpu import on_the_cpu
from torch_gdn_check.steps import Outcome, judged

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # TF32 has 3e-4, and rounding to bfloat16 1.7e-3


def product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "product": (product, ((512, 1024), (1024, 256))),
    "attention": (attention, ((1, 8, 200, 128),) * 3),
}


def check_call(device: torch.device, name: str, dtype: torch.dtype) -> Outcome:
    call, shapes = CALLS[name]
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=random).to(dtype) for shape in shapes]
    with on_the_cpu():
        exact = call(*(x.double() for x in inputs))
    result = call(*(x.to(device) for x in inputs)).cpu().double()
    outcome = judged([Part(name, "", relative_error(result, exact), BOUNDS[dtype])])
    if not outcome.problem:
        return outcome
    suspect = f"PyTorch's own {name} in {str(dtype).removeprefix('torch.')} is off on this device"
    return Outcome(outcome.figures, f"{suspect}: {outcome.problem}. Wrong numbers of a model need not be torch_gdn's.")
