"""Device bytes of AURA's attention by the simulated device's counts."""

from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.devices import on_a_mac, ready
from torch_gdn.testing.aura import Codec, make_cache
from torch_gdn.testing.inputs import to_device

pytestmark = pytest.mark.skipif(on_a_mac(), reason="a Mac counts nothing")


@pytest.mark.parametrize("bits", [(3, 3), (4, 3), (8, 3), (4, 4), (8, 4)])
def test_a_simdgroup_asks_for_codes_once(bits: tuple[int, int]) -> None:
    import mps_simulator

    HK, ratio, D, T = 2, 4, 128, 1024
    cache = make_cache(Codec(D, bits[0]), Codec(D, bits[1], 4), 1, HK, T)
    call = to_device({"q": torch.randn(1, HK * ratio, 1, D)} | cache.parts(True), ready("mps"))
    with mps_simulator.profile(detailed=True) as profile:
        torch_gdn.aura_attention(**call)
    (kernel,) = (figures for name, figures in profile.kernels.items() if "flash_p1" in name)
    codes_and_norms = HK * T * (sum(bits) * D // 8 + 2 * 2)
    assert kernel.device_bytes_distinct_read >= codes_and_norms
    assert kernel.device_bytes_issued_read <= 1.15 * kernel.device_bytes_distinct_read
