from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_gdn import _C


@contextmanager
def prefill_algorithm(algorithm: str | None, chunk_size: int = 0) -> Iterator[None]:
    """Inside the block, each prefill on `mps` that the calling thread starts takes this algorithm.

    A sequence then has the same bits alone and in any batch.

    Args:
        algorithm: "chunked", "fused_chunk" or "recurrent" (`torch_gdn.tune` explains them). None: the measured
            algorithm, or the heuristic's. A call that returns its intermediate states always takes "chunked".
        chunk_size: tokens per chunk of "fused_chunk": 8, 16 or 32, where they fit threadgroup memory. 0 chooses 16, or
            8 where a row of keys takes more than 256 bytes. Default: 0.

    Returns:
        A context manager.

    Raises:
        ValueError: another algorithm or chunk_size.

    Example:
        >>> import torch_gdn
        >>> with torch_gdn.prefill_algorithm("recurrent"):
        ...     pass
    """
    before = _C.forced_prefill_algorithm() or (None,)
    _C.force_prefill_algorithm(*(algorithm, chunk_size) if algorithm else (algorithm,))
    try:
        yield
    finally:
        _C.force_prefill_algorithm(*before)
