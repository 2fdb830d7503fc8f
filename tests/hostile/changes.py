"""Makes valid calls of every op, and changes one thing at a time, for every argument of the op's schema.

A change is made on the device, because negated and sparse tensors and views do not survive a copy.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_gdn_check.registry import REGISTRY
from torch_gdn_check.registry.inputs import Call, to_device, whole_storage

OPS = tuple(REGISTRY)
Change = Callable[[Call], Any]  # returns the new value
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64)
# Values that are not tensors: numbers, flags and words for an argument that takes no tensor.
NO_TENSORS: tuple[Any, ...] = (None, 3, 0.5, True, "a word", [1, 2], torch.float32)
WRONG: tuple[Any, ...] = (None, "", "a word", [1], torch.float16, torch.float64)
INTEGERS: tuple[Any, ...] = (0, 1, -1, 2, 3, 5, 16, 48, 64, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2**63)
FLOATS_OF_ALL_SIZES = (0.5, -0.5, 1e-30, 1e30, -1e30, 1e300, math.inf, -math.inf, math.nan)
SCALARS: dict[str, tuple[Any, ...]] = {
    "bool": (True, False, *WRONG, 2, 0.5, math.nan),
    "int": (*INTEGERS, *WRONG, 0.5, math.nan),
    "float": (*FLOATS_OF_ALL_SIZES, *INTEGERS, *WRONG),
    "str": ("silu", "swish", "sigmoid", "tiled", "block", *WRONG, 3),
    "ScalarType": (torch.float32, torch.bfloat16, torch.int32, torch.complex64, *INTEGERS, *WRONG, 0.5),
}


@dataclass(frozen=True)
class Hostile:
    op: str
    base: str
    argument: str
    kind: str
    what: str
    change: Change

    def __str__(self) -> str:
        return f"{self.op} ({self.base}): {self.argument}: {self.what}"


def schema_of(op: str) -> Any:
    return getattr(torch.ops.gdn, op).default._schema


def type_of(op: str, argument: str) -> str:
    """Returns `Tensor` or a key of SCALARS, which does not tell whether it may be None."""
    declared = re.search(rf"(\w+)(\(\w!\))?\?? {argument}\b", str(schema_of(op)))
    assert declared is not None
    return {"SymInt": "int"}.get(declared[1], declared[1])


def bases_of(op: str) -> list[str]:
    """Returns the names of valid calls: see base_call()."""
    entry = REGISTRY[op]
    if not entry.packable:
        return ["batch"]
    has_options = hasattr(entry.small, "gated") and "state_pool" in entry.written
    return ["gated" if has_options else "batch", "packed"]


def base_call(op: str, base: str, device: torch.device) -> Call:
    """Returns a separate copy of made_base()."""
    return to_device(made_base(op, base, device), device)


@functools.cache
def made_base(op: str, base: str, device: torch.device) -> Call:
    """`gated` has every option that takes a tensor, with bf16 inputs. `packed` has the boundaries on the device."""
    if base == "gated":
        return REGISTRY[op].smallest(device=device, dtype=torch.bfloat16, gated=True)
    return REGISTRY[op].smallest(packed=base == "packed", device=device)


def hostile_calls(op: str) -> Iterator[Hostile]:
    for base in bases_of(op):
        call = base_call(op, base, torch.device("cpu"))
        for argument in REGISTRY[op].arguments:
            value = call.get(argument)
            if isinstance(value, Tensor):
                for kind, what, change in changes_of(op, argument, value):
                    yield Hostile(op, base, argument, kind, what, change)
            elif type_of(op, argument) == "Tensor":
                for what, made in unasked_for():
                    yield Hostile(op, base, argument, "kinds", what, lambda call, made=made: made(device_of(call)))
            else:
                for number in SCALARS[type_of(op, argument)]:
                    yield Hostile(op, base, argument, "scalars", repr(number), lambda call, number=number: number)


def device_of(call: Call) -> torch.device:
    return next(x.device for x in call.values() if isinstance(x, Tensor))


def unasked_for() -> Iterator[tuple[str, Callable[[torch.device], Any]]]:
    """Yields values for an argument that the call omits."""
    for size in ((), (0,), (4,), (2, 20), (2, 20, 4), (2, 20, 4, 32), (1, 1, 1, 1, 1)):
        for dtype in (torch.float32, torch.int64, torch.bool):
            yield f"{dtype} {size}", lambda device, size=size, dtype=dtype: torch.ones(size, dtype=dtype, device=device)


def changes_of(op: str, argument: str, x: Tensor) -> Iterator[tuple[str, str, Change]]:
    def on(change: Callable[[Tensor], Any]) -> Change:
        return lambda call: change(call[argument])

    for what, change in dtypes(x):
        yield "dtypes", what, on(change)
    for what, change in shapes(x):
        yield "shapes", what, on(change)
    for what, change in layouts(x):
        yield "layouts", what, on(change)
    for what, change in values(x):
        yield "values", what, on(change)
    for what, change in elsewhere():
        yield "kinds", what, on(change)
    for value in NO_TENSORS:
        yield "kinds", repr(value), lambda call, value=value: value
    for written in REGISTRY[op].written:
        if written not in (argument, "out"):  # `out` has its own aliases
            yield "aliases", f"memory of {written}", lambda call, written=written: memory_of(call[written], x)


def dtypes(x: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    for dtype in DTYPES:
        if dtype != x.dtype:
            yield str(dtype), lambda x, dtype=dtype: x.to(dtype)


def shapes(x: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    yield "a dimension more", lambda x: x[None]
    yield "a dimension more at the end", lambda x: x[..., None]
    yield "no dimension", lambda x: x.flatten()[0]
    yield "one dimension", lambda x: x.flatten()
    if x.dim() > 1:
        yield "a dimension less", lambda x: x[0]
        yield "the dimensions reversed", lambda x: x.permute(*reversed(range(x.dim())))
    for d in range(x.dim()):
        yield f"dimension {d} short", lambda x, d=d: x.narrow(d, 0, x.shape[d] - 1)
        yield f"dimension {d} of 1", lambda x, d=d: x.narrow(d, 0, 1)
        yield f"dimension {d} of 0", lambda x, d=d: x.narrow(d, 0, 0)
        yield f"dimension {d} long", lambda x, d=d: torch.cat([x, x.narrow(d, 0, 1)], d)
        yield f"dimension {d} doubled", lambda x, d=d: torch.cat([x, x], d)


def layouts(x: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Yields the same numbers in other layouts, some of which repeat them."""
    for d in range(x.dim()):
        yield f"dimension {d} of stride 0", lambda x, d=d: x.narrow(d, 0, 1).expand_as(x)
        yield (
            f"dimension {d} of stride 2",
            lambda x, d=d: x.repeat_interleave(2, d).narrow(d, 1, 2 * x.shape[d] - 1)[
                (slice(None),) * d + (slice(None, None, 2),)
            ],
        )
        yield f"dimension {d} contiguous", lambda x, d=d: x.transpose(d, -1).contiguous().transpose(d, -1)
    yield "dimensions in reverse", lambda x: x.permute(*order(x)).contiguous().permute(*order(x))
    for offset in (1, 3):
        yield f"{offset} elements in", lambda x, offset=offset: shifted(x, offset)
    yield "windows that overlap", lambda x: x.as_strided(x.shape, [1] * x.dim())


def order(x: Tensor) -> list[int]:
    return list(reversed(range(x.dim())))


def shifted(x: Tensor, offset: int) -> Tensor:
    whole = x.new_zeros(x.numel() + offset)
    whole[offset:] = x.flatten()
    return whole[offset:].view(x.shape)


def values(x: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    if x.dtype.is_floating_point:
        numbers: tuple[float, ...] = (math.nan, math.inf, -math.inf, 1e30, -1e30, 1e-30, 0.0)
    elif x.dtype == torch.bool:
        numbers = (0, 1)
    else:
        numbers = (0, 1, -1, -2, 2**31 - 1, -(2**31), *((2**63 - 1, -(2**63)) if x.dtype == torch.int64 else ()))
    for number in numbers:
        yield f"all {number}", lambda x, number=number: torch.full_like(x, number)
        for place, index in {"the first": 0, "the middle one": x.numel() // 2, "the last": -1}.items():
            yield f"{place} {number}", lambda x, number=number, index=index: with_one(x, index, number)
    yield "reversed", lambda x: x.flip(0)


def with_one(x: Tensor, index: int, number: float) -> Tensor:
    flat = x.flatten().clone()
    flat[index] = number
    return flat.view(x.shape)


def elsewhere() -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    yield "on meta", lambda x: x.to("meta")
    yield "on the CPU", lambda x: x.cpu()
    yield "sparse", lambda x: x.to_sparse()
    yield "a negated view", lambda x: torch._neg_view(x) if x.dtype != torch.bool else x
    yield "a zero tensor", zero_tensor
    yield "requires grad", lambda x: x.clone().requires_grad_() if x.dtype.is_floating_point else x
    yield "an inference tensor", inference_tensor
    yield "a parameter", lambda x: torch.nn.Parameter(x.clone(), requires_grad=False)


def zero_tensor(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        raise NotImplementedError("the simulated device has no tensors without memory")
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)


def inference_tensor(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def memory_of(written: Tensor, like: Tensor) -> Any:
    """Returns as much of the written tensor's memory as `like` takes."""
    whole = written.flatten() if written.is_contiguous() else whole_storage(written)
    whole = whole.view(torch.uint8)[: like.numel() * like.element_size()]
    return whole.view(like.dtype).view(like.shape)
