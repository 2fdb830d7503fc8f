"""Tests how csrc/metal encodes: on PyTorch's stream and encoder, without commit or wait, with short-lived temporaries.

The tests look at the stream, which only the simulated device shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_gdn
from tests.helpers.cases import make_case
from tests.helpers.devices import on_a_mac
from tests.helpers.errors import assert_same_bits
from tests.helpers.files import copied_shaders, replace_once
from tests.helpers.prefill import on_mps
from torch_gdn import _C

pytestmark = pytest.mark.skipif(on_a_mac(), reason="looks into the simulated stream")


@pytest.fixture
def mps(device: torch.device) -> torch.device:
    torch.mps.synchronize()
    return device


def pending() -> int:
    import mps_simulator.metal

    return mps_simulator.metal.pending_commands()


@pytest.mark.parametrize(
    ("device", "launches"), [("mps", 1), ("mps-chunked", 3), ("mps-recurrent", 1)], indirect=["device"]
)
def test_an_op_encodes_and_neither_commits_nor_waits(mps: torch.device, launches: int) -> None:
    case = make_case(70).to(mps)
    torch.mps.synchronize()
    torch_gdn.chunk_gated_delta_rule(*case.qkv, **case.options)
    assert pending() == launches
    torch.mps.synchronize()
    assert pending() == 0


@on_mps("chunked")
def test_ops_and_pytorchs_own_work_share_one_encoder_in_order(mps: torch.device) -> None:
    case = make_case(70).to(mps)
    o, _ = torch_gdn.chunk_gated_delta_rule(*case.qkv, **case.options)
    doubled = o * 2
    again, _ = torch_gdn.chunk_gated_delta_rule(*case.qkv, **case.options)
    assert_same_bits("o", again * 2, doubled)


@on_mps("chunked")
def test_launches_keep_their_order_in_a_concurrent_encoder(mps: torch.device) -> None:
    from mps_simulator import settings

    case = make_case(70).to(mps)

    def two_ops() -> torch.Tensor:
        q = torch_gdn.l2norm(case.qkv[0])
        return torch_gdn.chunk_gated_delta_rule(q, *case.qkv[1:], **case.options)[0].cpu()

    with settings(encoder="concurrent"):
        result = two_ops()
    assert_same_bits("o", result, two_ops())


@on_mps("chunked")
def test_inputs_and_temporaries_may_die_before_the_commands_run(mps: torch.device) -> None:
    case = make_case(70)
    expected, _ = torch_gdn.chunk_gated_delta_rule(*case.to(mps).qkv, **case.to(mps).options)
    expected = expected.cpu()
    on_device = case.to(mps)
    torch.mps.synchronize()
    o, _ = torch_gdn.chunk_gated_delta_rule(*on_device.qkv, **on_device.options)
    sizes = [x.numel() * x.element_size() for x in on_device.qkv]
    del on_device
    # The pool gives out blocks of the same sizes while the op's commands still wait to run.
    reused = [torch.full((size // 4,), float("nan"), device=mps) for size in sizes for _ in range(3)]
    assert_same_bits("o", o, expected)
    assert all(x.isnan().all() for x in reused)


@on_mps()
def test_an_empty_grid_is_not_dispatched(mps: torch.device) -> None:
    case = make_case(0, state=False).to(mps)
    o, state = torch_gdn.chunk_gated_delta_rule(*case.qkv, **case.options)
    assert pending() <= 1  # only the fill of the final state with zeros
    assert o.shape == (1, 0, 2, 64) and state is not None and not state.any()


@on_mps("chunked", "recurrent")
def test_wrong_cu_seqlens_on_the_device_are_reported_at_the_next_synchronisation(mps: torch.device) -> None:
    case = make_case(100, state=False).to(mps)
    cu_seqlens = torch.tensor([0, 60, 40, 100]).to(mps)
    for function in (torch_gdn.chunk_gated_delta_rule, torch_gdn.fused_recurrent_gated_delta_rule):
        function(*case.qkv, g=case.g, beta=case.beta, cu_seqlens=cu_seqlens)
        with pytest.raises(RuntimeError, match="expected boundaries that start at 0, ascend and end at T"):
            torch.mps.synchronize()
        torch.mps.synchronize()  # the error is reported only once


@on_mps("chunked", "recurrent")
@pytest.mark.parametrize(
    "boundaries", [[-(2**40), 2**40, 2**33, 100], [-900, 40, 900, 100]], ids=["64 bits", "32 bits"]
)
def test_cu_seqlens_far_outside_the_tensor_lead_nowhere(mps: torch.device, boundaries: list[int]) -> None:
    case = make_case(100, state=False).to(mps)
    cu_seqlens = torch.tensor(boundaries).to(mps)
    torch_gdn.chunk_gated_delta_rule(*case.qkv, g=case.g, beta=case.beta, cu_seqlens=cu_seqlens)
    with pytest.raises(RuntimeError, match="expected boundaries that start at 0, ascend and end at T"):
        torch.mps.synchronize()


@on_mps("chunked")
def test_too_few_chunk_indices_are_reported(mps: torch.device) -> None:
    case = make_case(100, state=False).to(mps)
    cu_seqlens, indices = torch.tensor([0, 30, 100]).to(mps), torch.tensor([[0, 0], [1, 0]]).to(mps)
    torch_gdn.chunk_gated_delta_rule(*case.qkv, g=case.g, beta=case.beta, cu_seqlens=cu_seqlens, chunk_indices=indices)
    with pytest.raises(RuntimeError, match="expected one row for each chunk of cu_seqlens"):
        torch.mps.synchronize()


@on_mps()
def test_a_shader_that_does_not_compile_is_an_error_with_the_compilers_text(mps: torch.device, tmp_path: Path) -> None:
    with copied_shaders(tmp_path) as broken:
        replace_once(broken / "gdn/triangle.h", "float x[8];", "float x[8] = nonsense;")
        with pytest.raises(RuntimeError, match=r"solve_tril_64.*gdn/triangle\.h:\d+.*nonsense"):
            torch.ops.gdn.solve_tril(torch.zeros(1, 64, 1, 64, device=mps))
    assert torch.ops.gdn.solve_tril(torch.zeros(1, 64, 1, 64, device=mps)).cpu()[0, :, 0].equal(torch.eye(64))


PROBE = """
#include "core/parameters.h"
#ifdef __FAST_MATH__
#error "compiled with fast math"
#endif
#if __METAL_VERSION__ != 310
#error "compiled for another version of Metal"
#endif
template <typename T>
[[kernel]] void probe(device T* out [[buffer(0)]]) {
  out[0] = T(0);
}
"""


@on_mps()
def test_shaders_are_compiled_for_metal_3_1_with_safe_math(mps: torch.device, tmp_path: Path) -> None:
    with copied_shaders(tmp_path) as shaders:
        (shaders / "probe.metal").write_text(PROBE)
        assert _C.compile("probe", "probe.metal", ["float"])["name"] == "probe_float"


@on_mps()
def test_no_shader_compiles_with_fast_math(mps: torch.device) -> None:
    import mps_simulator.metal

    root = Path(_C.shader_directory())
    files = sorted(str(path.relative_to(root)) for path in root.rglob("*.metal"))
    assert "gdn/chunk_fwd_h.metal" in files
    for file in files:
        source = _C.shader_source("unused", file, ["float"]).rpartition("\ntemplate")[0]
        with pytest.raises(RuntimeError, match=r"core/parameters\.h:\d+:\d+: error: .*needs safe math"):
            mps_simulator.metal.Library(source, fast_math=True)
