"""A record is a file of launches as the host made them: bindings, contents of buffers, and results. Reading it needs
only numpy, so that a machine with a GPU needs neither torch_gdn nor the simulated device.

The file is a zip of `index.json` and of contents, named by their hash. A case is a chain of launches over numbered
buffers. Before its first launch, a buffer is filled with the bytes that the host had written. Other bytes are
unwritten.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Binding:
    """A buffer from `offset` on, a parameter block by its hash, the error log, or nothing if none of them is set."""

    buffer: int = -1
    offset: int = 0
    block: str = ""
    is_error_log: bool = False


@dataclass(frozen=True)
class LaunchRecord:
    kernel: str
    file: str
    arguments: list[str]
    threadgroups: list[int]
    threads: int
    bindings: list[Binding]

    @property
    def name(self) -> str:
        return "_".join((self.kernel, *self.arguments))


@dataclass(frozen=True)
class Fill:
    """The content of a buffer before launch `before`: the bytes of the runs [first, last), concatenated."""

    before: int
    buffer: int
    runs: list[list[int]]
    content: str  # hash


@dataclass(frozen=True)
class Output:
    """A result of the case: `exact` in float64, or the exact bytes of integers, and the recording device's error."""

    name: str
    buffer: int
    offset: int  # in bytes
    dtype: str  # bfloat, half, float, or numpy's name for integers
    shape: list[int]
    strides: list[int]  # in elements
    exact: str  # hash
    error: float  # the recording device's


@dataclass
class CaseRecord:
    name: str
    buffers: list[int] = field(default_factory=list)  # bytes of each
    launches: list[LaunchRecord] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    floor_bytes: int = 0  # for a case to be timed, the bytes that any implementation moves
    is_wrong: bool = False  # the kernels must report it


def runs_of(marks: Bytes) -> list[list[int]]:
    """Returns [first, last) for each run of marked bytes."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marks.astype(np.int8), [0]])))
    return edges.reshape(-1, 2).tolist()


class Writer:
    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=3)
        self._kept: set[str] = set()
        self._cases: list[CaseRecord] = []

    def keep(self, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()[:24]
        if name not in self._kept:
            self._kept.add(name)
            self._zip.writestr(name, content)
        return name

    def add(self, case: CaseRecord) -> None:
        self._cases.append(case)

    def close(self) -> None:
        self._zip.writestr("index.json", json.dumps([asdict(case) for case in self._cases]))
        self._zip.close()


class Reader:
    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self.cases = [_case(row) for row in json.loads(self._zip.read("index.json"))]

    def content(self, name: str) -> bytes:
        return self._zip.read(name)

    def launches(self) -> Iterator[LaunchRecord]:
        """Returns the first launch of each variant."""
        seen: set[str] = set()
        for launch in (launch for case in self.cases for launch in case.launches):
            if launch.name not in seen:
                seen.add(launch.name)
                yield launch


def _case(row: dict[str, Any]) -> CaseRecord:
    launches = [
        LaunchRecord(**(each | {"bindings": [Binding(**binding) for binding in each["bindings"]]}))
        for each in row["launches"]
    ]
    fills = [Fill(**each) for each in row["fills"]]
    return CaseRecord(
        **(row | {"launches": launches, "fills": fills, "outputs": [Output(**o) for o in row["outputs"]]})
    )


# ---- numbers ---------------------------------------------------------------------------------------------------------


def element_bytes(dtype: str) -> int:
    return {"bfloat": 2, "half": 2, "float": 4}.get(dtype) or np.dtype(dtype).itemsize


def numbers(memory: Bytes, output: Output) -> NDArray[Any]:
    """Returns the output's elements in a buffer, in float64 for the float dtypes."""
    size = element_bytes(output.dtype)
    raw = memory[output.offset :]
    words = raw[: len(raw) // size * size].view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size])
    picked = np.lib.stride_tricks.as_strided(words, output.shape, [stride * size for stride in output.strides]).copy()
    if output.dtype == "bfloat":
        return (picked.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if output.dtype in ("half", "float"):
        return picked.view(np.float16 if output.dtype == "half" else np.float32).astype(np.float64)
    return picked.view(output.dtype)


def error(found: NDArray[Any], exact: NDArray[Any]) -> float:
    """Returns ||found - exact|| / ||exact|| for floats, or infinity if only one of two numbers is finite. For integers
    it returns the share that differs.
    """
    if found.shape != exact.shape:
        return float("inf")
    if found.dtype != np.float64:
        return float(np.mean(found != exact)) if found.size else 0.0
    finite = np.isfinite(exact)
    if not np.array_equal(finite, np.isfinite(found)):
        return float("inf")
    difference = float(np.linalg.norm(found[finite] - exact[finite]))
    size = float(np.linalg.norm(exact[finite]))
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


# Half of a record is exact numbers, so these of a float64's 52 mantissa bits are dropped. The rest is exact to 1e-6 or
# 2e-9, far below the error of an output of that type.
DROPPED_BITS = {"bfloat": 32, "half": 32, "float": 24}


def shortened(exact: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Rounds the exact numbers of an output to what the record keeps."""
    if dtype not in DROPPED_BITS:
        return exact
    mask = np.uint64(2**64 - (1 << DROPPED_BITS[dtype]))
    return (exact.view(np.uint64) & mask).view(np.float64)


def packed_exact(exact: NDArray[Any]) -> bytes:
    """Stores the first byte of all numbers, then the second, and so on. Zeros and exponents then compress to
    nothing."""
    raw = np.frombuffer(exact.tobytes(), np.uint8)
    return raw.reshape(-1, exact.itemsize).T.tobytes()


def exact_numbers(content: bytes, output: Output) -> NDArray[Any]:
    is_float = output.dtype in DROPPED_BITS
    dtype = np.dtype(np.float64 if is_float else output.dtype)
    raw = np.frombuffer(content, np.uint8).reshape(dtype.itemsize, -1).T
    return np.frombuffer(raw.tobytes(), dtype).reshape(output.shape)


def allowed(output: Output) -> float:
    """Returns the bound of an output's error: a quarter more than the recording device's, and what another order of
    sums costs."""
    if output.dtype in ("bfloat", "half", "float"):
        return 1.25 * output.error + 1e-6
    return output.error + 1e-3
