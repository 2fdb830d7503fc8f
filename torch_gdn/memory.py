"""Counts bytes before they are allocated, so that what does not fit ends in an error, and not in a Mac that swaps."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from torch_gdn._mps import why_no_mps
from torch_gdn.quantized.formats import tensors_in

GB = 10**9  # the Hub's unit for files
FLOATS = ("F32", "BF16", "F16")  # dtypes as safetensors names them


def gigabytes(size: int) -> str:
    return f"{size / GB:.2f}" if size < 10 * GB else f"{size / GB:,.1f}"


def check_memory(what: str, needed: int, device: torch.device) -> None:
    """Checks that `needed` bytes and what PyTorch has allocated fit into what Metal recommends. It checks only `mps`.

    Raises:
        RuntimeError: If this PyTorch has no mps device.
        torch.OutOfMemoryError: If they do not. Above the recommendation a Mac swaps and may stop responding.
    """
    if device.type != "mps":
        return
    if reason := why_no_mps():
        raise RuntimeError(f'{what}: expected a device of this machine, got "mps": {reason}. Use device_map="cpu"')
    limit, allocated = torch.mps.recommended_max_memory(), torch.mps.current_allocated_memory()
    if needed + allocated > limit:
        raise torch.OutOfMemoryError(
            f"{what}: {gigabytes(needed)} GB needed and {gigabytes(allocated)} GB allocated, but Metal recommends at "
            f"most {gigabytes(limit)} GB on this machine; `python -m torch_gdn fits` prints what a model needs"
        )


def bytes_when_loaded(files: Iterable[str | Path], dtype: torch.dtype) -> int:
    """Returns the bytes that the tensors of safetensors files take in memory, floats in the model's dtype."""
    return sum(size for _, size in sizes_when_loaded(files, dtype))


def sizes_when_loaded(files: Iterable[str | Path], dtype: torch.dtype) -> Iterator[tuple[str, int]]:
    """Yields the name of each tensor and the bytes that it takes in memory, floats in the model's dtype."""
    for path in files:
        for name, x in tensors_in(path).items():
            begin, end = x["data_offsets"]
            yield name, math.prod(x["shape"]) * dtype.itemsize if x["dtype"] in FLOATS else end - begin
