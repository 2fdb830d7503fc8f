"""Compares with float64: PyTorch's own calls before anything of torch_gdn runs, every op at its points, a long prompt.

Apple's graphs compute other numbers on macOS 26 than on macOS 15 with the same PyTorch (actions/runner-images#14380,
pytorch/pytorch#181742). A wrong token of a model then need not be torch_gdn's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.registry import REGISTRY, Point, bounds
from torch_gdn_check.registry.bounds import Part, relative_error
from torch_gdn_check.registry.cases import END_TO_END_OPS, Case, make_case
from torch_gdn_check.registry.inputs import to_device
from torch_gdn_check.registry.on_the_cpu import on_the_cpu
from torch_gdn_check.steps import Outcome, judged, refuse_simulated

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


def check_point(device: torch.device, op: str, point: Point) -> Outcome:
    """Compares an op at a point of its entry, on inputs from a seed."""
    entry = REGISTRY[op]
    call = entry.call(point)
    on_device = to_device(call, device)
    result = entry.outputs(on_device, entry.run(on_device, point))
    return judged(entry.compared(point, call, result))


# A very long prompt. Before torch 2.15, a launch that the system ends raises no error.

TOKENS = 1 << 17
DECAY = -1.0  # the log decay per token; 128 tokens reduce the state to 1e-55
END = 64


def last_tokens(case: Case, count: int) -> Case:
    tail = {name: getattr(case, name)[:, -count:].contiguous() for name in ("q", "k", "v", "g", "beta")}
    return Case(**tail)


def check_long_prompt(device: torch.device, algorithm: str, tokens: int = TOKENS) -> Outcome:
    """Checks the last tokens of the prompt, which the state reaches only through all others."""
    refuse_simulated(device, "the simulated device would take hours, and has no watchdog")
    case = make_case(tokens, 128, 128, H=2, HV=4, dtype=torch.bfloat16, state=False)
    case.g = torch.full_like(case.g, DECAY)
    exact = last_tokens(case, END + 128).exact()[0][:, -END:]
    on_device = case.to(device)
    with prefill_algorithm(algorithm):
        o, _ = END_TO_END_OPS["chunk_gated_delta_rule"](*on_device.qkv, **on_device.options)
    return judged(bounds.compare("o", o[:, -END:].cpu(), exact, bounds.CHUNK_OUTPUT[torch.bfloat16]))
