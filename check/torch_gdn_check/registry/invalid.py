"""Makes changes of a valid call that ops refuse, for changes that several ops share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_gdn_check.registry.inputs import Call, columns_apart
from torch_gdn_check.registry.registry import Change, Invalid


def put(name: str, value: Any) -> Change:
    return lambda call: call | {name: value}


def change(name: str, how: Callable[[Tensor], Any]) -> Change:
    return lambda call: call | {name: how(call[name])}


def short(x: Tensor) -> Tensor:
    return x[:, :-1]


def zeros(x: Tensor, size: int) -> Tensor:
    """Returns zeros with another last dimension."""
    return x.new_zeros(*x.shape[:-1], size)


def options(changes: Call) -> Change:
    return lambda call: call | changes


def packing(has_indices: bool = False) -> Iterator[Invalid]:
    """Yields wrong cu_seqlens and chunk_indices."""
    cu, indices = "cu_seqlens", "chunk_indices"
    yield Invalid(cu, TypeError, "floats", change(cu, torch.Tensor.float), packed=True)
    yield Invalid(cu, ValueError, "two dimensions", change(cu, lambda x: x[None]), packed=True)
    yield Invalid(cu, ValueError, "no boundary", change(cu, lambda x: x[:0]), packed=True)
    yield Invalid(cu, ValueError, "no sequence", change(cu, lambda x: x[:1]), packed=True, by_contents=True)
    yield Invalid(cu, ValueError, "with a batch", put(cu, torch.tensor([0, 5, 20])))
    wrong = {"a start of 1": [1, 5, 5, 20], "a descent": [0, 7, 5, 20], "an end before T": [0, 5, 5, 19]}
    wrong |= {"an end past T": [0, 5, 5, 21], "a negative one": [0, -1, 5, 20]}
    for what, numbers in wrong.items():
        yield Invalid(cu, ValueError, what, put(cu, torch.tensor(numbers)), packed=True, by_contents=True)
    if has_indices:
        without = put(indices, torch.zeros(2, 2, dtype=torch.int64))
        yield Invalid(indices, ValueError, "one column", change(indices, short), packed=True)
        yield Invalid(indices, TypeError, "floats", change(indices, torch.Tensor.float), packed=True)
        yield Invalid(indices, ValueError, "without cu_seqlens", without)
        yield Invalid(indices, ValueError, "a chunk too few", a_chunk_too_few, packed=True, by_contents=True)


def a_chunk_too_few(call: Call) -> Call:
    return call | {"cu_seqlens": call["cu_seqlens"].cpu(), "chunk_indices": call["chunk_indices"][:-1]}


def slots() -> Iterator[Invalid]:
    """Yields wrong pools and slots, for an op on a pool of 5 slots and two sequences."""
    indices, pool = "state_indices", "state_pool"
    yield Invalid("null_index", ValueError, "1", put("null_index", 1))
    yield Invalid(pool, ValueError, "one slot for two", lambda call: call | {pool: call[pool][:1], indices: None})
    yield Invalid(pool, ValueError, "overlapping slots", change(pool, lambda s: s[:1].expand_as(s)))
    for what, numbers in {"an index of 5": [5, 1], "one slot twice": [1, 1]}.items():
        yield Invalid(indices, ValueError, what, put(indices, torch.tensor(numbers)), by_contents=True)


TOKENS = 20  # per sequence


def drafted(changes: Call) -> Change:
    """Gives each token a slot, as for drafts, and then makes the changes."""

    def change_call(call: Call) -> Call:
        drafts = {"state_indices": torch.arange(2 * TOKENS).view(2, TOKENS)}
        drafts["num_accepted_tokens"] = torch.ones(2, dtype=torch.int)
        pools = {name: torch.cat([call[name]] * 8) for name in ("state_pool", "conv_pool") if name in call}
        if "conv_pool" in pools:
            pools["conv_pool"] = torch.cat([pools["conv_pool"]] * 6, -1)
        return call | pools | drafts | changes

    return change_call


def drafts() -> Iterator[Invalid]:
    """Yields wrong slots of tokens and counts of accepted ones, for two sequences of 20 tokens."""
    indices, counts = "state_indices", "num_accepted_tokens"
    each = torch.arange(2 * TOKENS).view(2, TOKENS)
    wrong = {"a column too few": each[:, 1:], "no columns": each[:, :0], "three dimensions": each[..., None]}
    for what, numbers in wrong.items():
        yield Invalid(indices, ValueError, what, drafted({indices: numbers}))
    yield Invalid(indices, ValueError, "a slot twice", drafted({indices: each % 39}), by_contents=True)
    yield Invalid(counts, ValueError, "one slot a sequence", drafted({indices: each[:, 0]}))


def accepted(drafted: Callable[[Call], Change]) -> Iterator[Invalid]:
    """Yields wrong counts of accepted tokens."""
    counts = "num_accepted_tokens"
    yield Invalid(counts, TypeError, "floats", drafted({counts: torch.ones(2)}))
    yield Invalid(counts, ValueError, "one for two", drafted({counts: torch.ones(1, dtype=torch.int)}))
    for what, number in {"none": 0, "more than a step has": TOKENS + 1}.items():
        yield Invalid(counts, ValueError, what, drafted({counts: torch.tensor([1, number])}), by_contents=True)


def checkpoints(multiple: int) -> Iterator[Invalid]:
    """Yields wrong checkpoints of two sequences, of which the first has slot 2 and the second none."""
    offsets, slots = "checkpoint_offsets", "checkpoint_indices"
    good = {offsets: torch.tensor([64, 64]), slots: torch.tensor([0, 4])}

    def with_checkpoints(changes: Call) -> Change:
        def change_call(call: Call) -> Call:
            names = [name for name in ("x", "residual", "q", "k", "v", "g", "beta") if name in call]
            longer = {name: torch.cat([call[name]] * 4, 1)[:, :70] for name in names}
            return call | longer | good | changes

        return change_call

    for name, other in ((offsets, slots), (slots, offsets)):
        yield Invalid(name, TypeError, "floats", with_checkpoints({name: good[name].float()}))
        yield Invalid(name, ValueError, "one for two", with_checkpoints({name: good[name][1:]}))
        yield Invalid(name, ValueError, f"without {other}", with_checkpoints({name: None}))
    wrong = {"past the tokens": [0, 128], "negative": [-64, 0]} | ({"of no chunk": [32, 0]} if multiple > 1 else {})
    for what, numbers in wrong.items():
        yield Invalid(offsets, ValueError, what, with_checkpoints({offsets: torch.tensor(numbers)}), by_contents=True)
    for what, numbers in {"past the pool": [0, 5], "one slot twice": [4, 4], "a sequence's slot": [4, 2]}.items():
        yield Invalid(slots, ValueError, what, with_checkpoints({slots: torch.tensor(numbers)}), by_contents=True)


def apart(*names: str) -> Iterator[Invalid]:
    """Yields tensors whose last stride is not 1."""
    for name in names:
        yield Invalid(name, ValueError, "columns apart", change(name, columns_apart))


def sizes(key: str, value: str) -> Iterator[Invalid]:
    """Yields wrong sizes of an argument [B, T, H, K] and one [B, T, HV, V]."""
    yield Invalid(key, ValueError, "K of 257", change(key, partial(zeros, size=257)))
    yield Invalid(value, ValueError, "V of 513", change(value, partial(zeros, size=513)))


def chunk_sizes() -> Iterator[Invalid]:
    yield Invalid("chunk_size", ValueError, "48", put("chunk_size", 48))
    yield Invalid("chunk_size", ValueError, "zero", put("chunk_size", 0))


def states(name: str) -> Iterator[Invalid]:
    """Yields wrong initial states."""
    yield Invalid(name, ValueError, "one for three", change(name, lambda s: s[:1]), packed=True)
    yield Invalid(name, ValueError, "V and K swapped", put("state_v_first", True))
