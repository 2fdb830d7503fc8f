"""Tests recorded cases in the harshest modes of the simulated device. Lanes and simdgroups run in another order, and
arithmetic is at the edge of what Metal's specification allows (exp, log and rsqrt off by their ULP bounds, sums
reordered, denormals flushed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.attention.test_paged_attention import attend as attend_to_pages
from tests.attention.test_paged_attention import exact as exact_of_pages
from tests.aura.test_aura_attention import attend, exact
from tests.aura.test_aura_attention import make_call as aura_call
from tests.aura.test_aura_encode import encode
from tests.helpers.cases import assert_exact, run
from tests.helpers.devices import on_a_mac
from tests.helpers.errors import assert_close, assert_same_bits
from tests.helpers.golden import NAMES, assert_as_exact_as_fla, load
from tests.helpers.prefill import each_op, on_mps
from torch_gdn_check.registry.attention import make_call as paged_call
from torch_gdn_check.registry.aura import Codec

pytestmark = [
    pytest.mark.sweep(8),
    pytest.mark.skipif(on_a_mac(), reason="a real device has one order and one arithmetic"),
]

CHUNKED = [name for name in NAMES if name != "decode_b4"]


def unkind(*, seed: int, perturb: bool) -> None:
    import mps_simulator

    mps_simulator.activate(seed=seed, perturb=perturb)


@pytest.fixture
def mps(device: torch.device) -> Iterator[torch.device]:
    import mps_simulator

    yield device
    mps_simulator.activate()


@pytest.mark.sweep(6)
@each_op("chunked", devices=("mps",))
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CHUNKED)
def test_the_order_of_lanes_changes_no_bit(mps: torch.device, op: str, name: str, seed: int) -> None:
    case = load(name).case
    unkind(seed=0, perturb=False)
    expected = run(op, case, mps)
    unkind(seed=seed, perturb=False)
    for part, ours, theirs in zip(("o", "final_state"), run(op, case, mps), expected, strict=True):
        assert_same_bits(part, ours, theirs)


@on_mps("chunked")
@pytest.mark.parametrize("name", CHUNKED)
def test_a_prefill_at_the_edge_of_the_specification(mps: torch.device, name: str) -> None:
    unkind(seed=3, perturb=True)
    assert_as_exact_as_fla(name, "chunk_gated_delta_rule", mps)


@on_mps("chunked")
def test_a_prefill_of_repeated_keys_in_float32_at_the_edge_of_the_specification(mps: torch.device) -> None:
    op, case = "chunk_gated_delta_rule", load("same_keys").case.map(torch.Tensor.float)
    unkind(seed=3, perturb=True)
    assert_exact(op, case, run(op, case, mps))


@pytest.mark.parametrize(("device", "bound"), [("mps-fused_chunk", 1e-6), ("mps-chunked", 1e-5)], indirect=["device"])
def test_a_strong_gate_keeps_its_digits_whatever_order_a_scan_has(mps: torch.device, bound: float) -> None:
    """A token scales the state by exp of the difference of two sums, which reach -153 in 16 tokens."""
    case = load("strong_gate").case.map(torch.Tensor.float)
    unkind(seed=3, perturb=True)
    _, state = run("chunk_gated_delta_rule", case, mps)
    assert_close("final_state", state, case.exact()[1], bound, head_dim=1)


@on_mps()
@pytest.mark.parametrize("name", NAMES)
def test_the_recurrent_op_at_the_edge_of_the_specification(mps: torch.device, name: str) -> None:
    unkind(seed=3, perturb=True)
    assert_as_exact_as_fla(name, "fused_recurrent_gated_delta_rule", mps)


AURA = {"key_bits": 4, "value_bits": 3, "D": 80, "ratio": 3, "T": 150, "mask": "window of 50"}
AURA |= {"offset": "last", "sinks": True, "starts": True, "block_size": 64, "dtype": torch.float32}
AURA |= {"exact": (132, 4), "trellis": False, "tile_means": True}


def in_other_orders(run: Callable[[], Tensor], exact: Tensor) -> None:
    """Asserts that no order changes a bit, and that arithmetic at the edge stays within the bound."""
    unkind(seed=0, perturb=False)
    expected = run()
    unkind(seed=1, perturb=False)
    assert_same_bits("o", run(), expected)
    unkind(seed=3, perturb=True)
    assert_close("o", run(), exact, 2e-6, head_dim=1)


@on_mps()
@pytest.mark.parametrize("L", [1, 7])
def test_aura_attention(mps: torch.device, L: int) -> None:
    """One query and 7 queries take different forms of pass 1."""
    call = aura_call(AURA | {"L": L})
    in_other_orders(lambda: attend(mps, call), exact(call))


@on_mps()
@pytest.mark.parametrize(("queries", "keys"), [([1, 1], [300, 70]), ([3, 30], [150, 40])], ids=["decode", "prefill"])
def test_paged_attention(mps: torch.device, queries: list[int], keys: list[int]) -> None:
    call = paged_call(queries, keys, HQ=4, HK=1, D=80) | {"window": 200, "sinks": torch.randn(4)}
    in_other_orders(lambda: attend_to_pages(mps, call), exact_of_pages(call))


@on_mps()
@pytest.mark.parametrize(("D", "bits"), [(80, 3), (128, 8)])
def test_aura_encode(mps: torch.device, D: int, bits: int) -> None:
    codec, x = Codec(D, bits), torch.randn(9, D)
    unkind(seed=0, perturb=False)
    expected = encode(mps, codec, x)
    unkind(seed=1, perturb=True)
    for name, ours, theirs in zip(("codes", "norms"), encode(mps, codec, x), expected, strict=True):
        assert_same_bits(name, ours, theirs)


@on_mps()
def test_the_state_decays_by_an_exponential_within_one_ulp(mps: torch.device) -> None:
    """Metal allows its own exp an error of 4 ulp, which the perturbing mode uses. Keys of zero leave only the decay."""
    unkind(seed=3, perturb=True)
    g = torch.cat([torch.linspace(-86, 0, 1500), torch.linspace(0, 80, 100), -torch.logspace(-8, 0, 448)])
    T, HV = 1, g.numel()
    nothing = torch.zeros(1, T, 1, 16, device=mps)
    _, state = torch_gdn.fused_recurrent_gated_delta_rule(
        nothing,
        nothing,
        torch.zeros(1, T, HV, 1, device=mps),
        g=g.view(1, T, HV).to(mps),
        beta=torch.ones(1, T, HV, device=mps),
        initial_state=torch.ones(1, HV, 16, 1, device=mps),
        output_final_state=True,
    )
    assert state is not None
    exact = g.double().exp()
    error = (state.cpu()[0, :, 0, 0].double() - exact).abs() / exact
    assert error[g <= 0].max() <= 1.2e-7
    assert error.max() <= 5e-7
