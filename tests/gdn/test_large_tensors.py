"""Tests inputs, outputs and pools of states with more than 2**31 elements: shaders must form all offsets in 64 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.cases import make_case
from tests.helpers.errors import assert_same_bits
from tests.helpers.large import BEYOND, far_apart, last_row, needs_sparse_memory, repeated, rows_beyond, sparse_memory
from tests.helpers.prefill import each_op
from torch_gdn_check.registry.cases import END_TO_END_OPS, IN_PLACE

pytestmark = needs_sparse_memory
on_simulated = each_op("chunked", "fused_chunk", "recurrent", devices=("mps",))


def inputs(tokens: int, K: int, V: int, B: int) -> dict[str, Tensor]:
    """Returns arguments in bf16."""
    case = make_case(tokens, K, V, B=B, H=1, HV=1, state=False)
    tensors = zip(("q", "k", "v", "g", "beta"), (*case.qkv, case.g, case.beta), strict=True)
    return {name: x.to(torch.bfloat16) for name, x in tensors}


def check(name: str, got: Tensor, expected: Tensor) -> None:
    assert expected.isfinite().all() and expected.abs().max() > 0
    assert_same_bits(name, got, expected)


@on_simulated
def test_inputs_far_apart(device: torch.device, op: str) -> None:
    tensors = inputs(70, 32, 64, B=2)
    with sparse_memory():
        near = {name: x.to(device) for name, x in tensors.items()}
        expected, _ = END_TO_END_OPS[op](**near)
        for name, x in tensors.items():
            far = far_apart(x)
            assert far.stride(0) >= BEYOND
            o, _ = END_TO_END_OPS[op](**(near | {name: far}))
            check(f"o, of argument {name}", o.cpu(), expected.cpu())
            del far, o
            torch.mps.empty_cache()


@on_simulated
def test_an_output_of_more_than_2_to_the_31_elements(device: torch.device, op: str) -> None:
    tokens, V = 64, 64
    rows = rows_beyond(tokens * V)
    tensors = inputs(tokens, 16, V, B=1)
    with sparse_memory():
        expected, _ = END_TO_END_OPS[op](**{name: x.to(device) for name, x in tensors.items()})
        o = last_row(END_TO_END_OPS[op], rows, **{name: repeated(x, rows) for name, x in tensors.items()})
        check("o", o, expected.cpu())


@on_simulated
def test_a_slot_far_into_the_pool(device: torch.device, op: str) -> None:
    K, V = 128, 128
    slots = 2**31 // (K * V) + 3
    tensors = inputs(20, K, V, B=2)
    states = torch.randn(2, 1, K, V).to(torch.bfloat16)

    def run(pool: Tensor, indices: list[int]) -> tuple[Tensor, Tensor]:
        pool[indices] = states.to(device)
        on_device = torch.tensor(indices, device=device)
        o = IN_PLACE[op](*(x.to(device) for x in tensors.values()), pool, state_indices=on_device)
        return o.cpu(), torch.stack([pool[i].cpu() for i in indices])

    with sparse_memory():
        near = run(torch.zeros(3, 1, K, V, dtype=torch.bfloat16, device=device), [2, 0])
        far = run(torch.empty(slots, 1, K, V, dtype=torch.bfloat16, device=device), [slots - 1, 0])
    for name, got, expected in zip(("o", "the slots"), far, near, strict=True):
        check(name, got, expected)
