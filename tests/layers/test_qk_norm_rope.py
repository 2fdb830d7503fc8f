from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import launched
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import qk_norm_rope, reference
from torch_gdn_check.registry.bounds import ROUNDING

Heads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(D: int, P: int, HQ: int = 4, HK: int = 2, T: int = 5, dtype: torch.dtype = torch.float32) -> Heads:
    """Returns q, k, cos, sin and the two weights, for two sequences."""
    angles = 10 * torch.randn(2, T, P)
    heads = torch.randn(2, T, HQ, D), torch.randn(2, T, HK, D)
    result = *heads, angles.cos(), angles.sin(), torch.rand(D), torch.rand(D)
    return tuple(x.to(dtype) for x in result)  # type: ignore[return-value]


def compute(device: torch.device, heads: Any, **options: Any) -> tuple[Tensor, Tensor]:
    on_device = [None if x is None else x.to(device) for x in heads]
    q, k = launched(device, "qk_norm_rope", qk_norm_rope, *on_device, **options)
    return q.cpu(), k.cpu()


def exact(heads: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return reference.qk_norm_rope(*(None if x is None else x.double() for x in heads), **options)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_equals_the_reference(device: torch.device, dtype: torch.dtype, heads_first: bool, zero_centered: bool) -> None:
    """Heads are Qwen3.5's, rotated whole, longer than the lanes of one pass, and odd."""
    options = {"eps": 1e-5, "heads_first": heads_first, "zero_centered": zero_centered}
    for D, P in ((256, 32), (64, 32), (512, 128), (33, 7), (20, 6)):
        heads = draw(D, P, dtype=dtype)
        result, expected = compute(device, heads, **options), exact(heads, **options)
        for name, x, right in zip("qk", result, expected, strict=True):
            assert x.dtype == dtype and x.is_contiguous()
            assert_close(f"{name} of D {D}", x, right, ROUNDING[dtype], head_dim=1 if heads_first else 2)


def test_without_a_norm(device: torch.device) -> None:
    """The elements that are not rotated keep their bits."""
    q, k, cos, sin, *_ = draw(64, 8, dtype=torch.bfloat16)
    heads = q, k, cos.float() * 0.7, sin.float() / 3, None, None
    result, expected = compute(device, heads), exact(heads)
    for name, x, right, before in zip("qk", result, expected, (q, k), strict=True):
        assert_close(name, x, right, ROUNDING[torch.bfloat16])
        assert_same_bits(name, x[..., 16:], before[..., 16:])


def test_is_what_transformers_computes(device: torch.device) -> None:
    """transformers rotates partially, has each angle twice in its tables, and multiplies by 1 + weight in the norm."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, cos, sin, q_weight, k_weight = draw(64, 8)
    norms = [qwen.Qwen3NextRMSNorm(64) for _ in range(2)]
    for norm, weight in zip(norms, (q_weight, k_weight), strict=True):
        norm.weight.data = weight
    tables = [torch.cat([x, x], -1) for x in (cos, sin)]
    with torch.no_grad():
        normed = [norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True)]
        expected = qwen.apply_rotary_pos_emb(*normed, *tables)
    halves = [table[..., :8] for table in tables]
    result = compute(device, (q, k, *halves, q_weight, k_weight), zero_centered=True, heads_first=True)
    for name, x, right in zip("qk", result, expected, strict=True):
        assert_close(name, x, right.double(), 3e-7, head_dim=1)


@pytest.mark.parametrize("size", [64, 63])
def test_parts_of_a_projection_and_repeated_angles(device: torch.device, size: int) -> None:
    """q follows its gate, k is part of a fused projection, and both sequences share the angles of one."""
    q, k, cos, sin, q_weight, k_weight = (x.to(device) for x in draw(128, 16, HK=4))
    parts = q[..., 128 - size :], k[..., :size]
    angles = [x[:1].expand(2, -1, -1) for x in (cos, sin)]
    weights = q_weight[:size], k_weight[128 - size :]
    result = launched(device, "qk_norm_rope", qk_norm_rope, *parts, *angles, *weights)
    copies = qk_norm_rope(*(x.contiguous() for x in (*parts, *angles)), *weights)
    for x, right in zip(result, copies, strict=True):
        assert_close("parts", x.cpu(), right.cpu().double(), 3e-7)


def test_no_keys(device: torch.device) -> None:
    heads = draw(64, 16)
    alone = compute(device, (heads[0], heads[1][:, :, :0], *heads[2:]))
    assert alone[1].shape == (2, 5, 0, 64)
    assert_same_bits("q", alone[0], compute(device, heads)[0])
