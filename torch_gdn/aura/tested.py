"""Tests the ops of a cache of codes on this machine's mps device, before a cache of that form relies on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torch_gdn import self_test

if TYPE_CHECKING:
    from torch_gdn.self_test.cases import Case

# These are bits of keys and of values, whether codes are trellis codes, the size of a head, the dtype.
Form = tuple[tuple[int, int], bool, int, torch.dtype]
LARGEST_OF_PROMPT = 256  # head size that `torch_gdn.paged_attention` takes
tested: set[Form] = set()  # by this process


def test(form: Form, device: torch.device) -> None:
    if device.type != "mps" or form in tested or torch.compiler.is_compiling():
        return
    self_test.ensure(lambda: needed_cases(*form))
    tested.add(form)


def needed_cases(bits: tuple[int, int], trellis: bool, D: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yields the cases of the ops of `KVCache`, and of the attention of a first prompt to its own keys and values."""
    from torch_gdn.self_test.cases import Case, points_of  # here, because only machines with an mps device need it

    def cases(op: str, **changes: Any) -> Iterator[Case]:
        yield from (Case(op, replace(point, **changes)) for point in points_of(op))

    for each in dict.fromkeys(bits):
        for op in ("aura_encode_", "aura_decode"):
            yield from cases(op, bits=each, trellis=trellis, D=D, dtype=dtype)
    yield from cases("aura_attention", bits=bits, trellis=trellis, D=D, dtype=dtype)
    if D <= LARGEST_OF_PROMPT:
        yield from cases("paged_attention_", D=D, dtype=dtype, cache=dtype)
