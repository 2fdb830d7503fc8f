from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.aura import CODECS
from tests.helpers.devices import launched
from torch_gdn import reference
from torch_gdn.reference.aura import quantise, unpack
from torch_gdn_check.registry.aura import BITS, Codec, poisoned_cache
from torch_gdn_check.registry.models import DTYPES

Encoded = tuple[Tensor, Tensor]


def encode(device: torch.device, codec: Codec, x: Tensor) -> Encoded:
    result = launched(device, "aura_encode", torch_gdn.aura_encode, x.to(device), *codec.to(device).tables)
    return tuple(part.cpu() for part in result)  # type: ignore[return-value]


def encode_into(
    device: torch.device, codec: Codec, x: Tensor, slots: Tensor, cache: Encoded, tile_means: Tensor | None = None
) -> Encoded:
    """Encodes into the cache, which is on the device. Returns the cache's parts on the CPU."""
    means = None if tile_means is None else tile_means.to(device)
    arguments = (x.to(device), slots.to(device), *codec.to(device).tables, *cache, means)
    launched(device, "aura_encode", torch_gdn.aura_encode_, *arguments)
    return tuple(part.cpu() for part in cache)  # type: ignore[return-value]


def coordinates(codec: Codec, x: Tensor) -> Tensor:
    """Returns the coordinates that are quantised, in float64."""
    x = x.double()
    return reference.aura_rotate(x / x.norm(dim=-1, keepdim=True), codec.signs)


def ulps(norms: Tensor, exact: Tensor) -> float:
    """Returns the largest error in units of float16's spacing."""
    spacing = torch.nextafter(exact.half(), torch.tensor(torch.inf, dtype=torch.float16)) - exact.half()
    return ((norms.double() - exact).abs() / spacing.double()).max().item()


def assert_encodes(codec: Codec, x: Tensor, codes: Tensor, norms: Tensor) -> None:
    """Expects the codes of the float64 reference, except next to a boundary, and the norm for these codes."""
    y = coordinates(codec, x)
    exact, indices = quantise(y, codec.boundaries.double()), unpack(codes, codec.bits, codec.D)
    near = (y[..., None] - codec.boundaries).abs().amin(-1) <= 2e-6 / codec.D**0.5
    assert torch.equal(indices[~near], exact[~near])
    assert (indices - exact).abs().max() <= 1
    expected = x.double().norm(dim=-1) / codec.codebook.double()[indices].norm(dim=-1)
    assert ulps(norms, expected) <= 0.51


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("D", "bits"), CODECS)
def test_codes_and_norms(device: torch.device, D: int, bits: int) -> None:
    codec = Codec(D, bits)
    x = (torch.randn(2, 3, 7, D) * torch.randn(2, 3, 7, 1).exp()).to(DTYPES[(D // 16 + bits) % 3])
    codes, norms = encode(device, codec, x)
    assert codes.shape == (2, 3, 7, codec.words) and codes.dtype == torch.int32 and codes.is_contiguous()
    assert norms.shape == (2, 3, 7) and norms.dtype == torch.float16
    assert_encodes(codec, x, codes, norms)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", [80, 128])
def test_tokens_go_to_their_slots_and_nowhere_else(device: torch.device, D: int, bits: int) -> None:
    codec = Codec(D, bits)
    x = torch.randn(2, 4, 3, D).transpose(1, 2)  # the layout that a projection returns
    slots = torch.tensor([[4, -1, 0, 7], [1, 2, 5, -7]], dtype=torch.int32 if bits < 4 else torch.int64)
    before, tile_means = poisoned_cache(codec, 2, 3, 8, torch.device("cpu")), torch.randn(2, 3, 1, D).half()
    cache = encode_into(device, codec, x, slots, poisoned_cache(codec, 2, 3, 8, device), tile_means)
    for part, old, new in zip(cache, before, encode(device, codec, x - tile_means.float()), strict=True):
        for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
            if slots[b, t] >= 0:
                old[b, h, slots[b, t]] = new[b, h, t]
        assert torch.equal(part.nan_to_num(), old.nan_to_num())


def test_slots_of_all_rows_in_one(device: torch.device) -> None:
    codec, x = Codec(64, 8), torch.randn(2, 1, 3, 64)
    codes, norms = encode_into(device, codec, x, torch.tensor([6, 2, 3]), poisoned_cache(codec, 2, 1, 8, device))
    expected = encode(device, codec, x)
    assert torch.equal(codes[:, :, [6, 2, 3]], expected[0]) and torch.equal(norms[:, :, [6, 2, 3]], expected[1])
    assert norms.isnan().sum() == 2 * 5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("D", [80, 128])
def test_what_is_not_finite_stays_in_its_vector(device: torch.device, D: int, bad: float) -> None:
    codec, x = Codec(D, 3), torch.randn(16, D)
    codes, norms = encode(device, codec, x)
    x[5, 17] = bad
    spoilt_codes, spoilt_norms = encode(device, codec, x)
    assert (spoilt_codes[5] == 0).all() and not spoilt_norms[5].isfinite()
    others = torch.arange(16) != 5
    assert torch.equal(spoilt_codes[others], codes[others]) and torch.equal(spoilt_norms[others], norms[others])


@pytest.mark.parametrize("bits", BITS)
def test_zeros_have_norm_zero_and_the_codes_of_zero(device: torch.device, bits: int) -> None:
    codec = Codec(64, bits)
    codes, norms = encode(device, codec, torch.zeros(3, 64))
    assert (norms == 0).all()
    assert (unpack(codes, bits, 64) == (codec.boundaries < 0).sum()).all()


@pytest.mark.parametrize("exponent", [-110, -70, -10, 11, 70, 115])
def test_any_magnitude(device: torch.device, exponent: int) -> None:
    """Squares overflow float32 long before the vector does. A norm that float16 cannot hold becomes 0 or infinite."""
    codec, x = Codec(128, 4), torch.randn(9, 128)
    codes, norms = encode(device, codec, x)
    scaled_codes, scaled_norms = encode(device, codec, x * 2.0**exponent)
    assert torch.equal(scaled_codes, codes)
    assert torch.equal(scaled_norms, (norms.double() * 2.0**exponent).half())
