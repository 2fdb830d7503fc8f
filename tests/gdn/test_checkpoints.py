"""Tests the checkpoints of a prefill. A checkpoint is the state after some of a sequence's tokens, in its own slot. It
has the bits of a prefill that ends there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.gdn.test_opcheck import opcheck
from tests.helpers.cases import Case, make_case, pool_with_gaps
from tests.helpers.devices import kernels_run, on_a_mac, profiled, ready
from tests.helpers.errors import assert_close, assert_same_bits, chunk_f32
from tests.helpers.prefill import ALGORITHMS, each_device, on_mps
from torch_gdn import reference
from torch_gdn.tools.prefill import prefill_algorithm

pytestmark = pytest.mark.sweep(6)

K, V, HV, SLOTS = 32, 40, 2, 12
each_algorithm = each_device("chunked", "fused_chunk", "recurrent")


def random_pool(device: torch.device, dtype: torch.dtype = torch.float32, v_first: bool = False) -> Tensor:
    return pool_with_gaps(device, dtype, SLOTS, HV, *((V, K) if v_first else (K, V)))[1]


def inputs_of(case: Case) -> list[Tensor]:
    return [*case.qkv, case.g, case.beta]


def prefill(case: Case, pool: Tensor, *slots: Any, **options: Any) -> Tensor:
    o = torch_gdn.chunk_gated_delta_rule_(*inputs_of(case), pool, *slots, **options)
    assert isinstance(o, Tensor)
    return o


@each_algorithm
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_has_the_bits_of_a_prefill_that_ends_there(device: torch.device, dtype: torch.dtype, v_first: bool) -> None:
    """The checkpoints are after 128 tokens of sequence 0, all 256 of 1, none of 2, and 64 of 3, which starts from
    zeros.
    """
    case = make_case(256, K, V, B=4, H=1, HV=HV).to(device)
    options: dict[str, Any] = {"state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    pool = random_pool(device, dtype, v_first)
    before, indices = pool.clone(), torch.tensor([5, 3, 8, 1], device=device)
    flags = torch.tensor([True, True, True, False], device=device)
    offsets, slots = [128, 256, 0, 64], [7, 2, 4, 9]
    expected = pool.clone()
    o = prefill(case, expected, indices, flags, **options)
    assert_same_bits("the slot without a checkpoint", expected[4], before[4])
    for n in (0, 1, 3):
        part, alone = case.map(lambda x, n=n: x[n : n + 1, : offsets[n]]), before.clone()  # type: ignore[misc]
        algorithm = _algorithm_of_device(device, case)
        with prefill_algorithm(algorithm):
            prefill(part, alone, indices[n : n + 1], flags[n : n + 1], **options)
        expected[slots[n]] = alone[indices[n]]
    ours = prefill(
        case, pool, indices, flags, checkpoint_offsets=torch.tensor(offsets, device=device),
        checkpoint_indices=torch.tensor(slots, device=device), **options,
    )  # fmt: skip
    assert_same_bits("o", ours, o)
    assert_same_bits("pool", pool, expected)
    assert not torch.equal(pool[7], before[7])


def _algorithm_of_device(device: torch.device, case: Case) -> str | None:
    """Returns the algorithm that this case takes, so that calls of other lengths can be pinned to it."""
    if device.type == "cpu":
        return None
    from tests.helpers.prefill import algorithm_of

    return algorithm_of(case)


@each_algorithm
@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("null_index", [-1, 0])
def test_packed_sequences(device: torch.device, null_index: int, on_cpu: bool) -> None:
    """The call is like vLLM's: int32 offsets, null slots, an empty sequence and one without a slot."""
    boundaries = [0, 200, 200, 330, 394, 500]
    case = make_case(500, K, V, H=1, HV=HV, cu_seqlens=boundaries).to(device)
    pool = random_pool(device)
    expected, indices = pool.clone(), torch.tensor([5, 3, null_index, 8, 1])
    offsets, slots = [192, 0, 64, 64, 64], [7, 2, 4, 6, null_index]
    o = prefill(case, expected, indices.to(device), null_index=null_index, cu_seqlens=case.cu_seqlens)
    with prefill_algorithm(_algorithm_of_device(device, case)):
        for n in (0, 3):
            first, alone = boundaries[n], random_pool(device)
            part = case.map(lambda x: x[:, first : first + offsets[n]] if x.shape[:2] == (1, 500) else x)  # noqa: B023
            prefill(part, alone, indices[n : n + 1].to(device))
            expected[slots[n]] = alone[indices[n]]
    where = torch.device("cpu") if on_cpu else device
    checkpoints = {"checkpoint_offsets": torch.tensor(offsets, dtype=torch.int32, device=where)}
    checkpoints |= {"checkpoint_indices": torch.tensor(slots, dtype=torch.int32, device=where)}
    ours = prefill(
        case, pool, indices.to(where), null_index=null_index, cu_seqlens=case.cu_seqlens, **checkpoints
    )  # fmt: skip
    assert_same_bits("o", ours, o)
    assert_same_bits("pool", pool, expected)


@each_algorithm
def test_is_the_state_of_the_recurrence(device: torch.device) -> None:
    case = make_case(150, K, V, H=1, HV=HV)
    pool = torch.zeros(4, HV, K, V, device=device)
    assert case.initial_state is not None
    pool[0] = case.initial_state[0].to(device)
    checkpoints = {"checkpoint_offsets": torch.tensor([128]), "checkpoint_indices": torch.tensor([2])}
    prefill(case.to(device), pool, **checkpoints)
    part = [x[:, :128].double() for x in inputs_of(case)]
    _, exact = reference.fused_recurrent_gated_delta_rule(
        *part, initial_state=case.initial_state.double(), output_final_state=True
    )
    assert exact is not None
    bound = chunk_f32(case.g.double().cumsum(1).abs().max().item())
    assert_close("the checkpoint", pool[2:3], exact, bound, head_dim=1)


@each_algorithm
def test_many_sequences(device: torch.device) -> None:
    """A kernel of its own searches more than 32 indices on the device. Its result has no null index."""
    count = 40
    case = make_case(64 * count, 16, 8, H=1, HV=1, cu_seqlens=[64 * n for n in range(count + 1)]).to(device)
    pool = torch.randn(2 * count + 1, 1, 16, 8, device=device)
    slots = torch.randperm(2 * count) + 1
    expected, kept = pool.clone(), slots[count:].clone()
    kept[7] = 0
    prefill(case, expected, slots[:count].to(device), null_index=0, cu_seqlens=case.cu_seqlens)
    for n in range(count):
        if n != 7:
            expected[kept[n]] = expected[slots[n]]
    checkpoints = {"checkpoint_offsets": torch.full((count,), 64), "checkpoint_indices": kept}
    checkpoints = {name: x.to(device) for name, x in checkpoints.items()}
    prefill(case, pool, slots[:count].to(device), null_index=0, cu_seqlens=case.cu_seqlens, **checkpoints)
    assert_same_bits("pool", pool, expected)


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not report which kernels ran")
@on_mps("chunked", "fused_chunk", "recurrent")
def test_takes_no_other_dispatch(device: torch.device) -> None:
    case = make_case(130, K, V, B=2, H=1, HV=HV).to(device)
    pool, profiles = random_pool(device), []
    numbers = [torch.tensor(x, device=device, dtype=torch.int32) for x in ([128, 64], [7, 2])]
    for checkpoints in ({}, dict(zip(("checkpoint_offsets", "checkpoint_indices"), numbers, strict=True))):
        with profiled() as profile:
            prefill(case, pool, torch.tensor([0, 1], device=device, dtype=torch.int32), **checkpoints)
        profiles.append({name: figures.dispatches for name, figures in profile.kernels.items()})
        assert not profile.fallbacks
    assert profiles[0] == profiles[1]


WRONG = [
    ("checkpoint_offsets", "expected multiples of 64 up to the tokens of a sequence", [32, 0], [4, 5]),
    ("checkpoint_offsets", "expected multiples of 64 up to the tokens of a sequence", [0, 192], [4, 5]),
    ("checkpoint_offsets", "expected multiples of 64 up to the tokens of a sequence", [-64, 0], [4, 5]),
    ("checkpoint_indices", "expected indices below the number of slots", [64, 64], [4, SLOTS]),
    ("checkpoint_indices", "expected each slot at most once", [64, 64], [4, 4]),
    ("checkpoint_indices", "expected each slot at most once", [64, 64], [4, 0]),
    ("checkpoint_indices", "expected each slot at most once", [64, 64], [4, 1]),
]


@pytest.mark.sweep(4)
@on_mps("chunked", "fused_chunk", "recurrent")
@pytest.mark.parametrize("is_default", [False, True])
@pytest.mark.parametrize(("argument", "words", "offsets", "slots"), WRONG)
def test_wrong_numbers_on_the_device(
    device: torch.device, argument: str, words: str, offsets: list[int], slots: list[int], is_default: bool
) -> None:
    """The next synchronisation raises. The wrong checkpoint is not written, and the states are."""
    case = make_case(130, K, V, B=2, H=1, HV=HV).to(device)
    pool = random_pool(device)
    expected = pool.clone()
    indices = None if is_default else torch.tensor([0, 1], device=device)
    prefill(case, expected, indices)
    numbers = {"checkpoint_offsets": torch.tensor(offsets), "checkpoint_indices": torch.tensor(slots)}
    prefill(case, pool, indices, **{name: x.to(device) for name, x in numbers.items()})
    words = words.replace("of 64", "of a chunk")
    with pytest.raises(RuntimeError, match=rf"^chunk_gated_delta_rule_: {argument}: {words}, got -?\d+ at [01]\b"):
        torch.mps.synchronize()
    others = [n for n in range(SLOTS) if n != 4]
    assert_same_bits("pool", pool[others], expected[others])


def test_without_tokens_there_is_none(device: torch.device) -> None:
    case = make_case(0, K, V, B=2, H=1, HV=HV).to(device)
    pool, none = random_pool(device), torch.zeros(2, dtype=torch.int32, device=device)
    before = pool.clone()
    prefill(case, pool, checkpoint_offsets=none, checkpoint_indices=none + 5)
    assert_same_bits("pool", pool, before)


def test_opcheck_and_fullgraph(device: torch.device) -> None:
    torch._dynamo.reset()
    case = make_case(130, K, V, B=2, H=1, HV=HV).to(device)
    numbers = {"checkpoint_offsets": torch.tensor([128, 64]), "checkpoint_indices": torch.tensor([7, 2])}
    names = ("q", "k", "v", "g", "beta")
    call = dict(zip(names, inputs_of(case), strict=True)) | {"state_pool": random_pool(device)}
    opcheck("chunk_gated_delta_rule_", call | {name: x.to(device) for name, x in numbers.items()}, device)
    pool, same = random_pool(device), random_pool(device)
    prefill(case, pool, **numbers)
    torch.compile(prefill, fullgraph=True, backend="aot_eager")(case, same, **numbers)
    assert_same_bits("pool", same, pool)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_has_run(algorithm: str) -> None:
    """The tests above force this algorithm with a parameter; here its kernels must run."""
    device = ready("mps")
    case = make_case(64, K, V, H=1, HV=HV).to(device)
    with prefill_algorithm(algorithm), kernels_run(device, *ALGORITHMS[algorithm]):
        prefill(case, random_pool(device))
