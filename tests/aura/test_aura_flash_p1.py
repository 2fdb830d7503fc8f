from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn_check.registry.aura import Codec, make_cache
from torch_gdn_check.registry.inputs import to_device

NAMES = ("o_partials", "m_partials", "l_partials")


def make_call(
    D: int, L: int, ratio: int, with_means: bool = False, trellis: bool = False, **options: Any
) -> dict[str, Any]:
    cache = make_cache(Codec(D, 4, trellis=trellis), Codec(D, 3, 4, trellis), 2, 2, 170)
    q = torch.randn(2, 2 * ratio, L, D) * D**-0.5
    call = {"q_rot": torch_gdn.aura_rotate(q, cache.key.signs)} | cache.parts(False)
    if with_means:
        call["tile_scores"] = torch.randn(2, 2 * ratio, L, 2)
    return call | options


def both(device: torch.device, call: dict[str, Any]) -> list[tuple[str, Tensor, Tensor]]:
    """Returns the name, our result and the exact result of each output."""
    ours = launched(device, "aura_flash_p1", torch_gdn.aura_flash_p1, **to_device(call, device))
    expected = reference.aura_flash_p1(**(call | {"q_rot": call["q_rot"].double()}))
    return list(zip(NAMES, (x.cpu() for x in ours), expected, strict=True))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("with_means", [False, True])
@pytest.mark.parametrize(
    ("D", "L", "ratio", "trellis"),
    [(64, 1, 1, False), (80, 1, 3, True), (128, 5, 2, False), (80, 5, 2, False), (96, 12, 1, True), (512, 1, 2, True)],
)
def test_each_block_by_itself(
    device: torch.device, D: int, L: int, ratio: int, trellis: bool, with_means: bool
) -> None:
    for name, ours, exact in both(device, make_call(D, L, ratio, with_means, trellis, block_size=32)):
        assert ours.shape == exact.shape and ours.dtype == torch.float32 and ours.is_contiguous(), name
        assert_close(name, ours.nan_to_num(neginf=0), exact.nan_to_num(neginf=0), 1e-6, head_dim=None)


@pytest.mark.parametrize("L", [1, 5, 9])  # with L = 5, only some rows of a threadgroup see a block
def test_a_block_without_a_visible_key(device: torch.device, L: int) -> None:
    call = make_call(64, L, 2, True, block_size=16, window=20, starts=torch.tensor([0, 160]))
    parts = {name: (ours, exact) for name, ours, exact in both(device, call)}
    unseen = parts["l_partials"][1] == 0
    assert unseen.any() and not unseen.all()
    assert torch.equal(parts["m_partials"][0] == -torch.inf, unseen)
    for name in ("o_partials", "l_partials"):
        assert (parts[name][0][unseen] == 0).all()
        assert_close(name, *parts[name], 1e-6, head_dim=None)


def test_query_rows_past_30_bits_are_refused_on_the_device(device: torch.device) -> None:
    call = to_device({name: x[:0] if x.dim() > 1 else x for name, x in make_call(64, 1, 2).items()}, device)
    call["q_rot"] = torch.empty(0, 4, 2**30, 64, device=device)
    if device.type == "cpu":
        assert torch_gdn.aura_flash_p1(**call)[1].shape[:3] == (0, 4, 2**30)
        return
    with pytest.raises(
        ValueError, match=r"q_rot: expected fewer than 2\^30 query rows of a KV head .*, got 2147483648"
    ):
        torch_gdn.aura_flash_p1(**call)
