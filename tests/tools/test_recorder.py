"""Tests torch_gdn.recording, which lists the launches of a thread and does not run them."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

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
    result = {}

    def call() -> None:
        result["y"] = torch_gdn.l2norm(x).cpu()

    with torch_gdn.recording() as recorded:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert recorded.launches == []
    torch.testing.assert_close(result["y"], torch.full((3, SIZE + 4), (SIZE + 4) ** -0.5))


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


def on_another_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()


def assert_launches(size: int = 64) -> None:
    """Asserts that nothing records this thread. Freed memory of a recorder would be another's by now."""
    gc.collect()
    kept = [_C.Recording() for _ in range(100)]
    y = torch_gdn.l2norm(torch.ones(3, size, device=ready("mps")))
    torch.testing.assert_close(y.cpu(), torch.full((3, size), size**-0.5))
    del kept


def test_a_recording_may_end_on_another_thread() -> None:
    """Its launches are those of the thread that it began on, which launches from then on."""
    x = torch.ones(3, 64, device=ready("mps"))
    recorded = torch_gdn.recording()
    recorded.__enter__()
    torch_gdn.l2norm(x)
    on_another_thread(partial(recorded.__exit__, None, None, None))
    assert_launches()
    assert [launch.variant.kernel for launch in recorded.launches] == ["l2norm"]
    del recorded
    assert_launches()


def test_a_recording_may_begin_on_a_thread_that_has_ended() -> None:
    x = torch.ones(3, 64, device=ready("mps"))
    recorded = torch_gdn.recording()

    def begin() -> None:
        recorded.__enter__()
        torch_gdn.l2norm(x)

    on_another_thread(begin)
    assert_launches()
    recorded.__exit__(None, None, None)
    assert [launch.variant.kernel for launch in recorded.launches] == ["l2norm"]
    assert_launches()


def blocks() -> Iterator[list[Any]]:
    """Yields inside a recording. Whoever drops the generator ends it."""
    with torch_gdn.recording() as recorded:
        yield recorded.launches


@pytest.mark.parametrize("how", ["closed", "closed on another thread", "dropped", "dropped on another thread"])
def test_the_recording_of_a_generator_ends_with_it(how: str) -> None:
    x = torch.ones(3, 64, device=ready("mps"))
    generators = [blocks()]
    launches = next(generators[0])
    torch_gdn.l2norm(x)
    end = generators[0].close if how.startswith("closed") else generators.clear
    on_another_thread(end) if how.endswith("thread") else end()
    del end
    generators.clear()
    assert len(launches) == 1
    assert_launches()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_blocks_may_end_in_any_order(order: tuple[int, ...]) -> None:
    """As those of generators that take turns. The innermost one that is open takes the launches."""
    x = torch.ones(3, 64, device=ready("mps"))
    taken: list[int] = []

    def traced(launch: object) -> None:
        taken.append(1)

    gc.freeze()  # what other tests made need not be looked at after each block
    opened: list[Any] = [_C.Recording(), _C.Tracing(traced, lambda launch: None, False), _C.Recording()]
    for each in opened:
        each.start()
    torch_gdn.l2norm(x)
    expected = [0, 0, 1]
    still = {0, 1, 2}
    results: list[Any] = [None, None, None]
    for number in order:
        results[number] = opened[number].stop()
        opened[number] = None
        gc.collect()
        still.remove(number)
        if still:
            torch_gdn.l2norm(x)
            expected[max(still)] += 1
    assert [len(results[0]), len(taken), len(results[2])] == expected
    assert_launches()


def test_a_tracing_may_end_in_its_own_callback() -> None:
    x = torch.ones(3, 64, device=ready("mps"))
    tracings: list[Any] = []

    def before(launch: object) -> None:
        tracings.pop().stop()
        gc.collect()
        torch_gdn.l2norm(x)  # this drops the entry of the tracing, which is still running

    after: list[object] = []
    tracings.append(_C.Tracing(before, after.append, True))
    tracings[0].start()
    torch_gdn.l2norm(x)
    assert len(after) == 1
    assert_launches()


def test_blocks_that_nobody_ends_end_with_their_objects() -> None:
    for block in (_C.Recording(), _C.Tracing(print, print, False)):
        block.start()
        with pytest.raises(RuntimeError, match="expected a block that has not started, got one that has"):
            block.start()
    del block
    assert_launches()


def test_an_object_records_one_block_at_a_time() -> None:
    x = torch.ones(3, 64, device=ready("mps"))
    recorded = torch_gdn.recording()
    with recorded:
        with pytest.raises(RuntimeError, match="expected an object whose block has ended, got one that is recording"):
            recorded.__enter__()
        torch_gdn.l2norm(x)
    with recorded:
        torch_gdn.l2norm(x)
    assert len(recorded.launches) == 2
    with pytest.raises(RuntimeError, match="expected an object that is recording, got one whose block has ended"):
        recorded.__exit__(None, None, None)


def test_a_process_may_end_inside_blocks() -> None:
    """The thread's entries outlive Python then, and the functions of a tracing are gone."""
    program = "from torch_gdn import _C; _C.Recording().start(); _C.Tracing(print, print, True).start()\n"
    program += "t = _C.Tracing(lambda x: t, print, True); t.start(); f = _C.ForcedPrefill('chunked'); f.start()"
    assert subprocess.run([sys.executable, "-c", program], timeout=300, check=False).returncode == 0


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
