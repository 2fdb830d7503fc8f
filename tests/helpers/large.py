"""Makes tensors of more than 2**31 elements on the simulated device, which has memory only for the pages in use.

They have 16 bits, because a buffer has at most 8 GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.devices import on_a_mac, ready

BEYOND = 2**31 + 24  # elements; 32 bits hold neither this number nor larger ones
LIMIT_KB = 2 << 20

needs_sparse_memory = pytest.mark.skipif(on_a_mac(), reason="a Mac's memory is not sparse: this would take gigabytes")


@contextmanager
def sparse_memory() -> Iterator[torch.device]:
    """Yields the device. Asserts that the body takes less than 2 GiB, and frees the buffers."""
    device = ready("mps")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_kb("VmRSS")
    yield device
    torch.mps.synchronize()
    torch.mps.empty_cache()
    taken = resident_kb("VmHWM") - before
    assert taken < LIMIT_KB, f"{taken} KB more were resident"


def resident_kb(name: str) -> int:
    (kb,) = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kb)


def far_apart(x: Tensor) -> Tensor:
    """Returns x [2, ...] on the device, with x[1] more than 2**31 elements after x[0], and their strides unchanged."""
    whole = torch.empty(BEYOND + x[0].numel(), dtype=x.dtype, device="mps")
    view = whole.as_strided(x.shape, (BEYOND, *x.stride()[1:]))
    return view.copy_(x)


def rows_beyond(elements: int) -> int:
    """Returns the number of rows of this length with which the last row begins after 2**31 elements."""
    return 2**31 // elements + 2


def repeated(x: Tensor, times: int) -> Tensor:
    """Returns x [1, ...] on the device as [times, ...], without memory for the repetitions."""
    return x.to("mps").expand(times, *x.shape[1:])


def last_row(op: Any, times: int, *args: Any, **options: Any) -> Tensor:
    """Runs only the threadgroups of the last of `times` rows, and returns that row of the op's first output."""
    import mps_simulator

    torch.mps.synchronize()
    with mps_simulator.settings(parts=times):
        result = op(*args, **options)
        y = result if isinstance(result, Tensor) else result[0]
        assert y.shape[0] == times and y[:-1].numel() > 2**31
        return y[-1:].cpu()
