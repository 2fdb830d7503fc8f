"""Records every launch of a call of torch_gdn's ops on `mps`: variant, grid, parameters, and the buffers' contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mps_simulator
from evidence.lab.cuda.record import (
    Binding,
    CaseRecord,
    Fill,
    LaunchRecord,
    Output,
    Writer,
    error,
    numbers,
    packed_exact,
    runs_of,
    shortened,
)
from torch_gdn import _C
from torch_gdn_check.registry.models import METAL_TYPES

LARGEST_ERROR = 0.02


def storage_bytes(tensor: Tensor) -> Tensor:
    """Returns the whole storage of a tensor, on the CPU."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole.cpu()


class Trace:
    """Records one case. `runs` also runs its launches, and `keeps` keeps the contents of buffers. The address of its
    storage identifies a buffer, so one bound tensor of each stays alive.
    """

    def __init__(self, name: str, writer: Writer, runs: bool = True, keeps: bool = True) -> None:
        self.case = CaseRecord(name)
        self._writer, self._runs, self._keeps = writer, runs, keeps
        self._numbers: dict[int, int] = {}
        self._held: list[Tensor] = []  # one tensor of each storage
        self._known: dict[int, bytes] = {}  # contents after the last launch that bound the buffer

    def number_of(self, tensor: Tensor) -> int:
        at = tensor.untyped_storage()._cdata  # asking for the address would let the host write
        if at not in self._numbers:
            self._numbers[at] = len(self._held)
            self._held.append(tensor)
            self.case.buffers.append(tensor.untyped_storage().nbytes())
        return self._numbers[at]

    def call(self, run: Callable[[], Any]) -> Any:
        with _C.Tracing(self._before, self._after, self._runs):
            return run()

    def add_outputs(self, outputs: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
        for name, tensor in outputs.items():
            self.case.outputs.append(self._output(name, tensor, exact[name]))

    def _output(self, name: str, tensor: Tensor, exact: Tensor) -> Output:
        dtype = METAL_TYPES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
        expected = (exact.double() if tensor.dtype in METAL_TYPES else exact).contiguous().cpu().numpy()
        expected = shortened(expected, dtype)
        kept = self._writer.keep(packed_exact(expected))
        offset = int(tensor.storage_offset()) * tensor.element_size()
        output = Output(
            name, self.number_of(tensor), offset, dtype, list(tensor.shape), list(tensor.stride()), kept, 0.0
        )
        distance = error(numbers(storage_bytes(tensor).numpy(), output), expected)
        if not distance < LARGEST_ERROR:  # a replay is compared with it
            raise ValueError(f"{self.case.name}: {name}: expected an error below {LARGEST_ERROR}, got {distance:.3e}")
        return replace(output, error=distance)

    def _before(self, launch: Any) -> None:
        """Returns fills for what the device wrote by other means than the launches."""
        bound = {self.number_of(x): x for x in launch["bindings"] if isinstance(x, Tensor)}
        if not self._keeps:
            return
        for number, tensor in bound.items():
            content = storage_bytes(tensor).numpy()
            if self._known.get(number) == content.tobytes():
                continue
            marks = np.frombuffer(mps_simulator.device.device_module().written_bytes(tensor), np.uint8)
            runs = runs_of(marks)
            kept = self._writer.keep(content[marks != 0].tobytes())
            self.case.fills.append(Fill(len(self.case.launches), number, runs, kept))
            self._known[number] = content.tobytes()

    def _after(self, launch: Any) -> None:
        if self._runs:
            for tensor in (x for x in launch["bindings"] if isinstance(x, Tensor)):
                self._known[self.number_of(tensor)] = storage_bytes(tensor).numpy().tobytes()
        head = (launch["kernel"], launch["file"], launch["arguments"], list(launch["threadgroups"]), launch["threads"])
        self.case.launches.append(LaunchRecord(*head, [self._binding(x) for x in launch["bindings"]]))

    def _binding(self, bound: Tensor | bytes | str | None) -> Binding:
        if isinstance(bound, bytes):
            return Binding(block=self._writer.keep(bound))
        if not isinstance(bound, Tensor):
            return Binding(is_error_log=bound is not None)
        return Binding(self.number_of(bound), int(bound.storage_offset()) * bound.element_size())
