"""Uses CUDA's driver through ctypes: buffers of exact sizes, launches by name, graphs for timing. Needs only numpy."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evidence.lab.cuda.record import Bytes

SHARED_BYTES = 220 * 1024  # per multiprocessor, as much as a block may take
DYNAMIC_SHARED, POSSIBLE_CAPTURE, NAME, MULTIPROCESSORS = 8, 2, 256, 16  # attributes, by the driver's numbers
NOT_WRITTEN = 0xFF  # each byte of fresh memory; NaN as a float


class NoGpu(RuntimeError):
    """Raised with the reason why nothing can run here."""


class Driver:
    """libcuda's functions. A status other than 0 raises an error."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise NoGpu("no NVIDIA GPU: libcuda.so.1 is not installed") from None
        if self._library.cuInit(0):
            raise NoGpu("no NVIDIA GPU: CUDA's driver finds none")

    def __call__(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{function}: {status}, {(text.value or b'').decode()}")


class Buffer:
    def __init__(self, driver: Driver, size: int) -> None:
        self.size, self._driver, self.address = size, driver, ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(max(1, size)))

    def fill(self, value: int) -> None:
        self._driver("cuMemsetD8_v2", self.address, ctypes.c_ubyte(value), ctypes.c_size_t(max(1, self.size)))

    def write(self, content: bytes, offset: int = 0) -> None:
        if offset < 0 or offset + len(content) > self.size:
            raise ValueError(f"write: expected bytes within {self.size}, got {len(content)} at {offset}")
        at = ctypes.c_uint64(self.address.value + offset)
        self._driver("cuMemcpyHtoD_v2", at, ctypes.c_char_p(content), ctypes.c_size_t(len(content)))

    def read(self) -> Bytes:
        content = np.empty(self.size, np.uint8)
        if self.size:
            target = ctypes.c_void_p(content.ctypes.data)
            self._driver("cuMemcpyDtoH_v2", target, self.address, ctypes.c_size_t(self.size))
        return content

    def free(self) -> None:
        self._driver("cuMemFree_v2", self.address)


class Prepared:
    """A launch with its arguments, which must live as long as it may run."""

    def __init__(self, function: Any, grid: Sequence[int], threads: int, arguments: Sequence[Any], shared: int) -> None:
        self.function, self.grid, self.threads, self.shared = function, list(grid), threads, shared
        self._arguments = list(arguments)
        pointers = [ctypes.cast(ctypes.byref(each), ctypes.c_void_p) for each in self._arguments]
        self.pointers = (ctypes.c_void_p * len(pointers))(*pointers)


class Gpu:
    def __init__(self) -> None:
        self.driver = Driver()
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.driver("cuDeviceGet", ctypes.byref(device), 0)
        self.driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.driver("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        self.driver("cuStreamCreate", ctypes.byref(self.stream), 0)
        name, count = ctypes.create_string_buffer(NAME), ctypes.c_int()
        self.driver("cuDeviceGetName", name, NAME, device)
        self.driver("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSORS, device)
        self.name, self.multiprocessors = name.value.decode(), count.value
        self._functions: dict[tuple[Path, str], Any] = {}

    def buffer(self, size: int) -> Buffer:
        return Buffer(self.driver, size)

    def function(self, cubin: Path, name: str) -> Any:
        if (cubin, name) not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.driver("cuModuleLoad", ctypes.byref(module), str(cubin).encode())
            self.driver("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self._functions[cubin, name] = function
        return self._functions[cubin, name]

    def allow_shared(self, function: Any, size: int) -> None:
        self.driver("cuFuncSetAttribute", function, DYNAMIC_SHARED, size)

    def launch(self, prepared: Prepared) -> None:
        size = (prepared.threads, 1, 1, ctypes.c_uint(prepared.shared))
        self.driver("cuLaunchKernel", prepared.function, *prepared.grid, *size, self.stream, prepared.pointers, None)

    def wait(self) -> None:
        self.driver("cuStreamSynchronize", self.stream)

    def microseconds(self, work: Sequence[Prepared], passes: int) -> float:
        """Times one pass over `work`: the median of seven rounds, each of which is one graph of `passes` passes."""
        for each in work:
            self.launch(each)
        self.wait()
        self.driver("cuStreamBeginCapture_v2", self.stream, POSSIBLE_CAPTURE)
        for each in list(work) * passes:
            self.launch(each)
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self.driver("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.driver("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        times = self._timed(lambda: self.driver("cuGraphLaunch", executable, self.stream))
        self.driver("cuGraphExecDestroy", executable)
        self.driver("cuGraphDestroy", graph)
        return statistics.median(times) / passes

    def copy_rate(self, size: int = 1 << 31) -> float:
        """Returns the bytes per second that a copy within the device moves, counting reads and writes."""
        source, target = self.buffer(size), self.buffer(size)
        copy = ("cuMemcpyDtoDAsync_v2", target.address, source.address, ctypes.c_size_t(size), self.stream)
        times = self._timed(lambda: self.driver(*copy))
        source.free()
        target.free()
        return 2 * size / statistics.median(times) * 1e6

    def _timed(self, action: Any) -> list[float]:
        """Returns the microseconds of each of seven rounds."""
        events = [ctypes.c_void_p() for _ in range(2)]
        for event in events:
            self.driver("cuEventCreate", ctypes.byref(event), 0)
        times = []
        for _ in range(8):
            self.driver("cuEventRecord", events[0], self.stream)
            action()
            self.driver("cuEventRecord", events[1], self.stream)
            self.wait()
            milliseconds = ctypes.c_float()
            self.driver("cuEventElapsedTime", ctypes.byref(milliseconds), *events)
            times.append(milliseconds.value * 1e3)
        return times[1:]
