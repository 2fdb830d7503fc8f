"""Tests what each prefill algorithm on Metal does alone, and how you force one.

Other tests name the algorithms that they run on (tests/helpers/prefill.py). test_tune.py tests which one a call takes.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.helpers import kda
from tests.helpers.cases import assert_exact, make_case, run
from tests.helpers.devices import kernels_run, ready
from tests.helpers.golden import assert_as_exact_as_fla, load
from tests.helpers.prefill import on_mps
from torch_gdn import _C
from torch_gdn.tools.prefill import prefill_algorithm
from torch_gdn_check.fake_mps import fake_mps
from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.registry import launches_at

pytestmark = pytest.mark.sweep(6)

OP = "chunk_gated_delta_rule"


@pytest.mark.parametrize("device", ["mps-fused_chunk"], indirect=True)
def test_a_state_that_hardly_decays(device: torch.device) -> None:
    """In 500 chunks of 8 tokens, a decay that is rounded alike in each would be off by 4e-6 at the end."""
    case = make_case(4000, 128, 16, HV=1)
    case.g = torch.full_like(case.g, -3e-5)
    case.beta = case.beta * 1e-3
    assert_exact(OP, case, run(OP, case, device))


@on_mps()
def test_states_between_chunks_come_from_the_chunked_algorithm(device: torch.device) -> None:
    case = make_case(40, 32, 16).to(device)
    with kernels_run(device, "chunk_fwd_h"):
        h = torch.ops.gdn.chunk_gated_delta_rule(
            *case.qkv, case.g, case.beta, chunk_size=32, return_intermediate_states=True
        )[2]
    assert h.shape == (1, 2, 2, 32, 16)


@pytest.mark.parametrize("chunk_size", [8, 16, 32])
@pytest.mark.parametrize("name", ["ragged_k64", "same_keys"])
def test_chunk_sizes_of_the_fused_chunk_algorithm(name: str, chunk_size: int) -> None:
    mps, in_f32 = ready("mps"), load(name).case.map(torch.Tensor.float)
    with (
        kernels_run(mps, f"fused_chunk_gated_delta_rule_bfloat_64_{chunk_size}_4"),
        prefill_algorithm("fused_chunk", chunk_size),
    ):
        assert_as_exact_as_fla(name, OP, mps)
    with (
        kernels_run(mps, f"fused_chunk_gated_delta_rule_float_64_{chunk_size}_4"),
        prefill_algorithm("fused_chunk", chunk_size),
    ):
        assert_exact(OP, in_f32, run(OP, in_f32, mps))


def test_the_largest_chunk_has_one_tile_of_keys() -> None:
    """With a second tile of k, the kernel would need more than 32 KB of threadgroup memory."""
    case, mps = make_case(40, 96, 16, HV=1).map(torch.Tensor.bfloat16), ready("mps")
    with kernels_run(mps, "fused_chunk_gated_delta_rule_bfloat_96_32_4"), prefill_algorithm("fused_chunk", 32):
        assert_exact(OP, case, run(OP, case, mps))


@pytest.mark.parametrize(("K", "size"), [(56, 32), (57, 16)])
def test_the_largest_chunk_with_channel_decays(K: int, size: int) -> None:
    ready("mps")
    entry = REGISTRY[kda.CHUNK]
    point = replace(entry.small, K=K, algorithm="fused_chunk", fused_chunk_size=32)
    (launch,) = launches_at(entry, point, fake_mps())
    assert launch.variant.arguments[:3] == ("float", str(K), str(size))


@pytest.mark.parametrize(
    ("K", "element_bytes", "sizes"),
    [(64, 2, (16, 8, 16, 32)), (128, 2, (16, 8, 16, 32)), (256, 2, (8, 8, 16, 8)), (128, 4, (8, 8, 16, 8))],
)
def test_a_chunk_that_does_not_fit_threadgroup_memory(K: int, element_bytes: int, sizes: tuple[int, ...]) -> None:
    """`sizes` are the chunk sizes of calls that request none, 8, 16 or 32."""
    assert tuple(_C.fused_chunk_size(K, element_bytes, wanted) for wanted in (0, 8, 16, 32)) == sizes


def test_an_algorithm_is_forced_until_the_end_of_its_block_in_its_thread() -> None:
    with prefill_algorithm("chunked"):
        with ThreadPoolExecutor(1) as other:
            assert other.submit(_C.forced_prefill_algorithm).result() is None
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


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_blocks_that_force_an_algorithm_may_end_in_any_order_and_on_any_thread(
    order: tuple[int, ...], elsewhere: bool
) -> None:
    forced = ["chunked", None, "recurrent"]
    opened = [prefill_algorithm(algorithm) for algorithm in forced]
    still = {0, 1, 2}
    with ThreadPoolExecutor(1) as other:
        for block in opened:
            block.__enter__()
        for number in order:
            assert (_C.forced_prefill_algorithm() or (None,))[0] == forced[max(still)]
            if elsewhere:
                other.submit(opened[number].__exit__, None, None, None).result()
            else:
                opened[number].__exit__(None, None, None)
            still.remove(number)
            assert other.submit(_C.forced_prefill_algorithm).result() is None
    assert _C.forced_prefill_algorithm() is None


def test_an_unknown_algorithm_is_refused() -> None:
    words = r"expected one of 'chunked', 'fused_chunk', 'recurrent' or None, got 'quick'"
    with pytest.raises(ValueError, match=words), prefill_algorithm("quick"):
        pass


@pytest.mark.parametrize(("algorithm", "chunk_size"), [("fused_chunk", 64), ("fused_chunk", -8), ("chunked", 16)])
def test_an_unknown_chunk_size_is_refused(algorithm: str, chunk_size: int) -> None:
    words = f"expected 8, 16 or 32 with 'fused_chunk', or 0, got {chunk_size} with '{algorithm}'"
    with pytest.raises(ValueError, match=words), prefill_algorithm(algorithm, chunk_size):
        pass
