"""Mixture of experts without a kernel, against the same written as a loop over tokens and their experts, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.errors import assert_close
from torch_gdn.integrations.vllm import moe

H, WIDTH, TOPK = 24, 20, 2


def inputs(tokens: int, experts: int, ids: Tensor | None = None) -> list[Tensor]:
    x, w13, w2 = torch.randn(tokens, H), torch.randn(experts, 2 * WIDTH, H), torch.randn(experts, H, WIDTH)
    weights = torch.rand(tokens, TOPK)
    if ids is None:
        ids = torch.rand(tokens, experts).topk(TOPK).indices
    return [x, w13, w2, weights, ids.int()]


def by_loop(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    x, w13, w2, weights = (tensor.double() for tensor in (x, w13, w2, weights))
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (w13[expert] @ x[token]).chunk(2)
            out[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("experts", [3, 16])
@pytest.mark.parametrize("tokens", [1, 3, 8, 100])
def test_equals_a_loop(tokens: int, experts: int, device: torch.device) -> None:
    given = inputs(tokens, experts)
    out = moe.fused_experts(*(tensor.to(device) for tensor in given))
    assert_close("out", out, by_loop(*given), 1e-5, head_dim=0)


@pytest.mark.parametrize("least", [0, 14], ids=["the first experts", "the last experts"])
def test_experts_without_tokens(least: int, device: torch.device) -> None:
    """All tokens go to the same two of 16 experts, which take many blocks each."""
    given = inputs(90, 16, torch.tensor([least, least + 1]).expand(90, 2))
    out = moe.fused_experts(*(tensor.to(device) for tensor in given))
    assert_close("out", out, by_loop(*given), 1e-5, head_dim=0)


@pytest.mark.parametrize("tokens", [4, 50])
def test_weights_gathered_in_parts(tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "GATHERED", 7 * 3 * WIDTH * H)
    given = inputs(tokens, 16)
    out = moe.fused_experts(*(tensor.to(device) for tensor in given))
    assert_close("out", out, by_loop(*given), 1e-5, head_dim=0)


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_the_host_reads_no_tensor(tokens: int) -> None:
    """A fake tensor raises where its content is asked for."""
    with FakeTensorMode() as mode:
        out = moe.fused_experts(*(mode.from_tensor(tensor) for tensor in inputs(tokens, 16)))
    assert out.shape == (tokens, H)
