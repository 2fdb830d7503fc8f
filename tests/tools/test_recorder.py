"""Tests torch_gdn.recording, which lists the launches of a thread and does not run them."""

from __future__ import annotations

import threading

import pytest
import torch

import torch_gdn
from tests.helpers.devices import on_a_mac, profiled, ready
from torch_gdn import _C
from torch_gdn._recorder import KernelVariant

SIZE = 44  # no other test has rows of this size


def compiled() -> set[str]:
    return {facts["name"] for facts in _C.pipelines()}


def test_a_launch_is_listed_and_nothing_is_compiled() -> None:
    x = torch.ones(5, SIZE, device=ready("mps"))
    with torch_gdn.recording() as recorded:
        y = torch_gdn.l2norm(x)
        torch_gdn.l2norm(x)
    assert y.shape == x.shape and y.device == x.device
    variant = KernelVariant("l2norm", "layers/l2norm.metal", ("float", str(SIZE)))
    assert recorded.variants == [variant] and variant.name == f"l2norm_float_{SIZE}"
    first, second = recorded.launches
    assert first == second and first.variant == variant
    assert (first.bindings, first.threadgroups, first.threads) == (4, (2, 1, 1), 128)
    assert variant.name not in compiled()


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not say which kernels ran")
def test_a_recorded_variant_is_what_runs_without_the_recording() -> None:
    device = ready("mps")
    q, g = torch.ones(1, 9, 1, 40, device=device), torch.zeros(1, 9, 2, device=device)
    v = torch.ones(1, 9, 2, 24, device=device)
    with torch_gdn.recording() as recorded:
        torch_gdn.chunk_gated_delta_rule(q, q, v, g, g, use_qk_l2norm_in_kernel=True)
    with profiled() as profile:
        torch_gdn.chunk_gated_delta_rule(q, q, v, g, g, use_qk_l2norm_in_kernel=True)
    names = {variant.name for variant in recorded.variants}
    assert names == {name for name in profile.kernels if name.startswith(("chunk_", "fused_", "l2norm"))}
    for variant in recorded.variants:
        launches = [launch for launch in recorded.launches if launch.variant == variant]
        assert profile.launched(variant.name) == len(launches)
        threads = sum(launch.threads * torch.Size(launch.threadgroups).numel() for launch in launches)
        assert profile.kernels[variant.name].threads == threads


def test_other_threads_run_their_kernels() -> None:
    x = torch.ones(3, SIZE + 4, device=ready("mps"))
    found = {}

    def call() -> None:
        found["y"] = torch_gdn.l2norm(x).cpu()

    with torch_gdn.recording() as recorded:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert recorded.launches == []
    torch.testing.assert_close(found["y"], torch.full((3, SIZE + 4), (SIZE + 4) ** -0.5))


def test_an_inner_recording_takes_the_launches() -> None:
    x = torch.ones(3, SIZE, device=ready("mps"))
    with torch_gdn.recording() as outer:
        torch_gdn.l2norm(x)
        with torch_gdn.recording() as inner:
            torch_gdn.l2norm(x.half())
        torch_gdn.l2norm(x.bfloat16())
    assert [variant.arguments[0] for variant in outer.variants] == ["float", "bfloat"]
    assert [variant.arguments[0] for variant in inner.variants] == ["half"]


def test_an_error_ends_the_recording() -> None:
    x = torch.ones(3, 64, device=ready("mps"))
    with pytest.raises(ValueError, match="eps"), torch_gdn.recording():
        torch_gdn.l2norm(x, eps=-1.0)
    torch.testing.assert_close(torch_gdn.l2norm(x).cpu(), torch.full((3, 64), 0.125))


def test_a_launch_without_threadgroups_is_none() -> None:
    with torch_gdn.recording() as recorded:
        torch_gdn.l2norm(torch.ones(0, 64, device=ready("mps")))
    assert recorded.launches == []


def test_the_device_is_the_real_one() -> None:
    ready("mps")
    facts = _C.device_facts()
    with torch_gdn.recording():
        assert _C.device_facts() == facts


def test_a_variant_is_compiled_without_a_call() -> None:
    ready("mps")
    facts = _C.compile("l2norm", "layers/l2norm.metal", ["float", "20"])
    assert facts["name"] == "l2norm_float_20"
    assert facts in _C.pipelines()


def test_an_error_of_the_compiler_comes_in_full() -> None:
    ready("mps")
    with pytest.raises(RuntimeError) as caught:
        _C.compile("solve_tril", "gdn/solve_tril.metal", ["65"])
    text = str(caught.value)
    assert "could not compile solve_tril_65" in text
    assert "gdn/solve_tril.metal:" in text and "a chunk has 16, 32 or 64 tokens" in text and "instantiation" in text
