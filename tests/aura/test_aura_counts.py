"""Compares the device bytes that the simulated device counts for AURA's attention with what each kernel must read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.devices import on_a_mac, ready
from torch_gdn.aura import Scheme
from torch_gdn_check.registry.attention import aura_pages, make_call
from torch_gdn_check.registry.aura import Codec, make_cache
from torch_gdn_check.registry.inputs import Call, to_device

pytestmark = [pytest.mark.sweep(6), pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")]
HK, D, T = 2, 128, 1024


def figures_of(op: Any, call: Call) -> dict[str, Any]:
    import mps_simulator

    on_device = to_device(call, ready("mps"))
    with mps_simulator.profile(detailed=True) as profile:
        op(**on_device)
    return dict(profile.kernels)


def codes_and_norms(bits: tuple[int, int], keys: int, size: int = D) -> int:
    return HK * keys * (sum(bits) * size // 8 + 2 * 2)


@pytest.mark.parametrize(
    ("scheme", "ratio"),
    [
        *(("3v3", 4), ("8v4", 4), ("4v4", 1), ("2v8", 2), ("5v5", 4), ("4v3t", 4), ("2v2t", 1)),
        *(("4v8", 8), ("4v3", 8), ("5v5", 8), ("2v2t", 8), ("4v3t", 8)),
    ],
)
def test_a_simdgroup_asks_for_codes_once(scheme: str, ratio: int) -> None:
    of = Scheme(scheme)
    bits = of.key_bits, of.value_bits
    cache = make_cache(Codec(D, bits[0], 3, of.trellis), Codec(D, bits[1], 4, of.trellis), 1, HK, T)
    call = {"q": torch.randn(1, HK * ratio, 1, D), "block_size": 512} | cache.parts(True)
    figures = figures_of(torch_gdn.aura_attention, call)
    (first,) = (each for name, each in figures.items() if "flash_p1" in name)
    (second,) = (each for name, each in figures.items() if "flash_p2" in name)
    blocks = T // 512
    queries = HK * ratio * D * 4
    least = codes_and_norms(bits, T) + blocks * queries
    assert least <= first.device_bytes_issued_read <= 1.03 * least
    partials = blocks * HK * ratio * (D + 2) * 4
    assert first.device_bytes_issued_written == partials
    vectors = -(-HK * ratio // 4) * 4  # whole threadgroups; each reads the largest scores twice, and the signs
    assert second.device_bytes_issued_read <= vectors * (blocks * (D + 3) * 4 + D * 4)


@pytest.mark.parametrize(("ratio", "most"), [(1, 1.05), (4, 1.08), (8, 1.08)])
def test_means_of_tiles_cost_little(ratio: int, most: float) -> None:
    """One launch reads each tile's means once. Pass 1 reads one product for each row and group of keys."""
    cache = make_cache(Codec(D, 4, 3), Codec(D, 4, 4), 1, HK, T)
    call = {"q": torch.randn(1, HK * ratio, 1, D), "block_size": 512} | cache.parts(True)
    call["key_tile_means"] = torch.randn(1, HK, T // 128, D).half()
    figures = figures_of(torch_gdn.aura_attention, call)
    (products,) = (each for name, each in figures.items() if "tile_scores" in name)
    (first,) = (each for name, each in figures.items() if "flash_p1" in name)
    assert products.device_bytes_issued_read == HK * T // 128 * (D * 2 + ratio * D * 4)
    assert first.device_bytes_issued_read <= most * (codes_and_norms((4, 4), T) + T // 512 * HK * ratio * D * 4)


@pytest.mark.parametrize(("scheme", "ratio", "size"), [("4v4", 4, 128), ("8v3", 8, 128), ("4v3t", 8, 256)])
def test_a_threadgroup_asks_for_coded_pages_once(scheme: str, ratio: int, size: int) -> None:
    of = Scheme(scheme)
    bits = of.key_bits, of.value_bits
    call: Call = make_call([1], [T], HQ=HK * ratio, HK=HK, D=size, dtype=torch.float32, padding=0)
    for name, own, seed in (("key", bits[0], 3), ("value", bits[1], 4)):
        codec = Codec(size, own, seed, of.trellis)
        pages, _ = aura_pages(codec, call.pop(f"{name}_cache"))
        call |= {f"{name}_codes": pages[0], f"{name}_norms": pages[1]}
        call |= {f"{name}_codebook": codec.codebook, f"{name}_signs": codec.signs}
    figures = figures_of(torch_gdn.aura_paged_attention, call)
    (kernel,) = (each for name, each in figures.items() if name.startswith("aura_paged_attention"))
    splits, rest = divmod(kernel.device_bytes_issued_written, HK * ratio * (size + 2) * 4)
    assert splits > 1 and rest == 0
    least = codes_and_norms(bits, T, size) + splits * HK * ratio * size * 4
    assert least <= kernel.device_bytes_issued_read <= 1.05 * least
