"""Provides the devices that tests run on, and says which kernels ran there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import pytest
import torch

from torch_gdn_check.device import check_use
from torch_gdn_check.steps import Skipped

Result = TypeVar("Result")
DEVICES = ("cpu", "mps")


def ready(name: str) -> torch.device:
    """Returns the device. On a machine without a Mac's GPU, `mps` is the simulated one."""
    if name == "mps" and not on_a_mac():
        import mps_simulator

        mps_simulator.activate()
    elif name == "mps" and why_unusable():
        pytest.skip(why_unusable())
    return torch.device(name)


@cache
def why_unusable() -> str:
    """Returns why the GPU of a virtual Mac, as in hosted workflows, cannot allocate, or an empty string."""
    try:
        check_use(torch.device("mps"))
    except Skipped as reason:
        return str(reason)
    return ""


def on_a_mac() -> bool:
    return sys.platform == "darwin" and torch.backends.mps.is_available()


@contextmanager
def inductor_runs(name: str) -> Iterator[None]:
    """Lets the simulated device run Inductor's kernels.

    Their reductions leave lanes out, and then all threads write the same result without a barrier.
    """
    if name == "cpu" or on_a_mac():
        yield
        return
    import mps_simulator

    ready(name)
    with mps_simulator.settings(all_lanes=False, watch=False):
        yield


def with_unwritten_rows(x: torch.Tensor, dim: int, rows: slice) -> torch.Tensor:
    """Returns a copy whose `rows` are unwritten memory, which the simulated device lets no kernel read. On the CPU they
    are NaN.
    """
    copy = torch.empty_like(x) if x.device.type == "mps" else torch.full_like(x, torch.nan)
    for kept in (slice(0, rows.start), slice(rows.stop, x.shape[dim])):
        copy.narrow(dim, kept.start, kept.stop - kept.start).copy_(x.narrow(dim, kept.start, kept.stop - kept.start))
    return copy


def profiled(detailed: bool = False) -> Any:
    """Returns what the simulated device counts in a block. A Mac has no such profile."""
    import mps_simulator

    return mps_simulator.profile(detailed=detailed)


@contextmanager
def kernels_run(device: torch.device, *kernels: str) -> Iterator[None]:
    """Asserts, where profiles exist, that the body launches a variant of each of these kernels ("this or that")."""
    if device.type != "mps" or on_a_mac():
        yield
        return
    with profiled() as profile:
        yield
    launched = sorted(profile.kernels)
    for kernel in kernels:
        names = tuple(f"{name}_" for name in kernel.split(" or "))
        assert any(name.startswith(names) for name in launched), f"no {kernel} among the kernels {launched}"


def by_threads(run: Callable[[], Result], *counts: int) -> list[Result]:
    """Returns the results of `run` with these numbers of threads on the CPU."""
    before, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    return results


def launched(device: torch.device, kernel: str, op: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Returns the op's result, and asserts that its kernel ran."""
    with kernels_run(device, kernel):
        return op(*args, **options)
