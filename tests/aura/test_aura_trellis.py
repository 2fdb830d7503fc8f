"""Tests trellis codes in the ops: the error of the encoder, and every window of the decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_close
from torch_gdn import reference
from torch_gdn.reference.trellis import windows
from torch_gdn_check.registry.aura import HEAD_SIZES, TRELLIS, Codec

pytestmark = pytest.mark.sweep(4)

EVERY = [(D, TRELLIS[(i + shift) % 3]) for i, D in enumerate(HEAD_SIZES) for shift in (0, 1)]
FROM_WINDOWS_OF_6 = {2: 0.0847, 3: 0.0242, 4: 0.0072}  # mean squared errors; Lloyd-Max has 0.1175, 0.0345, 0.0095


def directions(codec: Codec, codes: Tensor) -> Tensor:
    """Returns the decoded vectors before any norm, in float64."""
    ones = torch.ones(codes.shape[:-1], dtype=torch.float64)
    return reference.aura_decode(codes, ones, codec.codebook, codec.signs, dtype=torch.float64)


@pytest.mark.parametrize(("D", "bits"), EVERY)
def test_the_encoder_comes_as_near_as_the_exact_one(device: torch.device, D: int, bits: int) -> None:
    """This compares errors, not codes, because rounding decides between two paths that cost nearly the same."""
    codec = Codec(D, bits, trellis=True)
    x = torch.randn(2, 5, 7, D) * torch.randn(2, 5, 7, 1).exp()  # does not fill whole groups of vectors
    on_device = codec.to(device)
    codes, norms = (
        part.cpu()
        for part in launched(device, "aura_encode_trellis", torch_gdn.aura_encode, x.to(device), *on_device.tables)
    )
    size = x.double().norm(dim=-1)
    ours = (directions(codec, codes) - x / size[..., None]).square().sum(-1)
    exact, _ = reference.aura_encode(x.double(), *codec.tables)
    best = (directions(codec, exact) - x / size[..., None]).square().sum(-1)
    assert (ours <= best * 1.2).all() and abs(ours.mean() / best.mean() - 1) <= 0.002
    assert ours.mean() < 1.04 * FROM_WINDOWS_OF_6[bits]
    assert_close("norms", norms, size / directions(codec, codes).norm(dim=-1), 3e-4, head_dim=None)


@pytest.mark.parametrize(("D", "bits"), EVERY)
def test_every_stream_decodes_as_its_bits_say(device: torch.device, D: int, bits: int) -> None:
    codec = Codec(D, bits, trellis=True)
    streams = torch.randint(256, (2, 6, D * bits // 8), dtype=torch.uint8)
    chosen = windows(streams, codec.codebook, bits)
    codes = reference.aura.pack(chosen % 2**bits, bits, closed=True)
    norms = torch.rand(2, 6).half()
    arguments = (x.to(device) for x in (codes, norms, codec.codebook, codec.signs))
    x = launched(device, "aura_decode", torch_gdn.aura_decode, *arguments, rotated=True).cpu()
    expected = codec.codebook.double().flatten()[chosen] * norms[..., None]
    assert_close("x", x, expected, 3e-7, head_dim=None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("D", [80, 128])
def test_what_is_not_finite_stays_in_its_vector(device: torch.device, D: int, bad: float) -> None:
    codec, x = Codec(D, 3, trellis=True), torch.randn(11, D)
    tables = codec.to(device).tables
    codes, norms = (part.cpu() for part in torch_gdn.aura_encode(x.to(device), *tables))
    x[5, 17] = bad
    spoilt_codes, spoilt_norms = (part.cpu() for part in torch_gdn.aura_encode(x.to(device), *tables))
    others = torch.arange(11) != 5
    assert (spoilt_codes[5] == 0).all() and not spoilt_norms[5].isfinite()
    assert torch.equal(spoilt_codes[others], codes[others]) and torch.equal(spoilt_norms[others], norms[others])


def test_slots_and_means(device: torch.device) -> None:
    codec, x = Codec(96, 4, trellis=True).to(device), (torch.randn(2, 3, 4, 96) + 1).to(device)
    slots = torch.tensor([[4, -1, 0, 7], [1, 2, 5, -7]], device=device)
    codes = torch.full((2, 3, 8, 12), 9, dtype=torch.int32, device=device)
    norms, means = torch.zeros(2, 3, 8).half().to(device), torch.randn(2, 3, 1, 96).half().to(device)
    torch_gdn.aura_encode_(x, slots, *codec.tables, codes, norms, means)
    expected = torch_gdn.aura_encode(x - means.float(), *codec.tables)
    for b, t in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        for part, whole in zip((codes, norms), expected, strict=True):
            assert slots[b, t] < 0 or torch.equal(part[b, :, slots[b, t]], whole[b, :, t])
    assert (codes == 9).all(-1).sum() == 3 * (16 - 6)


@pytest.mark.parametrize(
    ("boundaries", "shape", "message"),
    [
        (torch.zeros(15), (16, 4), "boundaries: expected None for the codebook of a trellis, got a tensor"),
        (None, (16,), "boundaries: expected a tensor for a codebook of one dimension, got None"),
        (None, (16, 8), r"codebook: expected \[4, 16\], \[8, 8\] or \[16, 4\] labels .*, got 16 and 8"),
        (None, (32, 2), "codebook: expected .* labels .*, got 32 and 2"),
    ],
)
def test_other_tables_are_refused(
    device: torch.device, boundaries: Tensor | None, shape: tuple[int, ...], message: str
) -> None:
    x, signs = torch.zeros(1, 64, device=device), torch.ones(64, device=device)
    table = torch.zeros(shape, device=device)
    with pytest.raises(ValueError, match=message):
        torch_gdn.aura_encode(x, signs, None if boundaries is None else boundaries.to(device), table)
