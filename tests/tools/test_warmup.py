from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.devices import ready
from torch_gdn import _C

SHAPE = (1, 2, 40, 24)  # head sizes that no other test has


def names() -> set[str]:
    return {facts["name"] for facts in _C.pipelines()}


def test_compiles_what_calls_need() -> None:
    device = ready("mps")
    compiled = torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False)
    assert compiled and set(compiled) <= names()
    before = names()
    q, v, g = torch.ones(1, 70, 1, 40), torch.ones(1, 70, 2, 24), torch.zeros(1, 70, 2)
    inputs = [x.to(device) for x in (q, q, v, g)]
    torch_gdn.chunk_gated_delta_rule(*inputs, beta=inputs[-1], use_qk_l2norm_in_kernel=True, output_final_state=True)
    torch_gdn.fused_recurrent_gated_delta_rule(*inputs, beta=inputs[-1], use_qk_l2norm_in_kernel=True)
    assert names() == before


def test_compiles_nothing_twice() -> None:
    device = ready("mps")
    torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False)
    assert torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False) == []


def test_has_nothing_to_compile_on_the_cpu() -> None:
    assert torch_gdn.warmup([SHAPE], device="cpu", progress=False) == []


def test_shows_a_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    compiled = torch_gdn.warmup([(1, 1, 20, 12)], device=ready("mps"), dtypes=[torch.float32])
    assert f"{len(compiled)}/{len(compiled)}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        ((1, 2, 257, 64), torch.float32, ValueError, "K"),
        ((2, 3, 64, 64), torch.float32, ValueError, "multiple"),
        ((1, 2, 64, 64), torch.float64, TypeError, "dtype"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_refuses_what_the_ops_refuse(
    device: str, shape: tuple[int, int, int, int], dtype: torch.dtype, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        torch_gdn.warmup([shape], device=ready(device), dtypes=[dtype], progress=False)


def test_pipelines_have_facts() -> None:
    torch_gdn.warmup([SHAPE], device=ready("mps"), dtypes=[torch.float32], progress=False)
    for facts in _C.pipelines():
        assert facts["compile_seconds"] >= 0
        assert facts["thread_execution_width"] == 32
        assert 32 <= facts["max_total_threads_per_threadgroup"] <= 1024
        assert 0 <= facts["static_threadgroup_memory_length"] <= 32768


def test_cleared_pipelines_are_compiled_again() -> None:
    device = ready("mps")
    first = torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False)
    _C.clear_pipelines()
    assert _C.pipelines() == []
    again = torch_gdn.warmup([SHAPE], device=device, dtypes=[torch.float32], progress=False)
    assert set(first) <= set(again)


def test_the_device_has_facts() -> None:
    ready("mps")
    facts = _C.device_facts()
    assert facts["name"] and facts["core_count"] > 0
    assert facts["max_threadgroup_memory_length"] == 32768
    assert facts["max_buffer_length"] > 0 and facts["recommended_max_working_set_size"] > 0
