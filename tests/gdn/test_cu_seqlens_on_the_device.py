"""Tests cu_seqlens on the device. Only the kernels read it, and the next synchronisation reports a wrong one."""

from __future__ import annotations

import pytest
import torch

from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import to_device

pytestmark = pytest.mark.sweep(8)

PACKABLE = [entry for entry in REGISTRY.values() if entry.packable]
CHUNKED = [entry.name for entry in PACKABLE if "chunk_indices" in entry.arguments]
CALLS = [("mps", entry.name) for entry in PACKABLE]
PREFILLS = [op for op in CHUNKED if REGISTRY[op].quick and REGISTRY[op].quick[0].algorithm]
CALLS += [(f"mps-{name}", op) for op in PREFILLS for name in ("chunked", "recurrent")]
WRONG = {  # the boundaries, and the index of the first wrong one
    "a start of 1": ([1, 5, 5, 20], 0),
    "a descent": ([0, 7, 5, 20], 2),
    "an end before T": ([0, 5, 5, 19], 3),
    "an end past T": ([0, 5, 5, 21], 3),
    "a negative one": ([0, -1, 5, 20], 1),
    "the lowest and the highest number": ([-(2**63), 2**63 - 1, 5, 20], 0),
    "the highest number": ([0, 2**63 - 1, 5, 20], 1),
    "fewer than 32, descending": ([*range(20), 18], 20),
    "more than 32, wrong in the second lot": ([*([0] * 40), 20, 19, 20], 41),
}
each_call = pytest.mark.parametrize(
    ("device", "op"), CALLS, indirect=["device"], ids=["-".join(call) for call in CALLS]
)


def call_of(op: str, device: torch.device, cu_seqlens: list[int]) -> dict:
    """Returns a call with 20 tokens, and with a state and a slot for each sequence."""
    N = len(cu_seqlens) - 1
    call = to_device(REGISTRY[op].smallest(packed=True), device)
    call["cu_seqlens"] = torch.tensor(cu_seqlens, device=device)
    if op in CHUNKED:
        chunks = -(-20 // 16) + N
        call["chunk_indices"] = torch.zeros(chunks, 2, dtype=torch.int64, device=device)
        for name in {"h", "dh"} & call.keys():
            call[name] = call[name].new_zeros(1, chunks, *call[name].shape[2:])
    for name in ("initial_state", "dfinal_state", "h0", "dht"):
        if call.get(name) is not None:
            call[name] = call[name].new_zeros(N, *call[name].shape[1:])
    if "state_pool" in call:
        for pool in {"state_pool", "conv_pool"} & call.keys():
            call[pool] = call[pool].new_zeros(N, *call[pool].shape[1:])
        call["state_indices"] = torch.arange(N, device=device)
        call["has_initial_state"] = torch.ones(N, dtype=torch.bool, device=device)
    return call


@each_call
@pytest.mark.parametrize(("cu_seqlens", "index"), WRONG.values(), ids=WRONG)
def test_a_wrong_one_is_reported(device: torch.device, op: str, cu_seqlens: list[int], index: int) -> None:
    REGISTRY[op].run(call_of(op, device, cu_seqlens))
    words = "expected boundaries that start at 0, ascend and end at T"
    with pytest.raises(RuntimeError, match=rf"^{op}: cu_seqlens: {words}, got {cu_seqlens[index]} at {index}\b"):
        torch.mps.synchronize()
    torch.mps.synchronize()  # the error is reported only once


@each_call
@pytest.mark.parametrize("cu_seqlens", [[0, 20], [0, 5, 5, 20], [*([0] * 40), 20, 20]], ids=len)
def test_a_right_one_is_not(device: torch.device, op: str, cu_seqlens: list[int]) -> None:
    REGISTRY[op].run(call_of(op, device, cu_seqlens))
    torch.mps.synchronize()


@pytest.mark.parametrize(
    ("device", "op"),
    [(device, op) for device, op in CALLS if op in CHUNKED],
    indirect=["device"],
)
def test_too_few_chunk_indices_are_reported(device: torch.device, op: str) -> None:
    call = call_of(op, device, [0, 1, 2, 20])
    call["chunk_indices"] = call["chunk_indices"][:3]  # 4 chunks need 4 rows
    for name in {"h", "dh"} & call.keys():
        call[name] = call[name][:, :3].contiguous()
    REGISTRY[op].run(call)
    words = "expected one row for each chunk of cu_seqlens, got fewer than 4"
    with pytest.raises(RuntimeError, match=rf"^{op}: chunk_indices: {words}\b"):
        torch.mps.synchronize()
