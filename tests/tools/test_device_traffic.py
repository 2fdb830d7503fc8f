"""Counts on the simulated device: bytes and cache lines of a decoding step, copies and waits of every op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_gdn
from tests.helpers.cases import make_case
from tests.helpers.devices import on_a_mac, profiled, ready
from tests.helpers.entries import INDICES, fields_of
from tests.helpers.errors import assert_same_bits
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import to_device

pytestmark = [
    pytest.mark.sweep(6),
    pytest.mark.skipif(on_a_mac(), reason="a Mac does not count a kernel's accesses to memory"),
]
bfloat16 = torch.bfloat16


def only_kernel(profile: Any) -> Any:
    (figures,) = profile.kernels.values()
    assert figures.dispatches == 1
    return figures


def issued_bytes(figures: Any) -> int:
    return figures.device_bytes_issued_read + figures.device_bytes_issued_written


def coalesced(figures: Any) -> float:
    return figures.least_cache_lines / figures.cache_lines


@pytest.mark.parametrize("state_v_first", [False, True], ids=["value inner", "key inner"])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (96, 192)])
def test_a_decoding_step_moves_its_state_once(K: int, V: int, state_v_first: bool) -> None:
    device = ready("mps")
    case = make_case(1, K, V, H=1, HV=2, dtype=bfloat16)
    if state_v_first and case.initial_state is not None:
        case.initial_state = case.initial_state.mT.contiguous()
    on_device = case.to(device)
    gates: dict[str, Any] = {
        "use_gate_in_kernel": True,
        "A_log": torch.zeros(2, device=device),
        "use_beta_sigmoid_in_kernel": True,
    }
    with profiled(detailed=True) as profile:
        torch_gdn.fused_recurrent_gated_delta_rule(
            *on_device.qkv, **on_device.options, **gates, state_v_first=state_v_first, use_qk_l2norm_in_kernel=True
        )
    figures = only_kernel(profile)
    state, rows, gate_bytes = 2 * 2 * K * V * 4, 2 * (2 * K + 2 * V + 2 * V), 3 * 2 * 4
    assert issued_bytes(figures) <= 1.1 * (state + rows + gate_bytes)
    assert coalesced(figures) >= 0.9


@pytest.mark.parametrize("columns", [3, 4])
def test_a_decoding_step_of_the_convolution_moves_its_state_once(columns: int) -> None:
    device = ready("mps")
    shapes = ((1, 1, 256), (256, 4), (3, 256, columns))
    x, weight, pool = (torch.randn(sizes).bfloat16().to(device) for sizes in shapes)
    with profiled(detailed=True) as profile:
        torch_gdn.causal_conv1d_update_(x, weight, pool, torch.tensor([1], device=device))
    figures = only_kernel(profile)
    assert issued_bytes(figures) <= 1.1 * (2 * x.nbytes + weight.nbytes + 2 * pool[1].nbytes)
    assert coalesced(figures) >= 0.9


@pytest.mark.parametrize("neighbours", ["tokens", "channels"])
def test_a_convolution_moves_whole_cache_lines(neighbours: str) -> None:
    device = ready("mps")
    x = torch.randn(1, 128, 128).bfloat16().to(device)
    x = x.transpose(1, 2) if neighbours == "tokens" else x
    weight = torch.randn(128, 4).bfloat16().to(device)
    with profiled(detailed=True) as profile:
        torch.ops.gdn.causal_conv1d(x, weight)
    figures = only_kernel(profile)
    assert issued_bytes(figures) <= 1.15 * (2 * x.nbytes + weight.nbytes)
    assert coalesced(figures) >= 0.9


def apart(x: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers with others between them."""
    return torch.stack((x, torch.full_like(x, -9)), -1)[..., 0]


@pytest.mark.parametrize("op", REGISTRY)
def test_no_op_copies_or_waits(op: str) -> None:
    """Indices are on the host, int32 on the device, or int64 there. The results are the same."""
    entry, device = REGISTRY[op], ready("mps")
    for packed in (False, True) if entry.packable else (False,):
        call = entry.smallest(packed)
        indices = {name: call.pop(name) for name in INDICES & call.keys()}
        on_host = {name: apart(x) for name, x in indices.items()}
        expected: dict[str, torch.Tensor] = {}
        for given in (
            {name: x.long().to(device) for name, x in indices.items()},
            {name: apart(x.int().to(device)) for name, x in indices.items()},
            on_host,
        ):
            on_device = to_device(call, device) | given
            torch.mps.synchronize()
            with profiled() as profile:
                results = entry.run(on_device)
                for x in on_host.values() if given is on_host else ():
                    x.fill_(-(2**30))  # the op must have read them already
            zeroed = profile.fallbacks.pop("aten::zero_", 0)  # here the CPU does it, and waits; on a Mac the GPU does
            assert (profile.copies, profile.waits, profile.fallbacks) == ({}, zeroed, {}), str(profile)
            result = entry.outputs(on_device, results)
            for name, x in result.items():
                assert_same_bits(name, x, expected.setdefault(name, x))


def view(x: Any) -> Any:
    """Returns x as rows with other rows between them."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        return x
    return torch.cat([x, x[..., :1].expand(*x.shape[:-1], 8)], -1)[..., : x.shape[-1]]


@pytest.mark.parametrize("op", [op for op, entry in REGISTRY.items() if entry.launches])
def test_an_op_on_views_is_its_kernels_and_allocates_its_outputs(op: str) -> None:
    """Gates, norms and conversions cost the delta rule's ops no separate kernel."""
    entry = REGISTRY[op]
    more = [{"gated": True}] if "gated" in fields_of(entry) else []
    points = [replace(entry.small, **change) for change in ({}, {"dtype": bfloat16}, *more)]
    for point in [*points, *(replace(each, packed=True) for each in points if entry.packable)]:
        call = {name: view(x) for name, x in to_device(entry.call(point), ready("mps")).items()}
        if "use_qk_l2norm_in_kernel" in entry.arguments:
            call["use_qk_l2norm_in_kernel"] = True
        with profiled() as profile:
            results = entry.run(call)
        assert sum(each.dispatches for each in profile.kernels.values()) == entry.launches, str(profile)
        outputs = results if isinstance(results, tuple) else () if results is None else (results,)
        if not entry.scratch:
            allocated = sum(-(-x.nbytes // 256) * 256 for x in outputs)
            assert profile.allocated_bytes <= allocated, str(profile)


@pytest.mark.parametrize(("slots", "copies"), [(512, {}), (513, {"to the device": 1})])
def test_setbytes_passes_indices_of_the_host_up_to_metals_limit(slots: int, copies: dict[str, int]) -> None:
    device = ready("mps")
    x, weight, pool = torch.randn(slots, 1, 4), torch.randn(4, 4), torch.randn(slots, 4, 3)
    indices = torch.randperm(slots)
    expected = pool.clone()
    y = torch_gdn.causal_conv1d_update_(x, weight, expected, indices)
    on_device = [each.to(device) for each in (x, weight, pool)]
    with profiled() as profile:
        result = torch_gdn.causal_conv1d_update_(*on_device, indices)
    assert profile.copies == copies and profile.waits == len(copies)
    torch.testing.assert_close(result.cpu(), y)
    torch.testing.assert_close(on_device[-1].cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("sequences", [3, 12], ids=["each threadgroup searches", "one launch searches"])
@pytest.mark.parametrize("columns", [slice(1, 4), slice(0, 5, 2)], ids=["neighbours", "columns apart"])
def test_slots_in_a_part_of_a_table_are_not_copied(columns: slice, sequences: int) -> None:
    """A server's table has more columns than a step has tokens."""
    device = ready("mps")
    case = make_case(3, 32, 32, B=sequences, H=1, HV=2).to(device)
    table = (torch.randperm(5 * sequences) + 1).view(sequences, 5).int().to(device)
    part, pool = table[:, columns], torch.randn(5 * sequences + 1, 2, 32, 32).to(device)
    result = []
    for indices in (part.contiguous(), part):
        states = pool.clone()
        torch.mps.synchronize()
        with profiled() as profile:
            o = torch_gdn.fused_recurrent_gated_delta_rule_(*case.qkv, case.g, case.beta, states, indices)
        launched = ["locate_slots_4"] * (part.numel() > 32)
        assert [name for name in profile.kernels if not name.startswith("fused_recurrent")] == launched
        assert (profile.copies, profile.waits, profile.fallbacks) == ({}, 0, {}), str(profile)
        result.append((o, states))
    for name, expected, x in zip(("o", "state_pool"), *result, strict=True):
        assert_same_bits(name, x, expected)
