"""Reports what ran between two points of a program: kernels, ops that fell back to the CPU, device memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mps_simulator.device import device_module, settings

_COLUMNS = (
    ("dispatches", "dispatches"),
    ("threads", "threads"),
    ("device_bytes_read", "bytes read"),
    ("device_bytes_written", "bytes written"),
    ("barriers", "barriers"),
    ("collectives", "simd ops"),
    ("matrix_multiplies", "matrix mults"),
    ("threadgroup_memory", "group memory"),
)
_DETAILED_COLUMNS = (
    ("device_bytes_issued_read", "issued read"),
    ("device_bytes_issued_written", "issued written"),
    ("device_bytes_distinct_read", "distinct read"),
    ("device_bytes_distinct_written", "distinct written"),
    ("load_rounds", "load rounds"),
    ("cache_lines", "lines"),
    ("least_cache_lines", "least lines"),
    ("threadgroup_accesses", "group accesses"),
    ("bank_cycles", "bank cycles"),
    ("least_bank_cycles", "least cycles"),
)


class Profile:
    """The figures of a `with mps_simulator.profile()` block. They are filled in when the block ends.

    kernels: each kernel's figures, by name; KernelFigures in engine/engine.h says what the fields count. fallbacks: how
    often each aten op ran on the CPU. allocated_bytes: the device memory that was allocated. copies: the number of
    PyTorch's copies in each direction. waits: how often the host waited for the device.
    """

    def __init__(self, detailed: bool = False) -> None:
        self.detailed = detailed
        self.kernels: dict[str, Any] = {}
        self.fallbacks: dict[str, int] = {}
        self.allocated_bytes = 0
        self.copies: dict[str, int] = {}
        self.waits = 0

    def launched(self, name: str) -> int:
        """Returns how many times the kernel of that name was dispatched."""
        return self.kernels[name].dispatches if name in self.kernels else 0

    def __str__(self) -> str:
        columns = _COLUMNS + (_DETAILED_COLUMNS if self.detailed else ())
        rows = [["kernel", *(title for _, title in columns)]]
        for name, kernel in sorted(self.kernels.items()):
            rows.append([name, *(f"{getattr(kernel, field):,}" for field, _ in columns)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = []
        for name, *figures in rows:
            cells = (cell.rjust(width) for cell, width in zip(figures, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *cells]))
        lines.append("on the CPU: " + (", ".join(f"{op} {n}" for op, n in sorted(self.fallbacks.items())) or "nothing"))
        lines.append("copies: " + (", ".join(f"{n} {way}" for way, n in self.copies.items()) or "none"))
        lines.append(f"waits for the device: {self.waits}; device memory asked for: {self.allocated_bytes:,} bytes")
        return "\n".join(lines)


@contextmanager
def profile(detailed: bool = False) -> Iterator[Profile]:
    """Waits for the device at both ends, and reports what ran in between. You can nest these blocks.

    detailed: combines the accesses of single threads into accesses of simdgroups, and counts their bytes, cache lines
    and bank conflicts. It also counts scalar operations by kind. simdgroup_access.h and operations.h in engine/count
    say how, and where a GPU differs. A detailed profile is several times slower, and compiles each kernel once more. If
    it is nested, the outer profile has these figures for the inner part.
    """
    if detailed and not settings.watch:
        raise ValueError(
            "profile(detailed=True): expected settings.watch to be on, got off: the watch does the counting"
        )
    device = device_module()
    result = Profile(detailed)
    was_detailed = settings.detailed
    settings.detailed = detailed or was_detailed
    device.synchronize()
    kernels, fallbacks, allocated = device.figures(), device.fallbacks(), device.total_requested()
    copies, waits = device.copies(), device.waits()
    try:
        yield result
    finally:
        result.waits = device.waits() - waits
        result.copies = {way: n - copies[way] for way, n in device.copies().items() if n > copies[way]}
        settings.detailed = was_detailed  # waits for the device
        nothing = device.KernelFigures()
        for name, now in device.figures().items():
            figures = now.since(kernels.get(name, nothing))
            if figures.dispatches:
                result.kernels[name] = figures
        for op, count in device.fallbacks().items():
            if count > fallbacks.get(op, 0):
                result.fallbacks[op] = count - fallbacks.get(op, 0)
        result.allocated_bytes = device.total_requested() - allocated
