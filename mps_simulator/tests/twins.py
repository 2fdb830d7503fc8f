"""Kernels with one fault, and their correct twins: the same source with another text in one place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import mps_simulator
from metal_programs import Argument, run
from mps_simulator import settings

N = 64
SEEDS = (0, 5)
THREAD = r"thread \(\d+, 0, 0\) of threadgroup \(\d+, 0, 0\)"
RACE = r"(reads what thread .* wrote|writes what thread .* read|writes what thread .* wrote)"
RACE_IN_TILE = [r"data race at threadgroup array 'tile', element \d+ \(byte offset \d+\)", THREAD, RACE]
PARAMETERS = (
    "device const float* source [[buffer(0)]], device float* out [[buffer(1)]], uint i [[thread_position_in_grid]]"
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
TILE = f"threadgroup float tile[64]; tile[i] = -1; {BARRIER}"
IN_GROUP = "uint t [[thread_index_in_threadgroup]], uint group [[threadgroup_position_in_grid]]"


def thread(i: int) -> str:
    return rf"thread \({i}, 0, 0\) of threadgroup \(0, 0, 0\)"


def ramp(count: int = N) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).to("mps")


def unwritten(count: int = N) -> torch.Tensor:
    return torch.empty(count, device="mps")


@dataclass(frozen=True)
class Twin:
    """`program` is the body of a kernel with `parameters`, or contains a kernel. `texts` replace its "@".

    `texts` are the faulty one and the correct one. `arguments` are made anew for each run, and the last one is the
    output. The fault's text must match `words`.
    """

    name: str
    program: str
    texts: tuple[str, str]
    words: Sequence[str]
    expected: Callable[[], torch.Tensor] = lambda: torch.arange(N, dtype=torch.float32)
    arguments: Callable[[], list[Argument]] = lambda: [ramp(), unwritten()]
    threadgroups: int = 1
    threads: int = N
    threadgroup_memory: Mapping[int, int] = field(default_factory=dict)
    parameters: str = PARAMETERS

    def source(self, faulty: bool) -> str:
        program = self.program.replace("@", self.texts[0 if faulty else 1])
        return program if "kernel void" in program else f"kernel void twin({self.parameters}) {{\n{program}\n}}\n"

    def run(self, faulty: bool) -> torch.Tensor:
        arguments = self.arguments()
        run(
            self.source(faulty),
            arguments,
            threadgroups=self.threadgroups,
            threads=self.threads,
            threadgroup_memory=self.threadgroup_memory,
        )
        output = arguments[-1]
        assert isinstance(output, torch.Tensor)
        return output.cpu()

    def must_fault(self, seed: int) -> None:
        with settings(seed=seed), pytest.raises(mps_simulator.Fault) as fault:
            self.run(faulty=True)
        kernel = re.findall(r"kernel void (\w+)\(", self.source(True))[0]
        for words in [f"kernel '{kernel}': ", *self.words]:
            assert re.search(words, str(fault.value)), f"no {words!r} in: {fault.value}"

    def must_pass(self, seed: int, workers: int) -> None:
        with settings(seed=seed, workers=workers):
            assert torch.equal(self.run(faulty=False), self.expected())


def each(twins: Sequence[Twin]) -> Any:
    """Runs a test of `twin` and `seed` for all of them."""
    by_name = pytest.mark.parametrize("twin", twins, ids=[twin.name for twin in twins])
    by_seed = pytest.mark.parametrize("seed", SEEDS)
    return lambda test: by_name(by_seed(test))


def both_tests(twins: Sequence[Twin]) -> tuple[Any, Any]:
    @each(twins)
    def test_the_fault_is_reported(twin: Twin, seed: int) -> None:
        twin.must_fault(seed)

    @pytest.mark.parametrize("workers", [1, 2])
    @each(twins)
    def test_the_correct_twin_passes(twin: Twin, seed: int, workers: int) -> None:
        twin.must_pass(seed, workers)

    return test_the_fault_is_reported, test_the_correct_twin_passes
