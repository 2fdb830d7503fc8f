"""The means of tiles of pages: which keys they are of, and what is coded with them."""

from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn.reference.aura import TILE
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.attention import MEANS_POINTS, PagePoint
from torch_gdn_check.registry.inputs import to_device

ENTRY = REGISTRY["aura_paged_tile_means_"]


@pytest.mark.parametrize("point", MEANS_POINTS, ids=lambda point: point.name)
def test_means_of_the_newest_keys(device: torch.device, point: PagePoint) -> None:
    """Every mean, also those that the step does not begin: these keep their bits."""
    call = ENTRY.call(point)
    moved = to_device(call, device)
    launched(device, "aura_paged_tile_means", torch_gdn.aura_paged_tile_means, **moved)
    exact = ENTRY.exact_outputs(call)["tile_means"]
    assert_close("tile_means", moved["tile_means"].cpu(), exact, 6e-4, head_dim=2)
    kept = exact == call["tile_means"].double()
    assert kept.any() and not kept.all()
    assert_same_bits("kept", moved["tile_means"].cpu()[kept], call["tile_means"][kept])


def test_what_float16_cannot_hold_is_zero(device: torch.device) -> None:
    keys = torch.ones(3, 1, 64)
    keys[:, 0, :3] = torch.tensor([65519.0, 65520.0, torch.inf])
    keys[1, 0, 3] = torch.nan
    means = torch.full((1, 1, 1, 64), 5.0).half()
    numbers = [torch.tensor(each) for each in ([[0]], [0, 3], [3])]
    exact = (torch.zeros(1, 1, 1, 64), torch.tensor([0]), torch.tensor([0]))
    call = to_device(dict(enumerate((keys, means, *numbers, *exact))), device)
    torch_gdn.aura_paged_tile_means(*call.values())
    assert call[1].cpu().flatten().tolist() == [65504.0, 0.0, 0.0, 0.0, *[1.0] * 60]


@pytest.mark.parametrize("count", [31, 32])
def test_few_keys_take_the_mean_of_the_tile_before(device: torch.device, count: int) -> None:
    """A request without a slot begins its third tile, in a block of four."""
    keys, means = torch.randn(count, 2, 64), torch.randn(2, 4, 2, 64).half()
    sequence = [torch.tensor(each) for each in ([[1]], [0, count], [256 + count])]
    rows = torch.full((1, 128, 2, 64), torch.nan), torch.tensor([-1]), torch.tensor([0])
    call = to_device(dict(enumerate((keys, means.clone(), *sequence, *rows))), device)
    torch_gdn.aura_paged_tile_means(*call.values(), tail=128)
    means[1, 2] = means[1, 1] if count < 32 else keys.double().mean(0).half()
    assert_close("tile_means", call[1].cpu(), means.double(), 6e-4)
    assert_same_bits("others", call[1].cpu()[:, [0, 1, 3]], means[:, [0, 1, 3]])


@pytest.mark.parametrize("own", [0, 1])
def test_a_prompt_in_parts_and_its_decoding(device: torch.device, own: int) -> None:
    """The tail is a ring of rows. Each tile begins with the mean of the newest 128 keys of all parts so far."""
    sinks, tail, ring, heads, D, block_size = 4, 128, 144, 2, 64, 256
    x = torch.randn(400, heads, D)
    means = torch.zeros(3, block_size // TILE, heads, D, dtype=torch.float16, device=device)
    rows = torch.full((2, sinks + ring, heads, D), torch.nan, device=device)
    table, slot, start = (torch.tensor(each, device=device) for each in ([[2, 0]], [own], [0]))
    expected, first = torch.zeros(4, heads, D, dtype=torch.float64), 0
    for count in (100, 90, *[1] * 80, 30, *[1] * 100):
        new = x[first : first + count].to(device)
        sequence = (torch.tensor([0, count], device=device), torch.tensor([first + count], device=device))
        options = {"exact_sinks": sinks, "tail": tail}
        torch_gdn.aura_paged_tile_means(new, means, table, *sequence, rows, slot, start, **options)
        for position in range(first, first + count):
            row = position if position < sinks else sinks + position % ring
            rows[own, row] = x[position].to(device)
            if position % TILE == 0:
                end = min(position + TILE, first + count)
                expected[position // TILE] = x[max(sinks, end - TILE) : end].double().mean(0)
        first += count
    assert first == 400
    assert_close("tile_means", means[[2, 0]].flatten(0, 1).cpu(), expected, 6e-4, head_dim=1)
