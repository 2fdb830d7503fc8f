"""Runs one small Metal kernel on the simulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch

import mps_simulator
import mps_simulator.metal

Argument: TypeAlias = (
    torch.Tensor | int | float | bytes | tuple[torch.Tensor, int] | None
)  # a pair is a tensor and a byte offset
Grid: TypeAlias = int | tuple[int, ...]

HEADER = """
#include <metal_stdlib>
using namespace metal;
"""


@cache
def _pipeline(source: str, macros: tuple[str, ...]) -> Any:
    library = mps_simulator.metal.Library(HEADER + source, macros=dict.fromkeys(macros, 1))
    (name,) = library.functions
    return library, library.pipeline(name)


def _size(grid: Grid) -> tuple[int, ...]:
    grid = (grid,) if isinstance(grid, int) else grid
    return (*grid, *(1,) * (3 - len(grid)))


def run(
    source: str,
    arguments: Sequence[Argument],
    *,
    threadgroups: Grid = 1,
    threads: Grid = 64,
    grid: Grid | None = None,
    threadgroup_memory: Mapping[int, int] | None = None,
    macros: Sequence[str] = (),
) -> None:
    """Dispatches the only kernel of `source` and waits for it."""
    _, pipeline = _pipeline(source, tuple(macros))
    dispatch(pipeline, arguments, threads, threadgroups, grid, threadgroup_memory)


def dispatch(
    pipeline: Any,
    arguments: Sequence[Argument],
    threads: Grid = 1,
    threadgroups: Grid = 1,
    grid: Grid | None = None,
    threadgroup_memory: Mapping[int, int] | None = None,
) -> None:
    """Dispatches a kernel and waits for it. `grid` is the number of threads, for dispatchThreads."""
    with mps_simulator.metal.encoder() as encoder:
        encoder.set_pipeline(pipeline)
        for index, argument in enumerate(arguments):
            if isinstance(argument, tuple):
                encoder.set_buffer(argument[0], index, argument[1])
            elif isinstance(argument, torch.Tensor):
                encoder.set_buffer(argument, index)
            elif argument is not None:
                encoder.set_bytes(argument, index)
        for index, length in (threadgroup_memory or {}).items():
            encoder.set_threadgroup_memory(length, index)
        if grid is None:
            encoder.dispatch_threadgroups(_size(threadgroups), _size(threads))
        else:
            encoder.dispatch_threads(_size(grid), _size(threads))
    torch.mps.synchronize()


def figures(
    source: str,
    arguments: Sequence[Argument],
    *,
    threadgroups: Grid = 1,
    threads: Grid = 32,
    threadgroup_memory: Mapping[int, int] | None = None,
    detailed: bool = True,
) -> Any:
    """Runs the only kernel of `source`, and returns what a profile counts."""
    with mps_simulator.profile(detailed) as profile:
        run(source, arguments, threadgroups=threadgroups, threads=threads, threadgroup_memory=threadgroup_memory)
    (kernel,) = profile.kernels.values()
    return kernel
