from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import kernels_run, on_a_mac, profiled, ready
from tests.properties.test_offsets_beyond_32_bits import needs_sparse_memory, sparse_memory
from torch_gdn import reference

Range = tuple[int, int, int]
LARGE = 200_000  # bytes that make several tiles for each of several threadgroups


def bytes_of(count: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def vectors(ranges: list[Range], dtype: torch.dtype = torch.int64) -> list[Tensor]:
    return list(torch.tensor(ranges, dtype=dtype).view(-1, 3).unbind(1))


def copied(pool: Tensor, ranges: list[Range]) -> Tensor:
    expected = pool.clone()
    reference.batch_copy_(expected, *vectors(ranges))
    return expected


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_copies_every_range_and_nothing_else(device: torch.device, dtype: torch.dtype, on_cpu: bool) -> None:
    """Ranges are large and small. One source occurs twice, one range is empty, and all offsets come from a strided
    matrix.
    """
    ranges = [(0, 300_000, LARGE), (0, 520_000, 64), (500_006, 600_002, 1000), (700_000, 7, 0), (510_001, 610_004, 333)]
    pool = bytes_of(720_000)
    on_device = pool.to(device, copy=True)
    numbers = [x if on_cpu else x.to(device) for x in vectors(ranges, dtype)]
    with kernels_run(device, "batch_copy"):
        torch_gdn.batch_copy_(on_device, *numbers)
    assert torch.equal(on_device.cpu(), copied(pool, ranges))
    assert not torch.equal(pool, on_device.cpu())


@pytest.mark.parametrize("size", [1, 15, 17, 63, 16384, 16384 * 3 + 5])
@pytest.mark.parametrize("apart", [1, 2, 6, 16, 48, 16384, -1, -2, -6, -16, -48, -16384])
def test_a_range_that_overlaps_itself_is_read_first(device: torch.device, apart: int, size: int) -> None:
    pool, source = bytes_of(2 * 16384 + size + 64), 16384 + 19
    ranges = [(source, source + apart, size)]
    on_device = pool.to(device, copy=True)
    torch_gdn.batch_copy_(on_device, *(x.to(device) for x in vectors(ranges)))
    assert torch.equal(on_device.cpu(), copied(pool, ranges))


@pytest.mark.parametrize("apart", [4096, -4096])
def test_a_large_range_that_overlaps_itself(device: torch.device, apart: int) -> None:
    """The range is larger than what a core of the CPU copies at a time."""
    pool, ranges = bytes_of(700_000), [(8192, 8192 + apart, 650_000)]
    on_device = pool.to(device, copy=True)
    torch_gdn.batch_copy_(on_device, *(x.to(device) for x in vectors(ranges)))
    assert torch.equal(on_device.cpu(), copied(pool, ranges))


@pytest.mark.parametrize("first", [0, 1, 2, 16])
@pytest.mark.parametrize("offsets", [(0, 40_000), (3, 40_003), (3, 40_019), (2, 40_004), (1, 40_006)])
def test_any_alignment(device: torch.device, offsets: tuple[int, int], first: int) -> None:
    """The pool starts anywhere in its storage, and ranges start and end anywhere."""
    storage = bytes_of(80_100)
    ranges = [(*offsets, 33_333)]
    on_device = storage.to(device, copy=True)
    torch_gdn.batch_copy_(on_device[first:], *(x.to(device) for x in vectors(ranges)))
    assert torch.equal(on_device.cpu()[first:], copied(storage[first:], ranges))
    assert torch.equal(on_device.cpu()[:first], storage[:first])


def test_many_ranges(device: torch.device) -> None:
    """Blocks of states move from one half of a storage to the other, in any order."""
    block, count = 96, 700
    sources, destinations = torch.randperm(count), torch.randperm(count) + count
    ranges = [(int(a) * block, int(b) * block, block) for a, b in zip(sources, destinations, strict=True)]
    pool = bytes_of(2 * count * block)
    on_device = pool.to(device, copy=True)
    torch_gdn.batch_copy_(on_device, *(x.to(device) for x in vectors(ranges)))
    assert torch.equal(on_device.cpu(), copied(pool, ranges))


def test_states_of_a_storage(device: torch.device) -> None:
    """As in prefix caching, a block of a convolution's columns and of the rule's states is copied to another block."""
    pages = torch.randn(5, 3 * 64 + 2 * 16 * 8).to(device)
    before, page = pages.cpu().clone(), pages.stride(0) * 4
    storage = torch.empty(0, dtype=torch.uint8, device=device).set_(pages.untyped_storage())
    columns, states = 3 * 64 * 4, 2 * 16 * 8 * 4
    # The columns of page 1 after the first 64 slide to the left. The states of page 2 go to page 4.
    ranges = [(page + 256, page, columns - 256), (2 * page + columns, 4 * page + columns, states)]
    torch_gdn.batch_copy_(storage, *(x.to(device) for x in vectors(ranges)))
    expected = before.clone()
    expected[1, :128] = before[1, 64:192]
    expected[4, 192:] = before[2, 192:]
    assert torch.equal(pages.cpu(), expected)


def test_nothing_to_copy(device: torch.device) -> None:
    pool = bytes_of(100)
    on_device = pool.to(device, copy=True)
    none = torch.empty(0, dtype=torch.int64, device=device)
    torch_gdn.batch_copy_(on_device, none, none, none)
    torch_gdn.batch_copy_(on_device, *(x.to(device) for x in vectors([(0, 50, 0), (100, 100, 0)])))
    assert torch.equal(on_device.cpu(), pool)
    torch_gdn.batch_copy_(on_device[:0], *(x.to(device) for x in vectors([(0, 0, 0)])))


OUTSIDE = {
    "source_offsets": [(-2, 10, 4), (97, 10, 4), (2**62, 10, 2**62)],
    "destination_offsets": [(10, -2, 4), (10, 97, 4), (0, 101, 0)],
    "sizes": [(10, 20, -1), (10, 20, -(2**63))],
}
EACH_OUTSIDE = [(argument, wrong) for argument, ranges in OUTSIDE.items() for wrong in ranges]


@pytest.mark.parametrize(("argument", "wrong"), EACH_OUTSIDE)
def test_ranges_outside_the_pool(device: torch.device, argument: str, wrong: Range) -> None:
    """The CPU copies nothing. The device copies all ranges but the wrong ones, and the next synchronisation raises."""
    pool, right = bytes_of(100), [(0, 60, 8), (40, 80, 6)]
    on_device = pool.to(device, copy=True)
    with pytest.raises(ValueError, match=f"^batch_copy_: {argument}: expected"):
        torch_gdn.batch_copy_(on_device, *vectors([right[0], wrong, right[1]]))
    assert torch.equal(on_device.cpu(), pool)
    if device.type == "cpu":
        return
    torch_gdn.batch_copy_(on_device, *(x.to(device) for x in vectors([right[0], wrong, right[1]])))
    with pytest.raises(RuntimeError, match=rf"^batch_copy_: {argument}: expected .+, got -?\d+ at 1\b"):
        torch.mps.synchronize()
    assert torch.equal(on_device.cpu(), copied(pool, right))


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 50, 10), (20, 59, 10)],
        [(0, 50, 10), (45, 80, 6)],
        [(45, 80, 6), (0, 50, 10)],
        [(0, 50, 10), (20, 30, 5), (52, 70, 2)],
    ],
)
def test_ranges_that_meet_are_refused(device: torch.device, ranges: list[Range]) -> None:
    pool = bytes_of(100)
    on_device = pool.to(device, copy=True)
    with pytest.raises(ValueError, match="destination_offsets: expected no range to write what another one"):
        torch_gdn.batch_copy_(on_device, *vectors(ranges))
    assert torch.equal(on_device.cpu(), pool)


def test_neighbours_do_not_meet(device: torch.device) -> None:
    pool, ranges = bytes_of(100), [(0, 50, 10), (0, 60, 10), (70, 40, 10), (12, 10, 20)]
    on_device = pool.to(device, copy=True)
    torch_gdn.batch_copy_(on_device, *vectors(ranges))
    assert torch.equal(on_device.cpu(), copied(pool, ranges))


def test_a_pool_with_gaps_is_refused(device: torch.device) -> None:
    numbers = [x.to(device) for x in vectors([(0, 50, 10), (10, 60, 10)])]
    with pytest.raises(ValueError, match=r"^batch_copy_: pool: expected"):
        torch_gdn.batch_copy_(bytes_of(200).to(device)[::2], *numbers)


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not report which kernels ran")
def test_is_one_dispatch_that_moves_each_byte_once() -> None:
    """Threadgroups share a large range, and the host reads nothing from the device."""
    device = ready("mps")
    on_device, numbers = bytes_of(2 * LARGE).to(device), [x.to(device) for x in vectors([(0, LARGE, LARGE), (0, 0, 0)])]
    with profiled() as profile:
        torch_gdn.batch_copy_(on_device, *numbers)
    (figures,) = profile.kernels.values()
    assert figures.dispatches == 1 and not profile.fallbacks
    assert figures.device_bytes_written == LARGE
    assert figures.device_bytes_read == LARGE + 24 * figures.threads  # each thread reads the three numbers of its range
    assert figures.threads >= 2 * 4 * 256  # each range has at least four threadgroups


@needs_sparse_memory
def test_offsets_beyond_32_bits() -> None:
    far = 2**32 + 40
    device = ready("mps")
    with sparse_memory(), kernels_run(device, "batch_copy"):
        pool = torch.empty(far + 2000, dtype=torch.uint8, device=device)
        part = bytes_of(1000)
        pool[:1000], pool[far - 40 : far] = part.to(device), 0
        torch_gdn.batch_copy_(pool, *(x.to(device) for x in vectors([(0, far, 1000)])))
        torch_gdn.batch_copy_(pool, *(x.to(device) for x in vectors([(far + 6, 2**31, 900)])))
        assert torch.equal(pool[far : far + 1000].cpu(), part)
        assert torch.equal(pool[2**31 : 2**31 + 900].cpu(), part[6:906])
