"""Compares chunk_kda with the float64 recurrence, head by head: decays of any size, groups of heads, sequences in a
batch. test_kernels.py has the other cases.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import torch_gdn
from tests.helpers.devices import by_threads
from tests.helpers.errors import assert_close, assert_same_bits
from tests.helpers.kda import F32, assert_exact_kda, exact_kda, kda_inputs
from tests.helpers.prefill import each_device
from torch_gdn_check.registry.inputs import to_device

NAME = "chunk_kda"
STRONG = [-20.0, -1e3, -torch.inf]
by_chunks = each_device("chunked")  # the algorithm that these sizes take, and this one


@pytest.mark.parametrize("g", [0.0, -1e-3, -5.0, *STRONG])
@by_chunks
def test_one_decay_throughout(device: torch.device, g: float) -> None:
    inputs = kda_inputs(70, 32, 16)
    inputs["g"] = torch.full_like(inputs["g"], g)
    assert_exact_kda(NAME, inputs, device)


@pytest.mark.parametrize("g", STRONG)
@by_chunks
def test_a_reset_leaves_no_trace_of_a_large_state(device: torch.device, g: float) -> None:
    inputs = kda_inputs(40, 32, 16)
    inputs["initial_state"] *= 1e4
    inputs["g"][:, 0] = g
    assert_exact_kda(NAME, inputs, device)


@pytest.mark.parametrize("grouping", ["block", "tiled"])
@pytest.mark.parametrize("ratio", [2, 3])
@by_chunks
def test_value_heads_per_key_head(device: torch.device, ratio: int, grouping: str) -> None:
    inputs = kda_inputs(40, 32, 40, H=2, HV=2 * ratio)
    heads = torch.arange(2 * ratio) % 2 if grouping == "tiled" else torch.arange(2 * ratio) // ratio
    exact_o, exact_state = exact_kda(inputs | {"q": inputs["q"][:, :, heads], "k": inputs["k"][:, :, heads]})
    o, state = torch_gdn.chunk_kda(**to_device(inputs, device), output_final_state=True, head_grouping=grouping)
    assert state is not None
    assert_close("o", o.cpu(), exact_o, F32)
    assert_close("final_state", state.cpu(), exact_state, F32, head_dim=1)


@pytest.mark.parametrize("device", ["cpu", "mps-chunked", "mps-fused_chunk", "mps-recurrent"], indirect=True)
def test_a_sequence_in_a_batch_has_the_bits_that_it_has_alone(device: torch.device) -> None:
    """Gates are raw, and the algorithm is pinned on `mps`."""
    boundaries, gate = [0, 3, 20, 21, 90], {"use_gate_in_kernel": True, "lower_bound": -5.0}
    inputs = to_device(kda_inputs(90, 32, 16, N=4), device)
    o, state = torch_gdn.chunk_kda(**inputs, **gate, cu_seqlens=torch.tensor(boundaries), output_final_state=True)
    assert state is not None
    for n, (first, last) in enumerate(pairwise(boundaries)):
        alone = {name: x[:, first:last] for name, x in inputs.items()} | {
            "initial_state": inputs["initial_state"][n:][:1]
        }
        alone_o, alone_state = torch_gdn.chunk_kda(**alone, **gate, output_final_state=True)
        assert alone_state is not None
        assert_same_bits(f"o of sequence {n}", o[:, first:last], alone_o)
        assert_same_bits(f"state of sequence {n}", state[n : n + 1], alone_state)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@by_chunks
def test_v_of_another_dtype(device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The error is float32's, so neither q and k nor v were rounded to the narrower dtype."""
    inputs = kda_inputs(40, 32, 16, dtype=dtypes[0])
    inputs["v"] = inputs["v"].to(dtypes[1])
    on_device = to_device(inputs, device)
    o, state = torch_gdn.chunk_kda(**on_device, output_dtype=torch.float32, output_final_state=True)
    exact_o, exact_state = exact_kda(inputs)
    assert_close("o", o.cpu(), exact_o, F32)
    assert_close("final_state", state.cpu(), exact_state, F32, head_dim=1)
    assert_same_bits("o", torch_gdn.chunk_kda(**on_device)[0], o.to(dtypes[1]))


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    inputs = kda_inputs(150, 60, 100, H=3, HV=6, N=3) | {"cu_seqlens": torch.tensor([0, 17, 17, 150])}
    alone, *results = by_threads(lambda: torch_gdn.chunk_kda(**inputs)[0], 1, 2, 5, 8)
    for o in results:
        assert_same_bits("o", o, alone)
