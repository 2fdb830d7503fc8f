"""Tests speculative decoding. The state after each drafted token goes to its own slot, with the bits of decoding one
token at a time. The next step continues after the last accepted token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.cases import Case, make_case, pool_with_gaps
from tests.helpers.devices import kernels_run, ready, with_unwritten_rows
from tests.helpers.errors import assert_same_bits

K, V, HV, DRAFTS = 32, 32, 2, 4
OPTIONS: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}


def random_pool(device: torch.device, slots: int, dtype: torch.dtype = torch.float32, v_first: bool = False) -> Tensor:
    return pool_with_gaps(device, dtype, slots, HV, *((V, K) if v_first else (K, V)))[1]


def tokens_of(case: Case, first: int, last: int) -> list[Tensor]:
    return [x[:, first:last] for x in (*case.qkv, case.g, case.beta)]


def one_by_one(case: Case, state: Tensor, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Decodes in place. Returns o and the states [B, HV, ...] after each token of all sequences, `state` first."""
    pool, outputs, states = state.clone(), [], [state]
    for t in range(case.q.shape[1]):
        outputs.append(torch_gdn.fused_recurrent_gated_delta_rule_(*tokens_of(case, t, t + 1), pool, **options))
        states.append(pool.clone())
    return outputs, states


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_goes_on_after_what_was_accepted(
    device: torch.device, dtype: torch.dtype, v_first: bool, index_dtype: torch.dtype
) -> None:
    """Sequence n accepts n + 1 of the first step's 4 tokens, and its next 4 follow those."""
    options = OPTIONS | {"state_v_first": v_first}
    case = make_case(2 * DRAFTS, K, V, B=DRAFTS, H=1, HV=HV).to(device)
    pool = random_pool(device, 20, dtype, v_first)
    indices = (torch.randperm(19)[: DRAFTS * DRAFTS] + 1).view(DRAFTS, DRAFTS).to(device, index_dtype)
    outputs, states = one_by_one(case, pool[indices[:, 0]], **options)
    before = pool.clone()
    with kernels_run(device, "fused_recurrent_gated_delta_rule"):
        o = torch_gdn.fused_recurrent_gated_delta_rule_(*tokens_of(case, 0, DRAFTS), pool, indices, **options)
    for t in range(DRAFTS):
        assert_same_bits(f"o of token {t}", o[:, t : t + 1], outputs[t])
        assert_same_bits(f"state after token {t}", pool[indices[:, t]], states[t + 1])
    others = [slot for slot in range(20) if slot not in indices.flatten().tolist()]
    assert_same_bits("the other slots", pool[others], before[others])

    accepted = torch.arange(1, DRAFTS + 1, device=device, dtype=index_dtype)
    step = [x.clone() for x in tokens_of(case, 0, DRAFTS)]
    for n in range(DRAFTS):
        for mine, whole in zip(step, tokens_of(case, n + 1, n + 1 + DRAFTS), strict=True):
            mine[n] = whole[n]
    o = torch_gdn.fused_recurrent_gated_delta_rule_(*step, pool, indices, num_accepted_tokens=accepted, **options)
    for n in range(DRAFTS):
        for t in range(DRAFTS - 1 - n, DRAFTS):
            if n + 1 + t < 2 * DRAFTS:
                assert_same_bits(f"o of token {t} of {n}", o[n, t], outputs[n + 1 + t][n, 0])
                assert_same_bits(f"state of {n} after token {t}", pool[indices[n, t]], states[n + 2 + t][n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("null_index", [-1, 0])
def test_packed_sequences_with_padding(device: torch.device, null_index: int, dtype: torch.dtype) -> None:
    """Sequences have 0 to 3 tokens. If the first column of a row is null, o is zeros and the op reads and writes
    nothing. A row without a state starts anew. A token whose own column is null is still computed, and rounds the state
    like any other.
    """
    lengths, boundaries = [3, 2, 2, 0, 3], [0, 3, 5, 7, 7, 10]
    case = make_case(10, K, V, H=1, HV=HV, cu_seqlens=boundaries).to(device)
    pool = random_pool(device, 16, dtype)
    null = [null_index, 13, 14]
    indices = torch.tensor([[1, 2, 3], null, [4, 5, 6], [7, 8, 9], [10, null_index, 12]], device=device)
    flags = torch.tensor([True, True, False, True, True], device=device)
    before, expected = pool.clone(), pool.clone()
    outputs = torch.zeros(1, 10, HV, V, device=device)
    for n, (first, tokens) in enumerate(zip(boundaries, lengths, strict=False)):
        if n == 1:
            continue
        state = pool[indices[n, :1]] * flags[n]
        for t in range(tokens):
            token = tokens_of(case, first + t, first + t + 1)
            outputs[:, first + t] = torch_gdn.fused_recurrent_gated_delta_rule_(*token, state, **OPTIONS)[:, 0]
            if indices[n, t] > null_index:
                expected[indices[n, t]] = state[0]
    arguments = [with_unwritten_rows(x, 1, slice(3, 5)) for x in tokens_of(case, 0, 10)]
    o = torch_gdn.fused_recurrent_gated_delta_rule_(
        *arguments, pool, indices, flags, null_index, cu_seqlens=case.cu_seqlens, **OPTIONS
    )
    assert (o[:, 3:5] == 0).all()
    assert_same_bits("o", o, outputs)
    assert_same_bits("pool", pool, expected)
    assert not torch.equal(pool[4], before[4])


@pytest.mark.parametrize("on_cpu", [False, True])
def test_many_sequences(device: torch.device, on_cpu: bool) -> None:
    """A kernel of its own searches more than 32 indices."""
    case = make_case(2, 16, 8, B=40, H=1, HV=1).to(device)
    pool = torch.randn(90, 1, 16, 8, device=device)
    indices = torch.randperm(90)[:80].view(40, 2)
    outputs, states = one_by_one(case, pool[indices[:, 1].to(device)])
    on_device = indices if on_cpu else indices.to(device)
    accepted = torch.full((40,), 2, device=indices.device if on_cpu else device)
    o = torch_gdn.fused_recurrent_gated_delta_rule_(
        *tokens_of(case, 0, 2), pool, on_device, num_accepted_tokens=accepted
    )
    for t in range(2):
        assert_same_bits(f"o of token {t}", o[:, t : t + 1], outputs[t])
        assert_same_bits(f"state after token {t}", pool[indices[:, t].to(device)], states[t + 1])


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("num_accepted_tokens: expected .+, got 3 at 0", {"num_accepted_tokens": [3, 1]}),
        ("num_accepted_tokens: expected counts from 1 .+, got 0 at 1", {"num_accepted_tokens": [1, 0]}),
        ("state_indices: expected a column for each token .+, got fewer than 3 at 0", {"cu_seqlens": [0, 3, 4]}),
        ("state_indices: expected each slot at most once, got 2 at 2", {"state_indices": [[1, 2], [2, 3]]}),
        ("state_indices: expected indices below .+, got 9 at 3", {"state_indices": [[1, 2], [3, 9]]}),
        ("state_indices: expected indices below .+, got 9 at 1", {"state_indices": [[-1, 9], [3, 4]]}),
    ],
)
def test_wrong_contents_on_the_device(words: str, change: dict[str, Any]) -> None:
    """The next synchronisation raises the error, and nothing outside the slots is written."""
    device = ready("mps")
    case = make_case(4, K, V, H=1, HV=HV, cu_seqlens=[0, 2, 4]).to(device)
    pool = random_pool(device, 9)
    before = pool.clone()
    options: dict[str, Any] = {
        "state_indices": [[1, 2], [3, 4]],
        "num_accepted_tokens": [1, 1],
        "cu_seqlens": [0, 2, 4],
    }
    options = {name: torch.tensor(value, device=device) for name, value in (options | change).items()}
    torch_gdn.fused_recurrent_gated_delta_rule_(*tokens_of(case, 0, 4), pool, **options)
    with pytest.raises(RuntimeError, match=rf"^fused_recurrent_gated_delta_rule_: {words}\b"):
        torch.mps.synchronize()
    assert_same_bits("the other slots", pool[[0, 5, 6, 7, 8]], before[[0, 5, 6, 7, 8]])
