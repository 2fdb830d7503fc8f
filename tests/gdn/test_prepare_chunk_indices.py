from __future__ import annotations

import pytest
import torch

from tests.helpers.cases import make_case
from torch_gdn import prepare_chunk_indices, prepare_chunk_offsets
from torch_gdn_check.registry.stages import stages_of

CASES = {
    "odd lengths": ([0, 17, 64, 193, 300], [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)], [0, 1, 2, 5, 7]),
    "empty sequences": ([0, 0, 64, 64, 65], [(1, 0), (3, 0)], [0, 0, 1, 1, 2]),
    "nothing at all": ([0, 0], [], [0, 0]),
}


@pytest.mark.parametrize(("boundaries", "indices", "offsets"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chunks_of_packed_sequences(
    device: torch.device,
    dtype: torch.dtype,
    boundaries: list[int],
    indices: list[tuple[int, int]],
    offsets: list[int],
) -> None:
    cu_seqlens = torch.tensor(boundaries, dtype=dtype, device=device)
    result = prepare_chunk_indices(cu_seqlens, 64)
    assert result.shape == (len(indices), 2) and result.dtype == dtype and result.device == cu_seqlens.device
    assert [tuple(pair) for pair in result.tolist()] == indices
    assert prepare_chunk_offsets(cu_seqlens, 64).tolist() == offsets


def test_offsets_are_the_rows_of_h_at_which_sequences_start(device: torch.device) -> None:
    case = make_case(150, 16, 16, cu_seqlens=[0, 17, 81, 150])
    assert case.cu_seqlens is not None and case.initial_state is not None
    offsets = prepare_chunk_offsets(case.cu_seqlens.to(device)).tolist()
    assert torch.equal(stages_of(case).h[0, offsets[:-1]], case.initial_state)
