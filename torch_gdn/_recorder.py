"""Records which kernel variants calls launch. Only the host code chooses them, so it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_gdn import _C


@dataclass(frozen=True)
class KernelVariant:
    """A kernel (a function template) and its template arguments."""

    kernel: str
    file: str  # below the shader directory
    arguments: tuple[str, ...]  # as Metal spells them

    @property
    def name(self) -> str:
        """Returns the name as `_C.pipelines()` and the simulated device's profile spell it."""
        return "_".join((self.kernel, *self.arguments))


@dataclass(frozen=True)
class Launch:
    variant: KernelVariant
    bindings: int  # number of buffers and blocks of plain values
    threadgroups: tuple[int, ...]  # in x, y and z
    threads: int  # per threadgroup
    overlaps: tuple[tuple[int, int], ...] = ()  # bindings with bytes in common


class recording:
    """Lists what torch_gdn's ops on `mps` tensors would launch inside the block, and launches nothing.

    Only the calling thread records; kernels of other threads run as usual. Inputs are checked and outputs allocated,
    but the outputs' contents mean nothing. PyTorch's own ops run. A recording inside another takes its launches. The
    block may end on another thread, as that of a generator can: the thread that entered it then launches again.

    Attributes:
        launches: all in order, each with `variant`, `bindings` (how many), `threadgroups`, `threads` (of one), and
            `overlaps` (pairs of bindings that have bytes in common). Filled when the block ends.
        variants: each kernel variant once, in the order of the first launches, with `name`, `kernel`, `file` and
            `arguments`.

    Raises:
        RuntimeError: If the same object is entered again before its block has ended.

    Example:
        >>> import torch, torch_gdn
        >>> with torch_gdn.recording() as recorded:
        ...     y = torch_gdn.l2norm(torch.ones(2, 64))  # on the CPU: runs, and launches nothing
        >>> recorded.variants
        []
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._recorder: _C.Recording | None = None

    @property
    def variants(self) -> list[KernelVariant]:
        return list(dict.fromkeys(launch.variant for launch in self.launches))

    def __enter__(self) -> recording:
        if self._recorder is not None:
            raise RuntimeError("recording: expected an object whose block has ended, got one that is recording")
        self._recorder = _C.Recording()
        self._recorder.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("recording: expected an object that is recording, got one whose block has ended")
        for launch in recorder.stop():
            variant = KernelVariant(launch["kernel"], launch["file"], tuple(launch["arguments"]))
            grid = tuple(launch["threadgroups"]), launch["threads"]
            self.launches.append(Launch(variant, launch["bindings"], *grid, tuple(launch["overlaps"])))
