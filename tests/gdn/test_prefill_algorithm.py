"""The algorithms in which Metal goes through a prompt: each of them, and which one is taken.

The other tests run the chunked algorithm. Those of them that ask something of the mathematics are called here again on
the other two; the recurrent one is the recurrent op's kernel, and needs less of that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.gdn import test_always_exercised as always
from tests.gdn import test_chunk_gated_delta_rule as chunked
from tests.gdn import test_encoder as encoder
from tests.gdn import test_gated_delta_rule_options as options
from tests.gdn import test_gated_delta_rule_pool as pools
from tests.helpers.cases import assert_exact, make_case, run
from tests.helpers.devices import kernels_run, on_a_mac, ready
from tests.helpers.golden import load
from torch_gdn import _C
from torch_gdn.check import golden as recorded
from torch_gdn.tune import prefill_algorithm

OP = "chunk_gated_delta_rule"
OTHERS = ("fused_chunk", "recurrent")
each_algorithm = pytest.mark.parametrize("algorithm", _C.prefill_algorithms())
bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32

IN_BOTH: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (always.test_dtypes, {"dtype": float32, "state": True}),
    (always.test_dtypes, {"dtype": bfloat16, "state": False}),
    (always.test_one_gate_throughout, {"g": -1e3}),
    (always.test_head_sizes, {"K": 60, "V": 60}),
    (always.test_views_of_a_fused_projection, {"dtype": bfloat16, "offset": 1}),
    (always.test_packed_and_empty_sequences, {"index_dtype": torch.int32, "where": "on the device"}),
    (always.test_state_v_first, {"initial": True}),
    (always.test_normalises_q_and_k, {}),
    (always.test_nan_and_inf_stay_in_their_head_and_sequence, {"tensor": "k", "value": torch.nan}),
    (options.test_raw_gates_and_steps_of_strided_views, {}),
    (options.test_tiled_heads, {"H": 2, "HV": 6}),
    (options.test_a_float32_output, {"dtype": bfloat16}),
    (pools.test_slots, {"null_index": 0, "dtype": bfloat16}),
    (pools.test_packed_and_empty_sequences, {}),
    (pools.test_wrong_indices_on_the_device, {"indices": [2, 7], "words": "below the number of slots"}),
    (chunked.test_scale, {}),
    (encoder.test_wrong_boundaries_on_the_device_are_reported_at_the_next_synchronisation, {}),
    (encoder.test_boundaries_far_outside_the_tensor_lead_nowhere, {}),
]
FUSED: list[tuple[Callable[..., None], dict[str, Any]]] = [
    *((always.test_dtypes, {"dtype": dtype, "state": True}) for dtype in (bfloat16, float16)),
    *((always.test_one_gate_throughout, {"g": g}) for g in (0.0, -1e-3, -20.0, -torch.inf)),
    *((always.test_a_strong_gate_among_weak_ones, {"g": g}) for g in (-1e3, -torch.inf)),
    *((always.test_a_reset_leaves_no_trace_of_a_large_state, {"g": g}) for g in (-20.0, -torch.inf)),
    (always.test_large_steps, {"beta": 1.9}),
    *((always.test_repeated_keys, {"beta": 1.9, "decay": decay}) for decay in (False, True)),
    (always.test_value_heads_per_key_head, {"ratio": 3}),
    *((always.test_lengths, {"T": T}) for T in (0, 1, 63, 65)),
    (always.test_a_long_odd_length, {}),
    *((always.test_head_sizes, {"K": K, "V": V}) for K, V in ((96, 192), (100, 128), (192, 96), (256, 512))),
    *((always.test_the_smallest_and_the_largest_heads, {"K": K, "V": V}) for K, V in ((1, 1), (3, 5))),
    (always.test_views_of_gates_and_states, {}),
    (always.test_one_key_for_the_whole_batch, {}),
    (always.test_packed_sequences_are_the_sequences_alone, {}),
    (always.test_many_short_sequences, {}),
    (always.test_gates_and_steps_of_16_bits, {"dtype": bfloat16}),
    (always.test_large_values_in_half_precision, {}),
    (always.test_same_inputs_same_bits, {"repeat": True}),
    (always.test_nan_and_inf_stay_in_their_head_and_sequence, {"tensor": "q", "value": torch.inf}),
    (always.test_nan_and_inf_stay_in_their_head_and_sequence, {"tensor": "v", "value": torch.nan}),
    (always.test_nan_and_inf_stay_in_their_head_and_sequence, {"tensor": "beta", "value": torch.inf}),
    (always.test_an_initial_state_with_nan_stays_in_its_head, {"value": torch.nan}),
    (options.test_gates_in_the_kernel, {"dtype": bfloat16, "bias": True}),
    (options.test_sigmoid_of_beta_in_the_kernel, {"dtype": float32, "doubled": True}),
    (options.test_a_float32_output_holds_what_float16_cannot, {}),
    (options.test_an_initial_state_of_16_bits, {"dtype": float16}),
    (pools.test_state_v_first_and_a_transposed_pool, {}),
    (pools.test_takes_the_options, {}),
    (pools.test_wrong_indices_on_the_device, {"indices": [2, 2], "words": "each slot at most once"}),
    (pools.test_fullgraph_gives_the_same_bits, {}),
    (chunked.test_two_calls_go_on_where_the_first_stopped, {}),
    (chunked.test_chunk_indices_change_nothing, {}),
    (encoder.test_too_few_chunk_indices_are_reported, {}),
]
CALLED = [("fused_chunk", *each) for each in (*IN_BOTH, *FUSED)] + [("recurrent", *each) for each in IN_BOTH]


def name_of(called: tuple[str, Callable[..., None], dict[str, Any]]) -> str:
    algorithm, test, arguments = called
    return "-".join([algorithm, test.__name__.removeprefix("test_"), *map(str, arguments.values())])


@pytest.mark.parametrize(("algorithm", "test", "arguments"), CALLED, ids=map(name_of, CALLED))
def test_of_another_way(algorithm: str, test: Callable[..., None], arguments: dict[str, Any]) -> None:
    """As `test` itself; `run` sees the kernels of this algorithm run."""
    device = ready("mps")
    given = {"device": device, "mps": device, "op": OP} | arguments
    with prefill_algorithm(algorithm):
        test(**{name: given[name] for name in inspect.signature(test).parameters})


@pytest.mark.parametrize("name", ["base_k128", "varlen_k128", "wide_k256", "half_k128", "strong_gate", "same_keys"])
@pytest.mark.parametrize("algorithm", OTHERS)
def test_is_as_exact_as_fla(algorithm: str, name: str) -> None:
    golden = load(name)
    with prefill_algorithm(algorithm):
        for part in recorded.whole_parts(golden, OP, *run(OP, golden.case, ready("mps"))):
            assert part.kept, str(part)


@pytest.mark.parametrize("algorithm", OTHERS)
def test_recorded_inputs_in_float32(algorithm: str) -> None:
    wide = load("same_keys").case.map(torch.Tensor.float)
    with prefill_algorithm(algorithm):
        assert_exact(OP, wide, run(OP, wide, ready("mps")))


def test_the_fused_way_keeps_a_state_that_hardly_decays() -> None:
    """500 chunks of 8 tokens: a decay rounded alike in each of them would be off by 4e-6 at the end."""
    case = make_case(4000, 128, 16, HV=1)
    case.g = torch.full_like(case.g, -3e-5)
    case.beta = case.beta * 1e-3
    with prefill_algorithm("fused_chunk"):
        assert_exact(OP, case, run(OP, case, ready("mps")))


def test_states_between_chunks_are_staged() -> None:
    case = make_case(40, 32, 16).to(ready("mps"))
    with prefill_algorithm("fused_chunk"):
        h = torch.ops.gdn.chunk_gated_delta_rule(
            *case.qkv, case.g, case.beta, chunk_size=32, return_intermediate_states=True
        )[2]
    assert h.shape == (1, 2, 2, 32, 16)


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not say which kernels ran")
@pytest.mark.parametrize("algorithm", OTHERS)
def test_is_one_dispatch_from_what_the_projections_give(algorithm: str) -> None:
    import simulator

    case = make_case(20, 64, 32, H=1, HV=2, dtype=bfloat16, normal=False)
    given = options.raw_gates(case, bfloat16) | options.raw_steps(case, bfloat16) | {"use_qk_l2norm_in_kernel": True}
    there = case.to(ready("mps"))
    given = {name: x.to("mps") if isinstance(x, Tensor) else x for name, x in given.items()}
    with prefill_algorithm(algorithm), simulator.profile() as profile:
        torch_gdn.chunk_gated_delta_rule(*there.qkv, **(there.options | given))
    assert sum(figures.dispatches for figures in profile.kernels.values()) == 1 and not profile.fallbacks


@pytest.mark.parametrize("chunk_size", [8, 16, 32])
@pytest.mark.parametrize("name", ["ragged_k64", "same_keys"])
def test_chunks_of_the_fused_way(name: str, chunk_size: int) -> None:
    golden, mps = load(name), ready("mps")
    wide = golden.case.map(torch.Tensor.float)
    with (
        kernels_run(mps, f"fused_chunk_gated_delta_rule_bfloat_64_{chunk_size}_4"),
        prefill_algorithm("fused_chunk", chunk_size),
    ):
        for part in recorded.whole_parts(golden, OP, *run(OP, golden.case, mps)):
            assert part.kept, str(part)
    with (
        kernels_run(mps, f"fused_chunk_gated_delta_rule_float_64_{chunk_size}_4"),
        prefill_algorithm("fused_chunk", chunk_size),
    ):
        assert_exact(OP, wide, run(OP, wide, mps))


@pytest.mark.parametrize(
    ("K", "element_bytes", "sizes"),
    [(64, 2, (16, 8, 16, 32)), (128, 2, (16, 8, 16, 32)), (256, 2, (8, 8, 16, 8)), (128, 4, (8, 8, 16, 8))],
)
def test_a_chunk_without_room_is_of_another_size(K: int, element_bytes: int, sizes: tuple[int, ...]) -> None:
    assert tuple(_C.fused_chunk_size(K, element_bytes, wanted) for wanted in (0, 8, 16, 32)) == sizes


def test_a_way_is_forced_until_the_end_of_its_block() -> None:
    with prefill_algorithm("chunked"):
        with prefill_algorithm("fused_chunk", 32):
            assert _C.forced_prefill_algorithm() == ("fused_chunk", 32)
            with prefill_algorithm("recurrent"):
                assert _C.forced_prefill_algorithm() == ("recurrent", 0)
            assert _C.forced_prefill_algorithm() == ("fused_chunk", 32)
        with prefill_algorithm(None):
            assert _C.forced_prefill_algorithm() is None
        with pytest.raises(KeyError), prefill_algorithm("fused_chunk"):
            raise KeyError
        assert _C.forced_prefill_algorithm() == ("chunked", 0)


def test_an_unknown_way_is_refused() -> None:
    words = r"expected one of 'chunked', 'fused_chunk', 'recurrent' or None, got 'quick'"
    with pytest.raises(ValueError, match=words), prefill_algorithm("quick"):
        pass


@pytest.mark.parametrize(("algorithm", "chunk_size"), [("fused_chunk", 64), ("fused_chunk", -8), ("chunked", 16)])
def test_an_unknown_chunk_is_refused(algorithm: str, chunk_size: int) -> None:
    words = f"expected 8, 16 or 32 with 'fused_chunk', or none, got {chunk_size} with '{algorithm}'"
    with pytest.raises(ValueError, match=words), prefill_algorithm(algorithm, chunk_size):
        pass
