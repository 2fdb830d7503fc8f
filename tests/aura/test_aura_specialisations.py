"""The table of the AURA kernels' specialisations names what calls really launch."""

from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.aura import Codec, make_cache, there
from tests.helpers.devices import on_a_mac, ready
from torch_gdn import specialisations_aura
from torch_gdn.specialisations_aura import MATRIX_ROWS

pytestmark = pytest.mark.skipif(on_a_mac(), reason="a Mac does not say which kernels ran")


@pytest.mark.parametrize(
    ("L", "ratio"), [(1, 1), (2, 1), (1, 3), (1, 8), (3, 3), (2, 8), (MATRIX_ROWS, 1), (3, 6), (1, 20)], ids=str
)
def test_attention(L: int, ratio: int) -> None:
    """The form of pass 1, and its rows, are chosen by queries times heads that share a KV head."""
    import simulator

    device = ready("mps")
    cache = make_cache(Codec(64, 4), Codec(64, 2), 1, 1, 5)
    call = there({"q": torch.randn(1, ratio, L, 64)} | cache.parts(True), device)
    with simulator.profile() as profile:
        torch_gdn.aura_attention(**call)
    expected = specialisations_aura.attention(torch.float32, 4, 2, 64, L * ratio)
    assert {name for name in profile.kernels if name.startswith("aura_")} == {each.name for each in expected}
    assert all(profile.launched(each.name) == 1 for each in expected)


@pytest.mark.parametrize(
    ("HK", "T", "blocks"), [(1, 128, 1), (1, 129, 2), (2, 300, 3), (128, 300, 2), (256, 300, 1)], ids=str
)
def test_blocks_are_as_many_as_the_length_and_the_heads_ask_for(HK: int, T: int, blocks: int) -> None:
    """128 keys and more, so that pass 1 has some 256 threadgroups where the cache is long enough."""
    import simulator

    device = ready("mps")
    cache = make_cache(Codec(64, 2), Codec(64, 2), 1, HK, T)
    call = there({"q": torch.randn(1, HK, 1, 64)} | cache.parts(True), device)
    with simulator.profile() as profile:
        torch_gdn.aura_attention(**call)
    name = specialisations_aura.first_pass(2, 2, 64, 1).name
    assert profile.kernels[name].threads == 128 * HK * blocks


def test_the_codec() -> None:
    import simulator

    device = ready("mps")
    codec = Codec(80, 3).to(device)
    with simulator.profile() as profile:
        codes, norms, _ = torch_gdn.aura_encode(torch.randn(4, 80, dtype=torch.float16, device=device), *codec.tables)
        torch_gdn.aura_decode(codes, norms, codec.codebook, codec.signs, rotated=True, dtype=torch.bfloat16)
        torch_gdn.aura_rotate(torch.randn(4, 80, device=device), codec.signs, inverse=True)
    expected = [
        specialisations_aura.encoding(torch.float16, 3, 80),
        specialisations_aura.decoding(torch.bfloat16, 3, 80, rotated=True),
        specialisations_aura.rotating(torch.float32, 80, inverse=True),
    ]
    assert {name for name in profile.kernels if name.startswith("aura_")} == {each.name for each in expected}


def test_every_scheme_has_all_it_asks_for_in_the_table() -> None:
    table = specialisations_aura.table()
    assert len(set(table)) == len(table)
    for each in specialisations_aura.attention(torch.float16, 8, 4, 96, 1):
        assert each in table
    assert set(specialisations_aura.table(quick=True)) <= set(table)
    assert {each.kernel for each in table} == set(specialisations_aura.KERNELS)
