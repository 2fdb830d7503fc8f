"""Tests each index of every op at its limits: 0, the last one, the count, and -1. Both devices have the same limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.variations import attempt, plans, random_of, some
from tests.hostile.outcomes import BOUNDS, STORES, difference
from torch_gdn_check.registry import REGISTRY, invalid, layers
from torch_gdn_check.registry.inputs import Call, tensors_of
from torch_gdn_check.registry.registry import OpEntry

NO_INDICES = ("codes", "weight", "w_gate_up", "w_down", "_proj", "pool", "dst", "src")  # ends of names


def calls_of(op: str) -> Iterator[tuple[Any, Call]]:
    """Yields two of the op's plans, packed sequences, and steps with drafts or checkpoints."""
    entry, (first, *others) = REGISTRY[op], plans(op)
    for point in (first, *some(others, 1, "indices", op)):
        yield point, with_readable_blocks(entry.call(point))
    if entry.packable:
        yield entry.small, entry.smallest(packed=True)
    if "num_accepted_tokens" in entry.arguments:
        is_convolution = isinstance(entry.small, layers.ConvolutionPoint)
        drafted = layers.drafted_columns if is_convolution else invalid.drafted
        yield entry.small, drafted({})(entry.smallest() | {"has_initial_state": None})
    if "checkpoint_offsets" in entry.arguments:
        good = {"checkpoint_offsets": torch.tensor([64, 64]), "checkpoint_indices": torch.tensor([0, 4])}
        point = replace(entry.small, tokens=70, algorithm=some(plans(op), 1, "checkpoints", op)[0].algorithm)
        yield point, entry.call(point) | good


def with_readable_blocks(call: Call) -> Call:
    """Returns the call with blocks of the cache where it has others, so that a sequence can be longer."""
    blocks = next((len(call[name]) for name in ("key_cache", "key_codes") if name in call), 0)
    is_read = blocks and "block_table" in call
    return call | {"block_table": call["block_table"].clamp(max=blocks - 1)} if is_read else call


def indices_in(call: Call) -> list[str]:
    names = (name for name in tensors_of(call) if not name.endswith(NO_INDICES))
    return [name for name in names if call[name].dtype in (torch.int32, torch.int64) and call[name].numel()]


def candidates(call: Call) -> list[int]:
    """Returns numbers around each size of each tensor, each number of rows, and each integer of the call."""
    shapes = [call[name].shape for name in tensors_of(call)]
    sizes = {size for shape in shapes for size in shape} | {shape[:2].numel() for shape in shapes}
    sizes |= {value for value in call.values() if type(value) is int}
    if "block_table" in call:
        sizes |= {call["block_table"].shape[-1] * shape[1] for shape in shapes if len(shape) > 2}
    return sorted({n + more for n in {*sizes, 0} for more in (-1, 0, 1)})


def with_index(call: Call, name: str, place: int, number: int) -> Call:
    changed = call[name].clone()
    changed.view(-1)[place] = number
    return call | {name: changed}


def limited_place(entry: OpEntry[Any], point: Any, call: Call, name: str) -> tuple[int, set[int], bool]:
    """Returns the first, last or middle place, the numbers to try there, and whether one of these places limits its
    number: then the first that does. A place does not if nothing reads its number.
    """
    place, numbers, is_limited = 0, set[int](), False
    for place in random_of(entry.name, name).sample([0, -1, call[name].numel() // 2], 3):
        numbers, is_limited = edges(entry, point, call, name, place)
        if is_limited:
            break
    return place, numbers, is_limited


def edges(entry: OpEntry[Any], point: Any, call: Call, name: str, place: int) -> tuple[set[int], bool]:
    """Returns -1, 0 and the numbers on both sides of each limit on the CPU, and whether there is one."""
    others = call[name].flatten().tolist()
    numbers = candidates(call)
    if (entry.name, name) in STORES:  # either of two writers to a slot may come last
        del others[place]
        numbers = [n for n in numbers if n not in others]
    taken = [not isinstance(attempt(entry, point, with_index(call, name, place, n), "cpu"), str) for n in numbers]
    sides = {n for i, n in enumerate(numbers[1:]) if taken[i] != taken[i + 1] for n in (numbers[i], n)}
    always = {-1, 0} & set(numbers) | ({2**32, 2**32 + 1} if call[name].dtype == torch.int64 else set())
    return sides | always, bool(sides)


def shares_bytes(call: Call) -> bool:
    """Returns whether ranges are refused because others read or write their bytes."""
    try:
        torch.ops.gdn.batch_copy_(**call | {"pool": call["pool"].clone()})
    except ValueError as error:
        return "another one reads or writes" in str(error)
    return False


def assert_devices_agree(entry: OpEntry[Any], point: Any, call: Call, what: str) -> None:
    if entry.name == "batch_copy_" and shares_bytes(call):
        return  # which the CPU alone looks for
    cpu = attempt(entry, point, call, "cpu")
    try:
        mps = attempt(entry, point, call, "mps")
    except RuntimeError as error:  # an index that is reported is clamped, to what another sequence may write
        if not (isinstance(cpu, str) and "data race" in str(error)):
            raise
        with pytest.raises(RuntimeError, match=f"{entry.name}: {cpu}: expected"):
            torch.mps.synchronize()
        return
    if isinstance(cpu, str) or isinstance(mps, str):
        assert isinstance(cpu, str) == isinstance(mps, str), f"{entry.name}: {what}: cpu {cpu}, mps {mps}"
        return
    bound = max(BOUNDS.get(x.dtype, 0) for x in call.values() if isinstance(x, Tensor))
    for name, x in mps.items():
        assert not difference(x, cpu[name], bound), f"{entry.name}: {what}: {name}"


# A query sees the keys from its start on, which may be any number. Chunks follow from cu_seqlens, a block of this table
# is only multiplied, and this mapping is the result.
WITHOUT_LIMITS = {op: {"starts", "exact_starts", "chunk_indices"} for op in REGISTRY}
WITHOUT_LIMITS |= {"compute_slot_mapping_": {"block_table", "slot_mapping"}}
INDEXED = [op for op, entry in REGISTRY.items() if entry.packable or indices_in(entry.smallest())]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("op", INDEXED)
def test_indices(op: str) -> None:
    entry, unlimited = REGISTRY[op], dict[str, bool]()
    for point, call in calls_of(op):
        for name in indices_in(call):
            call = call | {name: call[name].to(some([torch.int32, torch.int64], 1, "width", op, name)[0])}
            place, numbers, is_limited = limited_place(entry, point, call, name)
            unlimited[name] = unlimited.get(name, True) and not is_limited
            for number in sorted(numbers):
                changed = with_index(call, name, place, number)
                assert_devices_agree(entry, point, changed, f"{name}: {number} at {place}")
    assert {name for name, is_so in unlimited.items() if is_so} <= WITHOUT_LIMITS.get(op, set())
