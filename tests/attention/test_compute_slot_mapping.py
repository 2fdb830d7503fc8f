from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.devices import launched
from torch_gdn import reference
from torch_gdn_check.registry.inputs import Call, to_device

PARAMETERS = ("dtype", "other")


def make_call(sequences: int, dtype: torch.dtype, other: torch.dtype) -> Call:
    """Makes sequences of 0 to 4 tokens at any position below 12, in blocks of 3. Every tensor has strides."""
    lengths = torch.arange(sequences) % 5
    tokens = int(lengths.sum())
    boundaries = torch.zeros(sequences + 1, 2, dtype=dtype)
    boundaries[1:, 0] = lengths.cumsum(0)
    positions, slots = torch.randint(0, 12, (tokens, 2)).to(other), torch.full((tokens + 40, 2), 7, dtype=dtype)
    table = torch.randperm(sequences * 8).view(2 * sequences, 4).to(other)
    return {
        "positions": positions[:, 0],
        "cu_seqlens": boundaries[:, 0],
        "block_table": table[::2],
        "block_size": 3,
        "slot_mapping": slots[:, 0],
    }


@pytest.mark.parametrize(PARAMETERS, [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=["32-64", "64-32"])
@pytest.mark.parametrize("sequences", [1, 2, 31, 33, 64, 70])
def test_equals_the_reference(device: torch.device, sequences: int, dtype: torch.dtype, other: torch.dtype) -> None:
    call = make_call(sequences, dtype, other)
    moved = to_device(call, device)
    launched(device, "compute_slot_mapping", torch_gdn.compute_slot_mapping, **moved)
    reference.compute_slot_mapping(**call)
    assert moved["slot_mapping"].cpu().tolist() == call["slot_mapping"].tolist()
    whole = moved["slot_mapping"].as_strided((call["slot_mapping"].numel(), 2), (2, 1), 0)
    assert (whole[:, 1] == 7).all(), "wrote between the entries"


@pytest.mark.parametrize("sequences", [0, 3])
def test_no_tokens(device: torch.device, sequences: int) -> None:
    zeros = torch.zeros(sequences + 1, dtype=torch.int64, device=device)
    table, slots = torch.zeros(sequences, 2, dtype=torch.int64, device=device), zeros.new_full((5,), 7)
    torch_gdn.compute_slot_mapping(zeros[:0], zeros, table, 16, slots)
    assert slots.tolist() == [-1] * 5


@pytest.mark.parametrize(
    ("argument", "at", "value", "message"),
    [
        ("positions", 2, 12, "positions: expected positions within the blocks of block_table, got 12 at 2"),
        ("positions", 0, -1, "positions: expected positions within the blocks of block_table, got -1 at 0"),
        ("cu_seqlens", 0, 1, "cu_seqlens: expected the first boundary to be 0, got 1"),
        ("cu_seqlens", 2, 5, "cu_seqlens: expected ascending boundaries, got 5"),
        ("cu_seqlens", 3, 99, "cu_seqlens: expected boundaries up to the number of positions, got 99"),
    ],
)
def test_wrong_contents(device: torch.device, argument: str, at: int, value: int, message: str) -> None:
    call = make_call(3, torch.int64, torch.int64)
    call[argument][at] = value
    call = to_device(call, device)
    with pytest.raises(ValueError if device.type == "cpu" else RuntimeError, match=f"compute_slot_mapping_: {message}"):
        torch_gdn.compute_slot_mapping(**call)
        torch.mps.synchronize()


@pytest.mark.parametrize("block", [-1, (2**31 - 1) // 3])
def test_a_block_whose_slots_do_not_fit(device: torch.device, block: int) -> None:
    call = make_call(2, torch.int32, torch.int64)
    call["block_table"].fill_(block)
    call = to_device(call, device)
    message = f"block_table: expected blocks whose slots slot_mapping can hold, got {block} at . of sequence 1"
    with pytest.raises(ValueError if device.type == "cpu" else RuntimeError, match=message):
        torch_gdn.compute_slot_mapping(**call)
        torch.mps.synchronize()
    assert device.type == "cpu" or call["slot_mapping"].tolist() == [-1] * 41
