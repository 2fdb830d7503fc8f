from collections.abc import Iterator
from contextlib import contextmanager

from torch_gdn import _C


@contextmanager
def prefill_algorithm(algorithm: str | None, chunk_size: int = 0) -> Iterator[None]:
    """Selects the algorithm of every prefill that the calling thread starts on `mps` inside the block.

    A sequence then has the same bits alone and in any batch. The block applies to the thread that enters it, even if it
    ends on another one, as that of a generator can.

    Args:
        algorithm: "chunked", "fused_chunk" or "recurrent"; `torch_gdn tune --help` explains them. None selects the
            measured one, or the heuristic's. A call that returns its intermediate states always runs "chunked".
        chunk_size: Tokens per chunk of "fused_chunk": 8, 16 or 32, if they fit threadgroup memory. 0 selects 16, or 8
            if a row of keys takes more than 256 bytes. Default: 0.

    Raises:
        ValueError: If algorithm or chunk_size is not one of these.

    Example:
        >>> import torch_gdn
        >>> with torch_gdn.prefill_algorithm("recurrent"):
        ...     pass
    """
    with _C.ForcedPrefill(*(algorithm, chunk_size) if algorithm else (algorithm,)):
        yield
