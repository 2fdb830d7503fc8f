"""What vLLM's plugin calls for a mixture of experts, compared with loops in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn.integrations.vllm import moe

H, WIDTH, TOPK = 24, 20, 2


def inputs(tokens: int, experts: int) -> list[Tensor]:
    x, w13, w2 = torch.randn(tokens, H), torch.randn(experts, 2 * WIDTH, H), torch.randn(experts, H, WIDTH)
    return [x, w13, w2, torch.rand(tokens, TOPK), torch.rand(tokens, experts).topk(TOPK).indices.int()]


@pytest.mark.parametrize("tokens", [1, 8, 100])
def test_equals_float64(tokens: int, device: torch.device) -> None:
    given = inputs(tokens, 16)
    x, w13, w2, weights, ids = (tensor.double() if tensor.is_floating_point() else tensor for tensor in given)
    exact = reference.moe_down(reference.moe_gate_up(x, w13, ids)[0], w2, weights, ids)
    out = moe.fused_experts(*(tensor.to(device) for tensor in given))
    assert_close("out", out, exact, 1e-6, head_dim=0)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routes_as_topk_does(renormalize: bool, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(5, 16).to(device)
    weights, ids = moe.topk_softmax(logits[:, :3], torch.zeros(5, 3, dtype=dtype), logits, logits, renormalize)
    expected = logits.cpu().double().softmax(-1).topk(3)
    assert ids.dtype == dtype and torch.equal(ids.cpu(), expected.indices.to(dtype))
    total = expected.values.sum(-1, keepdim=True) if renormalize else 1.0
    assert_close("weights", weights.cpu(), expected.values / total, 6e-7, head_dim=0)


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_the_host_reads_no_tensor(tokens: int) -> None:
    """A fake tensor raises where its content is asked for."""
    with FakeTensorMode() as mode:
        out = moe.fused_experts(*(mode.from_tensor(tensor) for tensor in inputs(tokens, 16)))
    assert out.shape == (tokens, H)
