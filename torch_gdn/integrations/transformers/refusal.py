"""Says why an op would not take a call. The op's own checks run on meta tensors, and their answers are kept.

The tensors have one token, because no op limits the number of tokens. One answer therefore serves prompts of every
length, and a compiled graph needs no guard on it. An answer that quotes the sizes of such a tensor says so.
"""

import functools
import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Sizes = tuple[int, ...]
Form = tuple[Sizes, torch.dtype]  # of a tensor
SIZES_OF_TOKENS = re.compile(r"\[[BT], .* = \[1, ")  # the sizes that a tensor with tokens must have


def form(x: Tensor | None, first: int = 0, *before: int) -> Form | None:
    """Returns a tensor's sizes from dimension `first` on, with others before them, and its dtype."""
    return None if x is None else ((*before, *x.shape[first:]), x.dtype)


def strided(x: Tensor) -> tuple[Sizes, torch.dtype, Sizes]:
    return tuple(x.shape), x.dtype, x.stride()


def refusal_of(op: str, device: str = "meta", /, **call: Any) -> str:
    """Returns the op's error about the call without the op's name, or "". Forms stand for the tensors.

    On another device than "meta" the op runs, so that its kernel's limits count too. The call must then have no rows.
    """
    return ask(op, device, tuple(call.items()))


@torch.compiler.assume_constant_result
def ask(op: str, device: str, call: tuple[tuple[str, Any], ...]) -> str:
    return answer(op, device, call)


@functools.lru_cache(maxsize=2048)
def answer(op: str, device: str, call: tuple[tuple[str, Any], ...]) -> str:
    with _disable_current_modes():  # a mode that counts ops must not see the question
        return refused(op, **{name: empty(device, *x) if isinstance(x, tuple) else x for name, x in call})


def refused(op: str, **call: Any) -> str:
    try:
        getattr(torch.ops.gdn, op)(**call)
    except (TypeError, ValueError) as error:
        reason = str(error).removeprefix(f"{op}: ")
        return f"{reason} for one token of one sequence" if SIZES_OF_TOKENS.search(reason) else reason
    return ""


def empty(device: str, sizes: Sizes, dtype: torch.dtype, strides: Sizes | None = None) -> Tensor:
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    return torch.empty(sizes, **options) if strides is None else torch.empty_strided(sizes, strides, **options)
