"""Tests that torch.func's transforms and forward-mode gradients give on mps what they give on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

# Where a tangent is known to be zero, PyTorch makes a tensor without memory for it.
FUNCTIONS: dict[str, Function] = {
    "a number": lambda x: x * 2,
    "two numbers": lambda x: 1 / (x + 3) - x**2,
    "a constant": lambda x: x * torch.ones_like(x) + torch.arange(3.0, device=x.device),
    "a product": lambda x: x @ x.T,
    "functions": lambda x: x.sin().exp().softmax(-1),
    "a condition": lambda x: torch.where(x > 0, x, x.square()),
    "views": lambda x: torch.cat([x[:, 1:].neg(), x.T.reshape(4, 3)[:, :2]], 1),
    "a fixed part": lambda x: torch.stack([x.detach(), x]).sum(0),
    "in place": lambda x: x.clone().mul_(3).add_(x),
    "a norm": lambda x: torch.nn.functional.layer_norm(x, (3,)),
}
TRANSFORMS: dict[str, Callable[[Function, Tensor], object]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.cos(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.cos(x)),
    "gradient": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jvp of a gradient": lambda f, x: torch.func.jvp(
        torch.func.grad(lambda x: f(x).square().sum()), (x,), (torch.cos(x),)
    ),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
}


def on(device: str, transform: str, function: str) -> list[Tensor]:
    x = torch.linspace(-1.5, 2, 12).view(4, 3).to(device)
    result = TRANSFORMS[transform](FUNCTIONS[function], x)
    return [each.cpu() for each in (result if isinstance(result, tuple) else (result,))]  # type: ignore[attr-defined]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_transform_gives_what_it_gives_on_the_cpu(transform: str, function: str) -> None:
    torch.testing.assert_close(on("mps", transform, function), on("cpu", transform, function))


def test_dual_levels() -> None:
    forward = torch.autograd.forward_ad
    x = torch.arange(3.0, device="mps")
    with forward.dual_level():
        primal, tangent = forward.unpack_dual(forward.make_dual(x, torch.ones_like(x)) * 2 + x)
    assert primal.tolist() == [0, 3, 6] and tangent.tolist() == [2, 2, 2]


def test_a_tensor_of_zeros_without_memory() -> None:
    zeros = torch._efficientzerotensor((2, 3), device="mps")
    assert zeros._is_zerotensor() and zeros.device.type == "mps" and zeros.dtype == torch.float32
    assert zeros.cpu().tolist() == [[0.0] * 3] * 2
    assert (zeros + torch.ones(3, device="mps")).tolist() == [[1.0] * 3] * 2
    assert zeros.clone().tolist() == zeros.to(torch.float16).tolist() == [[0.0] * 3] * 2
    with pytest.raises(TypeError, match="float64"):
        torch._efficientzerotensor((2,), dtype=torch.float64, device="mps")
