"""The ways in which Metal goes through a prompt, behind `chunk_gated_delta_rule`.

"staged": a kernel for each stage of a chunk, all chunks of a prompt at once, with what goes from one to the next in
device memory. "fused": one kernel, chunk by chunk, the state in registers. "sequential": one kernel, token by token,
the state in registers. They differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_gdn import _C


@contextmanager
def prefill_way(way: str | None) -> Iterator[None]:
    """Inside, each prefill on `mps` takes this way, in every thread; None: the way that the table has for its shape.

    A call that returns its intermediate states is staged in any case.

    Example:
        >>> import torch_gdn.tune
        >>> with torch_gdn.tune.prefill_way("sequential"):
        ...     pass
    """
    before = _C.forced_prefill_way()
    _C.force_prefill_way(way)
    try:
        yield
    finally:
        _C.force_prefill_way(before)
