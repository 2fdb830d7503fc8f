"""Replays recorded launches on the GPU, for a tool that watches the process: `python -m evidence.lab.cuda.replay RECORD
CUBINS`, then `PART PARTS` for every PARTS-th case from PART on, `kernels` for one case of each kernel, or a planted
fault's name.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evidence.lab.cuda.compiling import PROBES
from evidence.lab.cuda.conflicts import first_of_each_kernel
from evidence.lab.cuda.gpu import NOT_WRITTEN, SHARED_BYTES, Buffer, Gpu, Prepared
from evidence.lab.cuda.record import (
    Binding,
    Bytes,
    CaseRecord,
    Fill,
    LaunchRecord,
    Reader,
    allowed,
    error,
    exact_numbers,
    numbers,
)

LOG_BYTES = 4 + 30 * 512  # shaders/core/error.h
PATTERNS = (0, 0xFFFFFFFF)  # threadgroup memory holds one before a launch: zeros, NaN
FINITE = 0x3C  # each byte of timed buffers; makes a small number in every float dtype
CACHE_BYTES = 256 << 20  # exceeds the GPU's cache, so that a timed launch finds nothing in it


class Session:
    def __init__(self, record: Path, cubins: Path) -> None:
        self.gpu, self.reader, self._cubins = Gpu(), Reader(record), cubins
        self._log = self.gpu.buffer(LOG_BYTES)
        self._log.fill(0)

    # ---- one case ----------------------------------------------------------------------------------------------------

    def prepared(self, launch: LaunchRecord, buffers: Sequence[Buffer]) -> Prepared:
        function = self.gpu.function(self._cubins / f"{launch.name}.cubin", launch.name)
        arguments = [self._argument(binding, buffers) for binding in launch.bindings]
        return Prepared(function, launch.threadgroups, launch.threads, arguments, 0)

    def _argument(self, binding: Binding, buffers: Sequence[Buffer]) -> ctypes.c_uint64 | ctypes.Array[ctypes.c_char]:
        if binding.block:
            content = self.reader.content(binding.block)
            return ctypes.create_string_buffer(content, len(content))
        if binding.is_error_log:
            return ctypes.c_uint64(self._log.address.value)
        if binding.buffer < 0:
            return ctypes.c_uint64(0)  # so that an access to what is absent faults
        return ctypes.c_uint64(buffers[binding.buffer].address.value + binding.offset)

    def fill(self, fill: Fill, buffers: Sequence[Buffer]) -> None:
        content, start = self.reader.content(fill.content), 0
        for first, last in fill.runs:
            buffers[fill.buffer].write(content[start : start + last - first], first)
            start += last - first

    def run(self, case: CaseRecord, pattern: int | None) -> dict[str, Bytes]:
        """Returns the contents of the outputs' buffers. Without a pattern, only bytes that the host wrote are set."""
        buffers = [self.gpu.buffer(size) for size in case.buffers]
        if pattern is not None:
            for buffer in buffers:
                buffer.fill(NOT_WRITTEN)
        for number, launch in enumerate(case.launches):
            for fill in case.fills:
                if fill.before == number:
                    self.fill(fill, buffers)
            if pattern is not None:
                self.fill_shared(pattern)
            self.gpu.launch(self.prepared(launch, buffers))
            self.gpu.wait()
        result = {each.name: buffers[each.buffer].read() for each in case.outputs}
        for buffer in buffers:
            buffer.free()
        return result

    def reports(self) -> int:
        """Returns the errors that kernels wrote into the log since it was last read."""
        count = int(self._log.read()[:4].view(np.uint32)[0])
        self._log.fill(0)
        return count

    # ---- threadgroup memory ------------------------------------------------------------------------------------------

    def fill_shared(self, pattern: int) -> None:
        function = self.gpu.function(self._cubins / f"{PROBES}.cubin", "fill_shared")
        self.gpu.allow_shared(function, SHARED_BYTES)
        arguments = [ctypes.c_uint32(pattern), ctypes.c_int32(SHARED_BYTES // 4)]
        self.gpu.launch(Prepared(function, (2 * self.gpu.multiprocessors, 1, 1), 1024, arguments, SHARED_BYTES))

    def share_still_filled(self, pattern: int) -> float:
        """Returns the share of words in shared memory that still have fill_shared's pattern in the next kernel."""
        count = self.gpu.buffer(4)
        count.fill(0)
        self.fill_shared(pattern)
        function = self.gpu.function(self._cubins / f"{PROBES}.cubin", "count_shared")
        groups = self.gpu.multiprocessors
        arguments = [ctypes.c_uint32(pattern), ctypes.c_uint64(count.address.value)]
        self.gpu.launch(Prepared(function, (groups, 1, 1), 128, arguments, 0))
        self.gpu.wait()
        return int(count.read().view(np.uint32)[0]) / (groups * 8192)

    def planted(self, fault: str) -> None:
        function = self.gpu.function(self._cubins / f"{PROBES}.cubin", fault)
        buffer = self.gpu.buffer(128 * 4)
        self.gpu.launch(Prepared(function, (1, 1, 1), 128, [ctypes.c_uint64(buffer.address.value)], 0))
        self.gpu.wait()


# ---- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """An output's error on the GPU, and on the recording device."""

    case: str
    output: str
    error: float
    recorded: float
    bound: float


def unreported(session: Session, case: CaseRecord) -> list[str]:
    """Names a wrong call that kernels do not report with some content of threadgroup memory."""
    problems = []
    for pattern in PATTERNS:
        session.run(case, pattern)
        if session.reports() == 0:
            problems.append(f"{case.name}: no kernel reports it")
    return problems


def compare(session: Session, case: CaseRecord) -> tuple[list[Compared], list[str]]:
    """Runs both patterns. Returns what differs between them, is too far from float64, or was reported."""
    runs = [session.run(case, pattern) for pattern in PATTERNS]
    rows, problems = [], []
    for output in case.outputs:
        zeros, nans = (numbers(run[output.name], output) for run in runs)
        exact = exact_numbers(session.reader.content(output.exact), output)
        row = Compared(case.name, output.name, error(nans, exact), output.error, allowed(output))
        rows.append(row)
        if zeros.tobytes() != nans.tobytes():
            problems.append(f"{case.name}: {output.name} depends on what threadgroup memory held before")
        if not row.error <= row.bound:
            problems.append(f"{case.name}: {output.name}: error {row.error:.3e}, at most {row.bound:.3e} allowed")
    if count := session.reports():
        problems.append(f"{case.name}: kernels reported {count} errors")
    return rows, problems


# ---- times -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    case: str
    microseconds: float
    floor: float  # at the copy rate
    kernels: dict[str, float]  # microseconds of each kernel by itself


def timed(session: Session, case: CaseRecord, rate: float) -> Timed:
    """Times over more copies of the buffers than the cache can hold."""
    gpu = session.gpu
    copies = max(1, math.ceil(CACHE_BYTES / sum(case.buffers)))
    work, held = [], []
    for _ in range(copies):
        buffers = [gpu.buffer(size) for size in case.buffers]
        for buffer in buffers:
            buffer.fill(FINITE)
        for fill in case.fills:
            session.fill(fill, buffers)
        held += buffers
        work.append([session.prepared(launch, buffers) for launch in case.launches])
    passes = max(1, 200 // copies)
    whole = gpu.microseconds([each for launches in work for each in launches], passes) / copies
    names = [launch.name for launch in case.launches]
    alone = {
        name: gpu.microseconds([launches[i] for launches in work], passes) / copies for i, name in enumerate(names)
    }
    for buffer in held:
        buffer.free()
    return Timed(case.name, whole, case.floor_bytes / rate * 1e6, alone if len(names) > 1 else {})


def main(arguments: Sequence[str]) -> None:
    session = Session(Path(arguments[0]), Path(arguments[1]))
    cases = [case for case in session.reader.cases if not case.floor_bytes]
    if arguments[2] == "kernels":
        cases = first_of_each_kernel(cases)
    elif arguments[2].isdigit():
        cases = cases[int(arguments[2]) :: int(arguments[3])]
    else:
        return session.planted(arguments[2])
    for case in cases:
        session.run(case, None)
    print(f"{session.reports()} errors reported by kernels")


if __name__ == "__main__":
    main(sys.argv[1:])
